"""Conversations about programs, for models that write code: the target thinks of an exercise and solves it,
or writes a program and is then asked to change, test, explain or translate it.

Invariant: what is asked and every program in it are the target's own, so no set of exercises is needed and
two conversations are rarely alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from paceline.train.talk import Conversation, Style, about

FENCED = re.compile(r"```[\w+#.-]*\n(.*?)(?:```|\Z)", re.DOTALL)
FEWEST = 40  # characters of an exercise or a program


def program_in(text: str) -> str | None:
    """The longest fenced block of an answer, its end perhaps missing."""
    found = max((part.strip() for part in FENCED.findall(text)), key=len, default="")
    return found if len(found) >= FEWEST else None


def exercise(style: Style) -> Conversation:
    """The target states a task, and is then given it."""
    language, topic = style.phrase("code_languages"), style.phrase("programs")
    wanted, ending = style.phrase("exercises"), style.phrase("answer_in").format(l=language)

    def use(text: str) -> str | None:
        return f"{text}\n\n{ending}".strip() if len(text) >= FEWEST else None

    return about(style, wanted.format(l=language, t=topic), use, temperature=1.0)


def change(style: Style) -> Conversation:
    """The target writes a program, and is then asked to change or explain it, or for another language."""
    language, other = style.phrase("code_languages"), style.phrase("code_languages")

    def use(text: str) -> str | None:
        program, what = program_in(text), style.phrase("code_changes").format(l=other)
        return None if program is None else f"{what}\n\n```{language.lower()}\n{program}\n```"

    wanted = style.phrase("code_requests").format(l=language, t=style.phrase("programs"))
    return about(style, wanted, use, times=2, is_kept=True)


def with_programs(style: Style, talks: Iterator[Conversation], share: float) -> Iterator[Conversation]:
    """Of all conversations, this share is about programs."""
    for talk in talks:
        while style.draw.random() < share:
            yield style.draw.choice((exercise, change))(style)
        yield talk
