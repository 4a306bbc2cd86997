"""What the target is asked to write about: given prompts, and those that it invents itself.

A model trained on chats knows what users say: shown its template up to the user's words, it writes a prompt.
Half of the answers are greedy. Invariant: all is drawn from the generator given, so a seed names a text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.loaders.tokenizer import Tokenizer

Message = Mapping[str, str]
Use = Callable[[str], str | None]  # of a text that was written: what is asked about it
MARK = "\u2021\u2021here\u2021\u2021"  # stands for a user's words while the template is looked through
FOLLOW_UPS = (
    "Can you rephrase that in simpler words?", "Summarize your answer in one sentence.", "Why?", "Continue.",
    "Now turn it into a list.", "Rewrite it in a more formal tone.", "What would be an argument against it?",
    "Explain the second point in more detail.", "Write it as a short poem.", "Give me three examples.",
    "Is there anything you would change about your answer?", "How could I check that this is right?",
    "Make it shorter.", "Translate your answer into German.", "Now write the opposite view.",
    "Add a metaphor to each sentence.", "Which of these matters most, and why?", "Put it as a table.",
    "Give a concrete plan for a week.",
)  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "Answer briefly.", "You are a friendly teacher.", "Be concise.",
    "You are an expert programmer.", "You are a journalist. Write clearly.", "Think step by step.",
    "You are a translator.", "Answer only from the given text.",
)  # fmt: skip
FIRST_WORDS = (
    "The", "A", "In", "When", "How", "It", "def", "1.", "#", "Dear", "We", "I", "There", "What", "On", "If",
)  # fmt: skip


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
        return [{"role": "system", "content": self.draw.choice(SYSTEM_PROMPTS)}]

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


def about(style: Style, request: str, use: Use, times: int = 1, temperature: float = 0.9) -> Conversation:
    """First the target writes a text, such as an article; then it is asked to do something with it."""
    opening = style.tokenizer.encode_chat([{"role": "user", "content": request}])
    answer = yield Ask(opening, temperature, 220, style.seed(), is_kept=False)
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
                extra = [style.draw.choice(FOLLOW_UPS)] if style.draw.random() < 0.15 else []
                yield chat(style, [*turns[index], *extra])
            else:
                yield raw(style, turns[index][0])
        if order and style.draw.random() >= 0.5:
            continue
        if tokenizer.has_chat_template:
            yield chat(style, [None] * style.draw.choice((1, 1, 2)))
        else:
            yield raw(style, style.draw.choice(FIRST_WORDS))


QUESTION_WORDS = "who|what|where|when|why|how|which|is|are|does|do|can|did"
QUESTION = re.compile(rf"(?:^|[.:\n]\s*|\")((?:{QUESTION_WORDS})\b[^.?!\n\"]{{8,160}}\?)", re.IGNORECASE)


def questions_in(texts: Sequence[str]) -> list[str]:
    """Questions that stand in the texts, each once."""
    return list(dict.fromkeys(found.strip() for text in texts for found in QUESTION.findall(text)))
