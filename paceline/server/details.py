"""What is shown of single steps on request: the drafter of each token, p, q, and the draft it stood in.

Invariant: only requests that asked are recorded; the engine is watched only while there is one, so others pay
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.cli.explain_steps import Recorder, Step
from paceline.core.types import Verdict
from paceline.core.watch import Begun, Choice, Coin, Redraw

if TYPE_CHECKING:
    from paceline.core.types import Request
    from paceline.engine.commit import Emission
    from paceline.loaders.tokenizer import Tokenizer

TARGET = "target"


class Watcher:
    """Give it to an engine as its `watch`. Passes what it is shown to the recorder of the request being
    judged."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._recorders: dict[str, Recorder] = {}
        self._steps: dict[str, int] = {}
        self._current: Recorder | None = None

    @property
    def is_watching(self) -> bool:
        return bool(self._recorders)

    def watch(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._recorders[request.id] = Recorder(self._tokenizer)
            self._steps[request.id] = 0

    def forget(self, request: Request) -> None:
        self._recorders.pop(request.id, None)
        self._steps.pop(request.id, None)

    def __call__(self, event: Begun | Choice | Coin | Redraw | Verdict) -> None:
        if isinstance(event, Begun):
            self._current = self._recorders.get(event.request.id)
        if self._current is not None:
            self._current(event)

    def take(self, emission: Emission) -> dict[str, Any]:
        """The tokens of a step just committed, and the step itself."""
        name = emission.request.id
        recorder = self._recorders[name]
        if not recorder.steps:  # it failed before it was judged
            return {"tokens": [], "steps": []}
        step = recorder.steps.pop()
        recorder.steps.clear()
        self._steps[name] += 1
        number, path = self._steps[name], step.path[1:]
        tokens = []
        for index, token in enumerate(emission.tokens):
            is_drafted = index < emission.num_accepted
            node = step.nodes[path[index] - 1] if is_drafted else None
            own = step.own.p if step.own is not None and not is_drafted else None
            tokens.append(
                {
                    "id": token,
                    "text": self._tokenizer.token_text(token),
                    "source": emission.sources[index] if is_drafted else TARGET,
                    "p": node.p if node is not None else own,
                    "q": node.q if node is not None else None,
                    "step": number,
                    "accepted": emission.num_accepted,
                }
            )
        return {"tokens": tokens, "steps": [_step_json(step, number, emission)]}


def _step_json(step: Step, number: int, emission: Emission) -> dict[str, Any]:
    names = ("parent", "text", "source", "p", "q", "fate")
    draft = [
        {"node": node.index, "id": node.token} | {name: getattr(node, name) for name in names}
        for node in step.nodes
    ]
    counts = {"accepted": emission.num_accepted, "emitted": len(emission.tokens)}
    return {"step": number, "rule": step.rule, **counts, "draft": draft}
