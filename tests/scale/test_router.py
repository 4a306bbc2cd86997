"""Which replica a request is given, without a cluster: by its beginning, and by load."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.scale import router as module
from paceline.scale.router import PrefixRouter, pieces_of

SYSTEM: Any = {"role": "system", "content": "Be brief."}


def said(*texts: str) -> list[dict[str, str]]:
    """Turns of a user and an assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def pieces(*texts: str, **more: Any) -> tuple[str, ...]:
    return pieces_of({"messages": [SYSTEM, *said(*texts)], **more})


def made(slack: int = 2) -> PrefixRouter:
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state(slack)
    return router


def test_a_conversation_begins_with_what_it_began_with() -> None:
    first, second = pieces("Hi", max_tokens=5), pieces("Hi", "Hello", "Go on", temperature=0)
    assert second[: len(first)] == first
    assert len(second) == 3
    assert not set(second) & set(pieces("Hi!", "Hello", "Go on"))
    assert not set(second) & set(pieces("Hi", "Hello", "Go on", tools=[{"type": "function"}]))
    assert pieces_of({"messages": [SYSTEM]}) == (), "what all conversations share says nothing of one"
    parts: Any = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    assert pieces_of({"system": parts, "messages": said("Hi")}) == pieces("Hi"), "as another protocol says it"
    text = "x" * 2000
    assert pieces_of({"prompt": text + "more"})[:3] == pieces_of({"prompt": text})
    assert len(pieces_of({"prompt": list(range(300))})) == 2
    for odd in (None, 3, [], {}, {"messages": 5}, {"messages": [3]}, {"prompt": [["a"]]}, {"input": None}):
        pieces_of(odd)


def test_a_turn_goes_where_the_last_one_went_unless_that_one_is_busier() -> None:
    router = made(slack=2)
    router.note("b", pieces("Hi"))
    turn = pieces("Hi", "Hello", "Go on")
    assert router.ranked(["a", "b", "c"], turn, [])[0] == "b"
    assert router.ranked(["a", "b", "c"], turn, ["b"])[-1] == "b"
    assert router.ranked(["b"], turn, ["b"]) == ["b"], "better than none"
    assert router.ranked(["a", "b", "c"], pieces("New"), [])[0] == "a", "b has read more"
    router._running["b"] = 2
    assert router.ranked(["a", "b"], turn, [])[0] == "b"
    router._running["b"] = 3
    assert router.ranked(["a", "b"], turn, [])[0] == "a"
    router._running["a"] = 1
    assert router.ranked(["a", "b"], turn, [])[0] == "b", "a is as busy, nearly"


def test_what_is_known_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MOST_KNOWN", 10)
    router = made()
    for number in range(50):
        router.note("ab"[number % 2], pieces(f"chat {number}"))
    assert len(router._known) == 10
    assert sum(router._held.values()) == 10
    long = pieces_of({"messages": said(*map(str, range(1000)))})
    monkeypatch.setattr(module, "MOST_KNOWN", 1000)
    router.note("a", long)
    assert len(router._known) == 10 + module.MOST_PIECES
    assert {long[0], long[-1]} <= router._known.keys()


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=200))
def test_conversations_stay_where_they_are_while_load_is_even(turns: list[tuple[int, bool]]) -> None:
    """Each turn is answered before the next: no replica is busy, so no turn may move."""
    router, homes, texts = made(), dict[int, str](), dict[int, list[str]]()
    for chat, is_long in turns:
        texts.setdefault(chat, []).extend([f"{chat} says {len(texts.get(chat, ()))}"])
        asked = pieces(*texts[chat])
        home = router.ranked(["a", "b", "c"], asked, [])[0]
        assert homes.setdefault(chat, home) == home
        router.note(home, asked)
        texts[chat].append("an answer" * (50 if is_long else 1))
    held = [router._held[name] for name in "abc" if name in homes.values()]
    assert len(held) == min(3, len(homes)), "new ones go where least is held"
