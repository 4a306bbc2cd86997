"""Golden token streams: what plain decoding of the default model says, written down once and held for ever.

Speculation changes no token, so one stream a prompt, dtype and way of choosing is enough: every drafter, alone and in a
batch, must say the same. `python -m tests.golden.streams PATH [--device cuda]` writes the streams of the tree it runs in.
Invariant: the file is written by plain decoding alone, and read by tests that draft.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams

PATH = Path(__file__).parent / "streams.json"
SHIPPED = Path(__file__).parents[2] / "paceline" / "data" / "prompts.jsonl"
NUM_TOKENS = 32
CPU = {
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int4"},
    "float32": {"dtype": "float32"},
    "torch": {"dtype": "float32", "kernels": "torch"},
}
CUDA = {name: {"dtype": name, "device": "cuda", "exact": True} for name in ("bfloat16", "int8", "int4")}
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NUM_TOKENS),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=NUM_TOKENS),
    "drawn": SamplingParams(
        temperature=0.7, seed=11, max_tokens=NUM_TOKENS
    ),  # a temperature alone: a device may choose
}


def prompts() -> dict[str, str]:
    """The first two shipped prompts of each category: by id, what the user asks first."""
    taken: dict[str, int] = {}
    found: dict[str, str] = {}
    for line in SHIPPED.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        taken[record["category"]] = taken.get(record["category"], 0) + 1
        if taken[record["category"]] <= 2:
            found[str(record["question_id"])] = record["turns"][0]
    return found


def streams_of(llm: LLM, way: str, is_batched: bool) -> dict[str, list[int]]:
    """By prompt: the tokens said. Seeded requests of a batch have the seed each would have alone."""
    asked = prompts()
    messages = [[{"role": "user", "content": text}] for text in asked.values()]
    if is_batched:
        results = llm.chat(messages, PARAMS[way])
    else:
        results = [llm.chat([message], PARAMS[way])[0] for message in messages]
    return {name: result.token_ids for name, result in zip(asked, results, strict=True)}


def write(path: Path, device: str) -> None:
    found: dict[str, Any] = {"machine": platform.machine(), "device": device}
    for name, options in (CPU if device == "cpu" else CUDA).items():
        with LLM(speculative_config=None, progress=False, **options) as llm:
            found[name] = {way: streams_of(llm, way, is_batched=False) for way in PARAMS}
        print(f"{name}: {len(PARAMS)} x {len(prompts())} streams", flush=True)
    lines = (
        json.dumps(found, indent=None, separators=(",", ":")).replace('},"', '},\n"').replace('],"', '],\n"')
    )
    path.write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    asked = parser.parse_args()
    write(asked.path, asked.device)
