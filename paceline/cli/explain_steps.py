"""A record of real steps: what was drafted, how each node was judged, what was emitted and what became of the
cached K/V. Invariant: every number is one that the engine used, none is worked out again in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from paceline.core.sampling import probabilities
from paceline.core.types import Request, Verdict
from paceline.core.watch import Begun, Choice, Coin, Redraw, Rule
from paceline.engine.commit import Emission
from paceline.loaders.tokenizer import Tokenizer

Fate = Literal["accepted", "rejected", "not reached"]
Kind = Literal["plain", "bonus", "replacement"]  # nothing drafted; all on the path kept; something rejected
NUM_LIKELY = 3
TAIL = 12  # tokens of the text before a step
TARGET = "target"  # the source of a token that no drafter proposed
EXPLAINED: dict[Rule, str] = {
    "greedy": "Temperature 0: a drafted token stays if it is the target's most likely one. The first that is "
    "not is replaced by it.",
    "coupled": "Seeded: the target's choice is argmax(logits/T + noise(seed, position)), with or without "
    "drafts. A drafted token stays if it is that choice, so the text is the one the seed always gives.",
    "deterministic": "No seed, drafts not sampled: one token is drawn from p and a drafted token stays if it "
    "is that one. So x stays with chance p(x), and what is said has the law of p.",
    "block": "No seed, a chain sampled from q: its prefixes are offered with weight min(1, p/q of all their "
    "tokens). The longest whose coin falls under its chance stays; then one token is drawn from what p has "
    "left there.",
    "siblings": "No seed, siblings sampled from q: each stays with chance min(1, p/q). A rejected one takes "
    "its share along (p becomes max(0, p - q), scaled to 1); if none stays one token is drawn from what p "
    "has left.",
}


@dataclass(slots=True)
class Node:
    """A drafted token."""

    index: int
    parent: int
    token: int
    text: str
    position: int
    slot: int  # index of its K/V in the sequence while the pass runs
    source: str
    estimate: float | None  # the drafter's own guess that the path to it is accepted
    p: float | None = None  # of the target; None: not looked at
    q: float | None = None  # of the drafter; None: not sampled, all of q lies on the token
    weight: float | None = None
    chance: float | None = None  # of being accepted, as far as known before the draw
    coin: float | None = None
    draw: str | None = None  # the target's choice there, where a node stays by being it
    fate: Fate = "not reached"


@dataclass(slots=True)
class Own:
    """The target's own token at the end of a step."""

    token: int
    text: str
    position: int
    p: float  # in the distribution it was taken from
    kind: Kind
    is_from_rest: bool  # drawn from what p had left after a rejection
    likely: list[tuple[str, float]]  # the most likely tokens of that distribution


@dataclass(slots=True)
class Step:
    number: int
    rule: Rule
    before: str  # the end of the text so far
    root: str
    root_slot: int
    num_cached: int  # tokens with K/V before the pass
    num_rows: int  # tokens in the pass: known ones, then drafted ones
    blocks: list[int]
    nodes: list[Node]
    own: Own | None = None
    path: list[int] = field(default_factory=list)
    emitted: list[str] = field(default_factory=list)
    emitted_ids: list[int] = field(default_factory=list)
    num_cached_after: int | None = None  # None: the request has ended and its blocks are free
    blocks_after: list[int] = field(default_factory=list)
    experts: float | None = None  # that the pass woke in a layer, on average

    @property
    def explanation(self) -> str:
        return EXPLAINED[self.rule]

    @property
    def kept(self) -> list[int]:
        """Slots whose K/V stay: the root's and those of accepted nodes."""
        return [self.root_slot + node for node in self.path]

    @property
    def dropped(self) -> list[int]:
        return [node.slot for node in self.nodes if node.index not in self.path]

    @property
    def moves(self) -> list[tuple[int, int]]:
        """From which slot to which: a tree's path is put in order."""
        return [(self.root_slot + node, self.root_slot + i) for i, node in enumerate(self.path) if node != i]

    def children(self, node: int) -> list[Node]:
        return [child for child in self.nodes if child.parent == node]

    def to_json(self) -> dict[str, Any]:
        kv = {"kept": self.kept, "dropped": self.dropped, "moves": self.moves}
        return {**asdict(self), "kv": kv, "explanation": self.explanation}


class Recorder:
    """Give it to an engine as its `watch`; call `settle` after each step."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.steps: list[Step] = []
        self.text = tokenizer.token_text
        self._request: Request  # being judged

    def __call__(self, event: Begun | Choice | Coin | Redraw | Verdict) -> None:
        if isinstance(event, Begun):
            self._request = event.request
            self.steps.append(self._begun(event))
            return
        step = self.steps[-1]
        match event:
            case Choice():
                # At temperature 0 the target only seeks the largest, and p is shown as at temperature 1.
                params, logits = self._request.params, event.logits
                p = logits.double().softmax(0) if params.is_greedy else probabilities(params, logits)
                for child in step.children(event.node):
                    child.p, child.draw = float(p[child.token]), self.text(event.token)
                    child.chance = float(child.index == event.child) if step.rule == "greedy" else child.p
                if event.child is None:
                    step.own = self._own(event, p, is_from_rest=False)
            case Coin():
                node = step.nodes[event.node - 1]
                node.p, node.q, node.chance, node.coin = event.p, event.q, min(1.0, event.chance), event.coin
                node.weight = event.weight if step.rule == "block" else None
            case Redraw():
                left = event.weights / event.weights.sum()
                step.own = self._own(event, left, is_from_rest=bool(step.children(event.node)))
            case Verdict():
                step.path = list(event.path)
                if step.own is not None and step.own.token != event.tokens[-1]:
                    step.own = None  # the options left no token after the path: the walk went a step back
                for node in step.nodes:
                    if node.index in event.path or node.p is not None:
                        node.fate = "accepted" if node.index in event.path else "rejected"

    def settle(self, tokens: list[int], woken: float = 0.0) -> None:
        """After the commit: what was emitted, and what the cache holds now. woken: experts of a layer."""
        step, cache = self.steps[-1], self._request.cache
        step.experts = woken or None
        step.emitted, step.emitted_ids = [self.text(token) for token in tokens], tokens
        if not self._request.is_finished:
            step.num_cached_after, step.blocks_after = cache.num_cached, list(cache.blocks)

    def _begun(self, event: Begun) -> Step:
        request, draft = event.request, event.draft
        root, tree, depths = request.num_tokens - 1, draft.tree, draft.tree.depths()
        chances = draft.chances or [None] * len(tree.tokens)
        nodes = []
        for i, token in enumerate(tree.tokens[1:], start=1):
            told = (self.text(token), root + depths[i], root + i, draft.source_of(i), chances[i])
            nodes.append(Node(i, tree.parents[i], token, *told))
        num_cached, blocks = request.cache.num_cached, list(request.cache.blocks)
        num_rows = request.num_tokens - num_cached + draft.num_drafted
        *before, last = map(self.text, request.tokens[-TAIL - 1 :])
        rest = (root, num_cached, num_rows, blocks, nodes)
        return Step(len(self.steps) + 1, event.rule, "".join(before), last, *rest)

    def _own(self, event: Choice | Redraw, p: torch.Tensor, is_from_rest: bool) -> Own:
        step, token = self.steps[-1], event.token
        top = p.topk(min(NUM_LIKELY, p.numel()))
        likely = zip(map(self.text, top.indices.tolist()), top.values.tolist(), strict=True)
        kind: Kind = "plain" if not step.nodes else "replacement" if step.children(event.node) else "bonus"
        text, chance = self.text(token), float(p[token])
        return Own(token, text, event.position, chance, kind, is_from_rest, list(likely))


def details_json(
    emission: Emission, number: int, text: Callable[[int], str], watched: Step | None
) -> dict[str, Any]:
    """What a client of the server is told of a request's number-th step. All but p, q and the rule is read
    off what was committed, so bursts go on. text: of a token; watched: the same step, where it was."""
    if emission.draft is None:  # it failed before it was judged
        return {"tokens": [], "steps": []}
    drafted, num_accepted, tokens = _drafted_json(emission, text, watched), emission.num_accepted, []
    own = watched.own if watched is not None else None
    for index, token in enumerate(emission.tokens):
        if index < num_accepted:
            node = drafted[emission.path[index + 1] - 1]
            said = {name: node[name] for name in ("source", "p", "q")}
        else:
            said = {"source": TARGET, "p": own and own.p, "q": None}
        tokens.append({"id": token, "text": text(token), **said, "step": number, "accepted": num_accepted})
    step = {"step": number, "rule": watched and watched.rule, "accepted": num_accepted}
    return {"tokens": tokens, "steps": [step | {"emitted": len(tokens), "draft": drafted}]}


def _drafted_json(
    emission: Emission, text: Callable[[int], str], watched: Step | None
) -> list[dict[str, Any]]:
    """Every drafted node, each after its parent; node 0 is the token before them."""
    assert emission.draft is not None
    draft, tree, nodes = emission.draft, emission.draft.tree, []
    for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        is_looked_at = parent in emission.path  # the target has chosen among the children of what it kept
        fate: Fate = "accepted" if i in emission.path else "rejected" if is_looked_at else "not reached"
        seen = watched.nodes[i - 1] if watched is not None and i else None
        node = {"node": i, "id": token, "parent": parent, "text": text(token), "source": draft.source_of(i)}
        node |= {"chance": draft.chances and round(draft.chances[i], 4)}  # the drafter's own guess
        nodes.append(node | {"p": seen and seen.p, "q": seen and seen.q, "fate": seen.fate if seen else fate})
    return nodes[1:]
