"""The default model writes the text that its drafters learn from: many engines on one GPU, for a bounded
time.

    python scripts/write_text.py --prompts train_prompts.jsonl.gz --out text --processes 10 --seconds 420
    --seed 1

Prompts come from a .jsonl or .jsonl.gz file with {"prompt": ...} lines; they are asked as they are, with
follow-ups, as texts to summarize, to ask questions about, to translate or rewrite, with other numbers; and
the model invents some. Half the answers are greedy. Run it again with another seed for more. Output: shards
(.npz, see paceline/train/shards.py). Invariant: a process that dies costs its own text since it last saved,
and nobody else's.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.train.shards import (
    SHARD_TOKENS,
    Written,
    from_written,
    joined,
    load_shard,
    save_shard,
    save_shards,
)
from paceline.train.talk import FOLLOW_UPS, Voice, about, chat, invented, questions_in, raw
from paceline.train.writing import Conversation, Writer

SAVE_EVERY = 20.0  # seconds
LANGUAGES = ("German",) * 6 + ("French", "Spanish", "Italian", "Dutch", "Portuguese")
TOPICS = (
    "politics", "football", "a company's results", "the weather", "a court case", "health", "a concert", "traffic", "schools", "a bank",
    "a scientific discovery", "travel", "a film", "technology", "an election", "food", "the environment", "a museum", "the police", "art",
    "a famous singer", "housing", "an accident", "energy prices", "a small town", "the army", "a coach", "a minister", "the sea", "work",
)  # fmt: skip
REWRITES = (
    "Rewrite the following text in simpler words:", "Correct the mistakes in this text:", "Rewrite this as a news report:", "Paraphrase:",
    "Turn the following into bullet points:", "Rewrite this text in the first person:", "Make this text more polite:", "Shorten this text:",
    "Extract all names of people and places from this text:", "List the most important facts of the following text:",
    "Continue the following text:", "Give this text a title and say what it is about:", "Repeat the following text:",
)  # fmt: skip
SUMMARIES = (
    "Summarize: {}",
    "Summarize the following article: {}",
    "{}\n\nTL;DR:",
    "Write a summary of this text.\n\n{}",
    "Summarize: {}",
)
LISTS = (
    "List ten {}.", "Give me five tips about {}.", "What are the advantages and disadvantages of {}?", "Write a guide about {}.",
    "Write a short story about {}.", "Write an email about {}.", "Write a Python function about {}.", "Explain {} to a child.",
    "Write a poem about {}.", "Write an essay about {}.", "Write a dialogue about {}.", "Make a table about {}.", "Write JSON about {}.",
)  # fmt: skip
TRANSLATIONS = (
    "Translate {a} to {b}: {t}",
    "Translate {a} to {b}: {t}",
    "Translate this {a} text to {b}:\n{t}",
    "{t}\n\nTranslate to {b}.",
)


class Material:
    """The given prompts, sorted into what can be made of them."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.prompts = [p for p in prompts if len(p) < 5000]
        self.math = [
            p
            for p in prompts
            if len(re.findall(r"\d+", p)) >= 2 and p.rstrip().endswith("?") and len(p) < 700
        ]
        is_math = set(self.math)
        self.questions = questions_in([p for p in prompts if p not in is_math])
        passages = [part.strip() for p in prompts for part in p.split("\n") if len(part) >= 200]
        self.passages = list(dict.fromkeys(passages))
        self.articles = [
            text for p in prompts if len(text := "\n".join(x for x in p.split("\n") if len(x) >= 60)) >= 700
        ]

    def article(self, draw: random.Random) -> str:
        text, wanted = draw.choice(self.articles), draw.choice((700, 1500, 3000, 4500))
        while len(text) < wanted:
            text = f"{text}\n{draw.choice(self.articles)}"[:4800]
        return text

    def context(self, draw: random.Random) -> str:
        return "\n\n".join(draw.sample(self.passages, draw.choice((1, 2, 3, 4, 5))))[
            : draw.choice((1500, 2500, 3500, 4200))
        ]


def other_numbers(text: str, draw: random.Random) -> str:
    """The same exercise with other numbers of the same size."""

    def replaced(found: re.Match[str]) -> str:
        number = found.group()
        if len(number) > 6 or draw.random() < 0.2:
            return number
        return str(draw.randint(max(2, 10 ** (len(number) - 1)), 10 ** len(number) - 1))

    return re.sub(r"(?<![\d.,])\d+(?![\d.,]*\d)", replaced, text)


def _first_sentence(text: str, draw: random.Random) -> str | None:
    sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+|\n", text) if 20 < len(s.strip()) < 400]
    return draw.choice(sentences) if sentences else None


def translation(voice: Voice, _: Material) -> Conversation:
    draw, language = voice.draw, voice.draw.choice(LANGUAGES)
    into = draw.choice(("English", "English", "English", "English", "French", "German"))
    shape = draw.choice(TRANSLATIONS)

    def use(text: str) -> str | None:
        chosen = _first_sentence(text, draw)
        return shape.format(a=language, b=into, t=chosen) if chosen else None

    kind = draw.choice(
        ("a news article", "three sentences", "a short news report", "a paragraph", "a press release")
    )
    return about(
        voice,
        f"Write {kind} in {language} about {draw.choice(TOPICS)}. Answer only in {language}.",
        use,
        3,
        0.6,
    )


def of_passage(voice: Voice, material: Material) -> Conversation:
    """Into another language, from a text that is not the model's."""
    sentence = _first_sentence(voice.draw.choice(material.passages), voice.draw) or "Good morning."
    return chat(voice, [f"Translate English to {voice.draw.choice(LANGUAGES)}: {sentence}"])


def retrieval(voice: Voice, material: Material) -> Conversation:
    """Passages, then a question about one of them, which the model writes itself; or any question."""
    draw, context = voice.draw, material.context(voice.draw)
    if draw.random() < 0.4:
        return chat(voice, [f"{context}\n{draw.choice(material.questions)}"])

    def use(text: str) -> str | None:
        found = questions_in([text]) or [text.split("\n")[0][:200]]
        return (
            f"{context}\n{found[0]}"
            if draw.random() < 0.7
            else f"Context:\n{context}\n\nQuestion: {found[0]}\nAnswer:"
        )

    part = draw.choice(context.split("\n\n"))
    return about(voice, f"{part[:1200]}\n\nWrite one question that this text answers.", use)


def question(voice: Voice, material: Material) -> Conversation:
    text = voice.draw.choice(material.questions)
    style = voice.draw.random()
    return chat(voice, [text.lower().rstrip("?") + "?" if style < 0.4 else text[:1].upper() + text[1:]])


def dialogue(voice: Voice, material: Material) -> Conversation:
    first = voice.draw.choice(material.prompts)
    return chat(voice, [first, *voice.draw.sample(FOLLOW_UPS, voice.draw.choice((1, 1, 2)))])


KINDS: tuple[tuple[float, Callable[[Voice, Material], Conversation]], ...] = (
    (0.12, lambda v, m: chat(v, [v.draw.choice(m.prompts)])),
    (0.20, lambda v, m: invented(v, v.draw.choice((1, 1, 1, 2, 3)))),
    (0.04, dialogue),
    (0.14, question),
    (
        0.06,
        lambda v, m: chat(
            v,
            [
                v.draw.choice(m.math)
                if v.draw.random() < 0.3
                else other_numbers(v.draw.choice(m.math), v.draw)
            ],
        ),
    ),
    (0.16, lambda v, m: chat(v, [v.draw.choice(SUMMARIES).format(m.article(v.draw))])),
    (0.10, retrieval),
    (0.05, translation),
    (0.02, of_passage),
    (0.05, lambda v, m: chat(v, [f"{v.draw.choice(REWRITES)}\n\n{v.draw.choice(m.passages)}"])),
    (0.02, lambda v, m: raw(v, v.draw.choice(m.passages)[: v.draw.randint(40, 400)])),
    (0.04, lambda v, m: chat(v, [v.draw.choice(LISTS).format(v.draw.choice(TOPICS))])),
)


def conversations(tokenizer: Any, material: Material, seed: int) -> Iterator[Conversation]:
    voice = Voice(tokenizer, random.Random(seed))
    weights = [weight for weight, _ in KINDS]
    while True:
        _, kind = voice.draw.choices(KINDS, weights)[0]
        yield kind(voice, material)


def read_prompts(path: Path) -> list[str]:
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode().split("\n")
    return [json.loads(line)["prompt"] for line in lines if line.strip()]


def work(number: int, asked: argparse.Namespace, deadline: float) -> None:
    """One engine: writes until the deadline, saves now and then."""
    import torch

    from paceline import LLM

    torch.set_num_threads(1)
    material = Material(read_prompts(asked.prompts))
    with LLM(
        asked.model, speculative_config=None, device=asked.device, max_num_seqs=asked.batch, max_num_batched_tokens=asked.batch + 8192,
        max_model_len=2048, kv_cache_memory=asked.kv_gib << 30, enable_prefix_caching=False, progress=False,
    ) as llm:  # fmt: skip
        writer, started, saved = Writer(llm, asked.batch), time.time(), time.time()
        made: list[Written] = []
        parts = itertools.count()

        def save() -> None:
            path = asked.out / "parts" / f"{number:02d}-{next(parts):04d}.npz"
            save_shard(path, from_written(made, llm.checkpoint.config.vocab_size))
            made.clear()

        talks = conversations(llm.tokenizer, material, asked.seed * 1000 + number)
        for written in writer.write(talks, lambda: time.time() > deadline):
            made.append(written)
            if time.time() - saved > SAVE_EVERY:
                saved = time.time()
                save()
                print(
                    f"[{number:2d}] {writer.num_tokens:,} tokens, {writer.num_tokens / (saved - started):,.0f} a second",
                    flush=True,
                )
        if made:
            save()
        print(
            f"[{number:2d}] done: {writer.num_tokens:,} tokens in {time.time() - started:.0f} s", flush=True
        )


def start_sharing() -> bool:
    """NVIDIA's daemon that lets processes run on a GPU at the same time instead of in turns."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or subprocess.run([control, "-d"], check=False, capture_output=True).returncode:
        return False
    trial = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda').item()"]
    try:
        if subprocess.run(trial, check=False, capture_output=True, timeout=60).returncode == 0:
            return True
    except subprocess.TimeoutExpired:
        pass
    stop_sharing()  # it starts where nobody can use it: in a container, say
    return False


def stop_sharing() -> None:
    subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False, capture_output=True, timeout=30)


def gather(asked: argparse.Namespace, seconds: float) -> None:
    """All parts in shards, sequences of all kinds mixed as they were written."""
    parts = sorted((asked.out / "parts").glob("*.npz"))
    if not parts:
        raise SystemExit("nothing was written in the time given; give more --seconds")
    texts = joined([load_shard(path) for path in parts])
    paths = save_shards(asked.out, texts, f"text-{asked.seed:03d}", asked.shard_tokens)
    for path in parts:
        path.unlink()
    sizes = [path.stat().st_size / 2**20 for path in paths]
    print(json.dumps({
        "sequences": len(texts), "tokens": int(texts.starts[-1]), "answer_tokens": texts.num_answer_tokens,
        "answer_tokens_per_s": round(texts.num_answer_tokens / seconds), "greedy_share": round(float((texts.temperature == 0).mean()), 3),
        "digest": texts.digest(), "files": {path.name: f"{size:.1f} MiB" for path, size in zip(paths, sizes, strict=True)},
    }), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--kv-gib", type=int, default=8, help="of each process")
    parser.add_argument("--seconds", type=float, default=420, help="in all, the saving not counted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS)
    parser.add_argument("--no-sharing", action="store_true", help="do not start the MPS daemon")
    asked = parser.parse_args()
    started = time.time()
    (asked.out / "parts").mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    is_shared = asked.device != "cpu" and not asked.no_sharing and start_sharing()
    print(f"GPU shared by MPS: {is_shared}", flush=True)
    context = multiprocessing.get_context("spawn")
    deadline = started + asked.seconds
    workers = [context.Process(target=work, args=(i, asked, deadline)) for i in range(asked.processes)]
    for worker in workers:
        worker.start()
        time.sleep(0.5)  # who is first compiles, who comes later finds more and more compiled
    for worker in workers:
        worker.join()
    if is_shared:
        stop_sharing()
    gather(asked, time.time() - started)


if __name__ == "__main__":
    main()
