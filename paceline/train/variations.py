"""Other tasks made of given prompts (to summarize, translate, rewrite, ask about, with other numbers): a head
is good where its text was of the same kind, so one set of prompts is made to cover many kinds.

Invariant: everything is drawn from the generator of the style, so a seed names a text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence

from paceline.train.talk import FOLLOW_UPS, Conversation, Style, about, chat, questions_in, raw

LONGEST_PROMPT = 5000  # characters
LANGUAGES = ("German",) * 6 + ("French", "Spanish", "Italian", "Dutch", "Portuguese")
TOPICS = (
    "politics", "football", "a company's results", "the weather", "a court case", "health", "a concert",
    "traffic", "schools", "a bank", "a scientific discovery", "travel", "a film", "technology", "an election",
    "food", "the environment", "a museum", "the police", "art", "a famous singer", "housing", "an accident",
    "energy prices", "a small town", "the army", "a coach", "a minister", "the sea", "work",
)  # fmt: skip
REWRITES = (
    "Rewrite the following text in simpler words:", "Correct the mistakes in this text:", "Paraphrase:",
    "Rewrite this as a news report:", "Turn the following into bullet points:", "Shorten this text:",
    "Rewrite this text in the first person:", "Make this text more polite:", "Continue the following text:",
    "Extract all names of people and places from this text:", "Repeat the following text:",
    "List the most important facts of the following text:",
    "Give this text a title and say what it is about:",
)  # fmt: skip
SUMMARIES = (
    "Summarize: {}", "Summarize the following article: {}", "{}\n\nTL;DR:",
    "Write a summary of this text.\n\n{}", "Summarize: {}",
)  # fmt: skip
LISTS = (
    "List ten {}.", "Give me five tips about {}.", "What are the advantages and disadvantages of {}?",
    "Write a guide about {}.", "Write a short story about {}.", "Write an email about {}.",
    "Write a Python function about {}.", "Explain {} to a child.", "Write a poem about {}.",
    "Write an essay about {}.", "Write a dialogue about {}.", "Make a table about {}.",
    "Write JSON about {}.",
)  # fmt: skip
TRANSLATIONS = (
    "Translate {a} to {b}: {t}", "Translate {a} to {b}: {t}", "Translate this {a} text to {b}:\n{t}",
    "{t}\n\nTranslate to {b}.",
)  # fmt: skip


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

    def context(self, draw: random.Random) -> str:
        count = min(draw.choice((1, 2, 3, 4, 5)), len(self.passages))
        text = "\n\n".join(draw.sample(self.passages, count))
        return text[: draw.choice((1500, 2500, 3500, 4200))]


def other_numbers(text: str, draw: random.Random) -> str:
    """The same exercise with other numbers of the same size."""

    def replaced(found: re.Match[str]) -> str:
        number = found.group()
        if len(number) > 6 or draw.random() < 0.2:
            return number
        return str(draw.randint(max(2, 10 ** (len(number) - 1)), 10 ** len(number) - 1))

    return re.sub(r"(?<![\d.,])\d+(?![\d.,]*\d)", replaced, text)


def _sentence(text: str, draw: random.Random) -> str | None:
    sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+|\n", text) if 20 < len(s.strip()) < 400]
    return draw.choice(sentences) if sentences else None


def from_english(style: Style, material: Material) -> Conversation:
    sentence = _sentence(style.draw.choice(material.passages), style.draw) or "Good morning."
    return chat(style, [f"Translate English to {style.draw.choice(LANGUAGES)}: {sentence}"])


def translation(style: Style, material: Material) -> Conversation:
    draw, language = style.draw, style.draw.choice(LANGUAGES)
    into = draw.choice(("English", "English", "English", "English", "French", "German"))
    shape = draw.choice(TRANSLATIONS)

    def use(text: str) -> str | None:
        chosen = _sentence(text, draw)
        return shape.format(a=language, b=into, t=chosen) if chosen else None

    kinds = ("a news article", "three sentences", "a short news report", "a paragraph", "a press release")
    what = f"Write {draw.choice(kinds)} in {language} about {draw.choice(TOPICS)}."
    return about(style, f"{what} Answer only in {language}.", use, times=3, temperature=0.6)


def retrieval(style: Style, material: Material) -> Conversation:
    """Passages, then a question about one of them, which the model writes itself; or any question."""
    draw, context = style.draw, material.context(style.draw)
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
    return chat(style, [first, *style.draw.sample(FOLLOW_UPS, style.draw.choice((1, 1, 2)))])


def exercise(style: Style, material: Material) -> Conversation:
    text = style.draw.choice(material.math)
    return chat(style, [text if style.draw.random() < 0.3 else other_numbers(text, style.draw)])


Task = Callable[[Style, Material], Conversation]
# its share, what it is made of, and the task
TASKS: tuple[tuple[float, str, Task], ...] = (
    (0.12, "prompts", lambda s, m: chat(s, [s.draw.choice(m.prompts)])),
    (0.20, "prompts", lambda s, m: chat(s, [None] * s.draw.choice((1, 1, 1, 2, 3)))),
    (0.04, "prompts", dialogue),
    (0.14, "questions", question),
    (0.06, "math", exercise),
    (0.16, "articles", lambda s, m: chat(s, [s.draw.choice(SUMMARIES).format(m.article(s.draw))])),
    (0.10, "passages", retrieval),
    (0.05, "prompts", translation),
    (0.02, "passages", from_english),
    (0.05, "passages", lambda s, m: chat(s, [f"{s.draw.choice(REWRITES)}\n\n{s.draw.choice(m.passages)}"])),
    (0.02, "passages", lambda s, m: raw(s, s.draw.choice(m.passages)[: s.draw.randint(40, 400)])),
    (0.04, "prompts", lambda s, m: chat(s, [s.draw.choice(LISTS).format(s.draw.choice(TOPICS))])),
)


def varied(style: Style, prompts: Sequence[str]) -> Iterator[Conversation]:
    """Without end; tasks for which the prompts hold nothing are left out."""
    material = Material(prompts)
    tasks = [task for task in TASKS if getattr(material, task[1])]
    while tasks:
        _, _, task = style.draw.choices(tasks, [share for share, _, _ in tasks])[0]
        yield task(style, material)
