"""What the target is asked to write about: given prompts, those that it invents itself, and other tasks made
of given ones (`varied`: to summarize, translate, rewrite, ask about, with other numbers). A head is good
where its text was of the same kind, so one set of prompts is made to cover many kinds.

A model trained on chats knows what users say: shown its template up to the user's words, it writes a prompt.
Half of the answers are greedy. Invariant: all is drawn from the generator given, so a seed names a text.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.loaders.tokenizer import Tokenizer

Message = Mapping[str, str]
Use = Callable[[str], str | None]  # of a text that was written: what is asked about it
SHIPPED = Path(__file__).parent.parent / "data" / "talk.toml"
PHRASES: dict[str, list[str]] = tomllib.loads(SHIPPED.read_text(encoding="utf-8"))  # by what they are for
LONGEST_PROMPT = 5000  # characters, of those that are varied
QUESTION_WORDS = "who|what|where|when|why|how|which|is|are|does|do|can|did"
QUESTION = re.compile(rf"(?:^|[.:\n]\s*|\")((?:{QUESTION_WORDS})\b[^.?!\n\"]{{8,160}}\?)", re.IGNORECASE)
NUMBER = re.compile(r"(?<![\d.,])\d+(?![\d.,]*\d)")
MARK = "\u2021\u2021here\u2021\u2021"  # stands for a user's words while the template is looked through


class Ask(NamedTuple):
    """One completion that a conversation wants."""

    prompt: Sequence[int]
    temperature: float
    max_tokens: int
    seed: int
    is_kept: bool = True  # a text to learn from; else a step towards one, such as an invented prompt


Conversation = Generator[Ask, list[int], None]


class Style(NamedTuple):
    """How one conversation is carried on."""

    tokenizer: Tokenizer
    draw: random.Random

    def seed(self) -> int:
        return self.draw.getrandbits(62)

    def temperature(self) -> float:
        return 0.0 if self.draw.random() < 0.5 else self.draw.choice((0.6, 0.8, 0.8, 0.9))

    def length(self) -> int:
        return self.draw.choice((96, 128, 160, 256, 320))

    def opening(self) -> list[Message]:
        """Now and then a system prompt of the user's own; else what the template says by itself."""
        if self.draw.random() >= 0.05:
            return []
        return [{"role": "system", "content": self.phrase("system_prompts")}]

    def phrase(self, kind: str) -> str:
        return self.draw.choice(PHRASES[kind])

    def read(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens).strip()


def chat(style: Style, turns: Sequence[str | None]) -> Conversation:
    """The user's turns, written by the target where None; its answers between them, at one temperature."""
    temperature = style.temperature()
    messages: list[Message] = [] if None in turns else style.opening()
    for turn in turns:
        if turn is None:
            shown = [*messages, {"role": "user", "content": MARK}]
            template = style.tokenizer.chat(shown, add_generation_prompt=False)
            opening = style.tokenizer.encode(template[: template.index(MARK)], add_special=False)
            ask = Ask(opening, style.draw.choice((0.8, 1.0, 1.0)), 160, style.seed(), is_kept=False)
            turn = style.read((yield ask))
            if len(turn) < 4:
                return
        messages.append({"role": "user", "content": turn})
        prompt = style.tokenizer.encode_chat(messages)
        answer = yield Ask(prompt, temperature, style.length(), style.seed())
        messages.append({"role": "assistant", "content": style.read(answer)})


def raw(style: Style, text: str) -> Conversation:
    """For a model without a chat template: it goes on writing a text, or starts one."""
    yield Ask(style.tokenizer.encode(text), style.temperature(), style.length(), style.seed())


def about(
    style: Style, request: str, use: Use, times: int = 1, temperature: float = 0.9, is_kept: bool = False
) -> Conversation:
    """First the target writes a text, such as an article; then it is asked to do something with it."""
    opening = style.tokenizer.encode_chat([{"role": "user", "content": request}])
    answer = yield Ask(opening, temperature, 220, style.seed(), is_kept)
    for _ in range(times):
        prompt = use(style.read(answer))
        if prompt:
            yield from chat(style, [prompt])


def conversations(tokenizer: Tokenizer, turns: Sequence[Sequence[str]], seed: int) -> Iterator[Conversation]:
    """Without end: the prompts in a new order each time round, some with a follow-up; and invented ones."""
    style = Style(tokenizer, random.Random(seed))
    order = list(range(len(turns)))
    while True:
        style.draw.shuffle(order)
        for index in order:
            if tokenizer.has_chat_template:
                extra = [style.phrase("follow_ups")] if style.draw.random() < 0.15 else []
                yield chat(style, [*turns[index], *extra])
            else:
                yield raw(style, turns[index][0])
        if order and style.draw.random() >= 0.5:
            continue
        if tokenizer.has_chat_template:
            yield chat(style, [None] * style.draw.choice((1, 1, 2)))
        else:
            yield raw(style, style.phrase("first_words"))


def questions_in(texts: Sequence[str]) -> list[str]:
    """Questions that stand in the texts, each once."""
    return list(dict.fromkeys(found.strip() for text in texts for found in QUESTION.findall(text)))


class Material:
    """The given prompts, sorted into what can be made of them."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.prompts = [p for p in prompts if len(p) < LONGEST_PROMPT]
        short = [p for p in prompts if p.rstrip().endswith("?") and len(p) < 700]
        self.math = [p for p in short if len(re.findall(r"\d+", p)) >= 2]
        is_math = set(self.math)
        self.questions = questions_in([p for p in prompts if p not in is_math])
        passages = [part.strip() for p in prompts for part in p.split("\n") if len(part) >= 200]
        self.passages = list(dict.fromkeys(passages))
        texts = ["\n".join(line for line in p.split("\n") if len(line) >= 60) for p in prompts]
        self.articles = [text for text in texts if len(text) >= 700]

    def article(self, draw: random.Random) -> str:
        text, wanted = draw.choice(self.articles), draw.choice((700, 1500, 3000, 4500))
        while len(text) < wanted:
            text = f"{text}\n{draw.choice(self.articles)}"[:4800]
        return text


def _sentence(text: str, draw: random.Random) -> str | None:
    sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+|\n", text) if 20 < len(s.strip()) < 400]
    return draw.choice(sentences) if sentences else None


def from_english(style: Style, material: Material) -> Conversation:
    sentence = _sentence(style.draw.choice(material.passages), style.draw) or "Good morning."
    return chat(style, [f"Translate English to {style.phrase('languages')}: {sentence}"])


def translation(style: Style, material: Material) -> Conversation:
    draw, language = style.draw, style.phrase("languages")
    into = draw.choice(("English", "English", "English", "English", "French", "German"))
    shape = style.phrase("translations")

    def use(text: str) -> str | None:
        chosen = _sentence(text, draw)
        return shape.format(a=language, b=into, t=chosen) if chosen else None

    kinds = ("a news article", "three sentences", "a short news report", "a paragraph", "a press release")
    what = f"Write {draw.choice(kinds)} in {language} about {style.phrase('topics')}."
    return about(style, f"{what} Answer only in {language}.", use, times=3, temperature=0.6)


def retrieval(style: Style, material: Material) -> Conversation:
    """Passages, then a question about one of them, which the model writes itself; or any question."""
    draw, passages = style.draw, material.passages
    count = min(draw.choice((1, 2, 3, 4, 5)), len(passages))
    context = "\n\n".join(draw.sample(passages, count))[: draw.choice((1500, 2500, 3500, 4200))]
    if material.questions and draw.random() < 0.4:
        return chat(style, [f"{context}\n{draw.choice(material.questions)}"])

    def use(text: str) -> str | None:
        found = questions_in([text]) or [text.split("\n")[0][:200]]
        if draw.random() < 0.7:
            return f"{context}\n{found[0]}"
        return f"Context:\n{context}\n\nQuestion: {found[0]}\nAnswer:"

    part = draw.choice(context.split("\n\n"))
    return about(style, f"{part[:1200]}\n\nWrite one question that this text answers.", use)


def question(style: Style, material: Material) -> Conversation:
    """As it stands, or as it would be typed in a hurry."""
    text = style.draw.choice(material.questions)
    is_lower = style.draw.random() < 0.4
    return chat(style, [text.lower().rstrip("?") + "?" if is_lower else text[:1].upper() + text[1:]])


def dialogue(style: Style, material: Material) -> Conversation:
    first = style.draw.choice(material.prompts)
    return chat(style, [first, *style.draw.sample(PHRASES["follow_ups"], style.draw.choice((1, 1, 2)))])


def exercise(style: Style, material: Material) -> Conversation:
    """As it stands, or with other numbers of the same size."""
    draw, text = style.draw, style.draw.choice(material.math)

    def other(found: re.Match[str]) -> str:
        number = found.group()
        if len(number) > 6 or draw.random() < 0.2:
            return number
        return str(draw.randint(max(2, 10 ** (len(number) - 1)), 10 ** len(number) - 1))

    return chat(style, [text if draw.random() < 0.3 else NUMBER.sub(other, text)])


Task = Callable[[Style, Material], Conversation]
# its share, what it is made of, and the task
TASKS: tuple[tuple[float, str, Task], ...] = (
    (0.12, "prompts", lambda s, m: chat(s, [s.draw.choice(m.prompts)])),
    (0.20, "prompts", lambda s, m: chat(s, [None] * s.draw.choice((1, 1, 1, 2, 3)))),
    (0.04, "prompts", dialogue),
    (0.14, "questions", question),
    (0.06, "math", exercise),
    (0.16, "articles", lambda s, m: chat(s, [s.phrase("summaries").format(m.article(s.draw))])),
    (0.10, "passages", retrieval),
    (0.05, "prompts", translation),
    (0.02, "passages", from_english),
    (0.05, "passages", lambda s, m: chat(s, [f"{s.phrase('rewrites')}\n\n{s.draw.choice(m.passages)}"])),
    (0.02, "passages", lambda s, m: raw(s, s.draw.choice(m.passages)[: s.draw.randint(40, 400)])),
    (0.04, "prompts", lambda s, m: chat(s, [s.phrase("lists").format(s.phrase("topics"))])),
)


def varied(style: Style, prompts: Sequence[str]) -> Iterator[Conversation]:
    """Without end; tasks for which the prompts hold nothing are left out."""
    material = Material(prompts)
    tasks = [task for task in TASKS if getattr(material, task[1])]
    while tasks:
        _, _, task = style.draw.choices(tasks, [share for share, _, _ in tasks])[0]
        yield task(style, material)
