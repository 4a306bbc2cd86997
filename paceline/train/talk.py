"""What the target is asked to write about: conversations from given prompts, and prompts that it invents
itself.

A model trained on chats also knows what users say: shown its own template up to the user's words, it writes a
prompt. So no data set is needed. Half of the answers are greedy, half drawn at a temperature. Invariant:
every conversation is drawn from the generator it is given, so a seed names a text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.loaders.tokenizer import Tokenizer
from paceline.train.writing import Ask, Conversation

Message = Mapping[str, str]
MARK = "\u2021\u2021here\u2021\u2021"  # stands for a user's words while the template is looked through
FOLLOW_UPS = (
    "Can you rephrase that in simpler words?", "Summarize your answer in one sentence.", "Give me three examples.", "Why?",
    "Now turn it into a list.", "Rewrite it in a more formal tone.", "What would be an argument against it?", "Make it shorter.",
    "Explain the second point in more detail.", "Write it as a short poem.", "Is there anything you would change about your answer?",
    "How could I check that this is right?", "Continue.", "Translate your answer into German.", "Now write the opposite view.",
    "Add a metaphor to each sentence.", "Which of these matters most, and why?", "Put it as a table.", "Give a concrete plan for a week.",
)  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "Answer briefly.", "You are a friendly teacher.", "You are an expert programmer.", "Be concise.",
    "You are a journalist. Write clearly.", "Think step by step.", "You are a translator.", "Answer only from the given text.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Voice:
    """How one conversation is carried on."""

    tokenizer: Tokenizer
    draw: random.Random
    max_prompt: int = 1400  # tokens; what grows longer is given up

    def seed(self) -> int:
        return self.draw.getrandbits(62)

    def temperature(self) -> float:
        return 0.0 if self.draw.random() < 0.5 else self.draw.choice((0.6, 0.8, 0.8, 0.9))

    def length(self) -> int:
        return self.draw.choice((96, 128, 160, 256, 320))

    def opening(self) -> list[Message]:
        """Now and then a system prompt of the user's own; else what the template says by itself."""
        return (
            [{"role": "system", "content": self.draw.choice(SYSTEM_PROMPTS)}]
            if self.draw.random() < 0.05
            else []
        )

    def read(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens).strip()


def chat(voice: Voice, turns: Sequence[str], temperature: float | None = None) -> Conversation:
    """The user's turns as given, the target's answers between them, all at one temperature."""
    warmth = voice.temperature() if temperature is None else temperature
    messages: list[Message] = voice.opening()
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = voice.tokenizer.encode_chat(messages)
        if len(prompt) > voice.max_prompt:
            return
        said = yield Ask(prompt, warmth, voice.length(), voice.seed())
        messages.append({"role": "assistant", "content": voice.read(said)})


def invented(voice: Voice, num_turns: int) -> Conversation:
    """The target writes the user's turns, too."""
    warmth = voice.temperature()
    messages: list[Message] = []
    for _ in range(num_turns):
        opening = _up_to_user(voice.tokenizer, messages)
        if len(opening) > voice.max_prompt:
            return
        turn = yield Ask(opening, voice.draw.choice((0.8, 1.0, 1.0)), 160, voice.seed(), is_kept=False)
        text = voice.read(turn)
        if len(text) < 4:
            return
        messages.append({"role": "user", "content": text})
        prompt = voice.tokenizer.encode_chat(messages)
        said = yield Ask(prompt, warmth, voice.length(), voice.seed())
        messages.append({"role": "assistant", "content": voice.read(said)})


def _up_to_user(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The template up to where the user's next words stand."""
    text = tokenizer.chat([*messages, {"role": "user", "content": MARK}], add_generation_prompt=False)
    return tokenizer.encode(text[: text.index(MARK)], add_special=False)


def raw(voice: Voice, text: str) -> Conversation:
    """For a model without a chat template: it goes on writing a text, or starts one."""
    prompt = voice.tokenizer.encode(text)
    if prompt and len(prompt) <= voice.max_prompt:
        yield Ask(prompt, voice.temperature(), voice.length(), voice.seed())


def about(
    voice: Voice, request: str, use: Callable[[str], str | None], times: int = 1, warmth: float = 0.9
) -> Conversation:
    """First the target writes a text (an article, a sentence in German, a question); then it is asked to do
    something with it.
    """
    opening = voice.tokenizer.encode_chat([{"role": "user", "content": request}])
    if len(opening) > voice.max_prompt:
        return
    said = yield Ask(opening, warmth, 220, voice.seed(), is_kept=False)
    for _ in range(times):
        prompt = use(voice.read(said))
        if prompt:
            yield from chat(voice, [prompt])


def conversations(
    tokenizer: Tokenizer, prompts: Sequence[Sequence[str]], seed: int
) -> Iterator[Conversation]:
    """Without end: the given prompts in a new order each time round, each sometimes with a follow-up; without
    prompts, invented ones.
    """
    voice = Voice(tokenizer, random.Random(seed))
    has_template = tokenizer.has_chat_template
    order = list(range(len(prompts)))
    while True:
        voice.draw.shuffle(order)
        for index in order:
            if has_template:
                extra = [voice.draw.choice(FOLLOW_UPS)] if voice.draw.random() < 0.15 else []
                yield chat(voice, [*prompts[index], *extra])
            else:
                yield raw(voice, prompts[index][0])
        if not order or voice.draw.random() < 0.5:
            yield (
                invented(voice, voice.draw.choice((1, 1, 2)))
                if has_template
                else raw(voice, _opening_word(voice))
            )


def _opening_word(voice: Voice) -> str:
    """A text has to start somewhere."""
    return voice.draw.choice(
        (
            "The",
            "A",
            "In",
            "When",
            "How",
            "It",
            "def",
            "1.",
            "#",
            "Dear",
            "We",
            "I",
            "There",
            "What",
            "On",
            "If",
        )
    )


QUESTION = re.compile(
    r"(?:^|[.:\n]\s*|\")((?:who|what|where|when|why|how|which|is|are|does|do|can|did)\b[^.?!\n\"]{8,160}\?)",
    re.IGNORECASE,
)


def questions_in(texts: Sequence[str]) -> list[str]:
    """Questions that stand in the texts, each once."""
    return list(dict.fromkeys(found.strip() for text in texts for found in QUESTION.findall(text)))
