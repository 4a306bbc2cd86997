"""How a token is accepted. One function, no flags; the rule follows from the request and the draft.

    temperature 0        follow the child equal to the target's argmax
    a seed               coupled: follow the child equal to argmax(logits/T + gumbel(seed, position))
    no seed, no q        deterministic candidates: draw from p, follow the child equal to the draw
    no seed, q, chain    block verification: joint rejection over the chain, accepts at least as much as
                         token by token
    no seed, q, tree     rejection among siblings sampled without replacement; with one child it is the
                         token rule

The first three are one walk: every emitted token *is* the target's choice. Glossary: accepted tokens were
drafted and kept; the last token of a verdict is the target's own, a bonus if everything on the path was
accepted, a replacement if not. Invariant: a verdict's law does not depend on the draft. Nothing here changes
the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.core.errors import GrammarError
from paceline.core.noise import Noise, Purpose
from paceline.core.sampling import choose, logprobs_of, noise_of, probabilities, processed
from paceline.core.types import Draft, Request, Verdict
from paceline.core.watch import Begun, Choice, Coin, Event, Redraw, Rule, Watch


def accept(
    request: Request, draft: Draft, logits: torch.Tensor, noise: Noise | None = None,
    picked: Sequence[int] | None = None, watch: Watch | None = None,
) -> Verdict:  # fmt: skip
    """Judge a draft. logits: [nodes, vocab], the target's raw logits at every node of the draft's tree;
    picked: the choices there, if a device has made them already (as sampling.pick_of asked), -1 for none;
    watch: is shown how the verdict comes about."""
    walk = _Walk(request, draft, logits, noise or noise_of(request), picked, watch)
    rule = rule_of(request, draft)
    walk.show(Begun(rule, request, draft))
    try:
        if rule == "block":
            walk.verify_block()
        else:
            walk.go_down(has_coins=rule == "siblings")
        verdict = walk.verdict()
        walk.show(verdict)
        return verdict
    finally:
        if request.constraint is not None and walk.num_advanced:
            request.constraint.rollback(walk.num_advanced)


def follow(draft: Draft, picked: Sequence[int], first: int = 0) -> Verdict | None:
    """The same verdict without logits, from choices that a device has made; picked[first]: the root's."""
    token = picked[first]
    if token < 0:
        return None
    if len(draft.tree.tokens) == 1:
        return Verdict((0,), (token,))
    drafted, parents = draft.tree.tokens, draft.tree.parents
    if draft.tree.is_chain:
        count = 1
        while count < len(drafted) and drafted[count] == token and picked[first + count] >= 0:
            token, count = picked[first + count], count + 1
        return Verdict(tuple(range(count)), tuple(picked[first : first + count]), len(drafted) - 1)
    path, tokens, node = [0], [token], 0
    for child in range(1, len(drafted)):  # a node comes after its parent, so one look at each is enough
        if parents[child] == node and drafted[child] == token:
            node, token = child, picked[first + child]
            if token < 0:  # not finite: an error only if the text comes so far, and then of the next pass
                break
            path.append(node)
            tokens.append(token)
    return Verdict(tuple(path), tuple(tokens), len(drafted) - 1)


def rule_of(request: Request, draft: Draft) -> Rule:
    if request.params.is_greedy:
        return "greedy"
    if request.is_seeded:
        return "coupled"
    if not draft.q:
        return "deterministic"
    return "block" if draft.tree.is_chain and set(draft.q) >= set(range(draft.num_drafted)) else "siblings"


@dataclass(slots=True)
class _Walk:
    """A walk down the tree: where it is, what it has emitted, and the grammar advanced along with it."""

    request: Request
    draft: Draft
    logits: torch.Tensor  # [nodes, vocab]
    noise: Noise
    picked: Sequence[int] | None = None
    watch: Watch | None = None
    path: list[int] = field(default_factory=lambda: [0])
    tokens: list[int] = field(default_factory=list)
    num_advanced: int = 0  # steps of the grammar to take back
    has_ended: bool = False  # the path holds an end token or a dead end: what follows is never emitted
    # where on the path the request's options leave no token to choose, or its grammar proves too complex
    dead_end: int | None = None

    def show(self, event: Event) -> None:
        if self.watch is not None:
            self.watch(event)

    @property
    def position(self) -> int:
        """Of the token to be emitted next."""
        return self.request.num_tokens + len(self.path) - 1

    def descend(self, node: int) -> None:
        token = self.draft.tree.tokens[node]
        self.path.append(node)
        self.tokens.append(token)
        self.has_ended = self.has_ended or token in self.request.stop_ids
        if self.request.constraint is not None and not self.has_ended:
            try:
                self.request.constraint.advance(token)
                self.num_advanced += 1
            except GrammarError:
                self.stop_here()

    def stop_here(self) -> None:
        """Plain decoding fails after this token, so it is the last one of the verdict."""
        self.has_ended, self.dead_end = True, len(self.path) - 1

    def children(self) -> list[int]:
        """Drafted nodes after the one the walk is at."""
        node = self.path[-1]
        return [child for child, parent in enumerate(self.draft.tree.parents) if parent == node]

    def _choice(self) -> tuple[int, int | None]:
        """The target's own token, maybe picked on the device, and the child that holds it."""
        token = -1 if self.picked is None else self.picked[self.path[-1]]
        logits = self.target_logits() if token < 0 or self.watch is not None else None
        if token < 0 and logits is not None:
            token = choose(self.request, logits, self.position, self.noise)
        child = next((c for c in self.children() if self.draft.tree.tokens[c] == token), None)
        if logits is not None:
            self.show(Choice(self.path[-1], self.position, logits, token, child))
        return token, child

    def target_logits(self) -> torch.Tensor:
        """Of the node the walk is at. What follows an end is cut off again: any will do there."""
        row = self.logits[self.path[-1]]
        try:
            return row if self.has_ended else processed(self.request, self.tokens, row)
        except GrammarError:
            if not self.tokens:
                raise
            self.stop_here()
            return row

    def target_probabilities(self) -> torch.Tensor:
        return probabilities(self.request.params, self.target_logits())

    def go_down(self, has_coins: bool) -> None:
        """Token by token. has_coins: sampled children are tested; else the target's choice counts."""
        child: int | None = 0
        while child is not None:
            q = self.draft.q.get(self.path[-1]) if has_coins and self.draft.q else None
            if q is None or not self.children():
                token, child = self._choice()
            else:
                token, child = self._judge_siblings(self.target_probabilities(), q)
            if child is None:
                self.tokens.append(token)
            else:
                self.descend(child)

    def _judge_siblings(self, p: torch.Tensor, q: torch.Tensor) -> tuple[int, int | None]:
        """Offer each sampled child in the order drawn; a rejected one's share of q leaves both p and q."""
        q = q.clone()
        for order, child in enumerate(self.children()):
            token = self.draft.tree.tokens[child]
            chances = float(p[token]), float(q[token])
            if self.flip(Coin(child, self.position, *chances, 1.0, _ratio(*chances)), order):
                return token, child
            p = _excess(p, q)
            p = p / p.sum()
            q[token] = 0
            q = q / q.sum().clamp_min(torch.finfo(torch.float64).tiny)
        return self.redraw(p), None

    def verify_block(self) -> None:
        """Keep the longest prefix whose coin falls under its threshold; then draw from what p has left."""
        assert self.draft.q is not None
        q, drafted = self.draft.q, self.draft.tree.tokens[1:]
        p = self.target_probabilities()
        kept, leftover = 0, _excess(p, q[0])
        joint = 1.0  # min(1, p/q of the whole prefix), the weight with which it is offered
        for i, token in enumerate(drafted):
            chances = float(p[token]), float(q[i][token])
            joint = min(1.0, joint * _ratio(*chances))
            if joint == 0.0:
                self.show(Coin(i + 1, self.position, *chances, joint, 0.0))
                break
            self.descend(i + 1)
            p = self.target_probabilities()
            is_last = i + 1 == len(drafted)
            rest = p if is_last else (joint * p - q[i + 1]).clamp_min(0)
            threshold = joint if is_last else _share(float(rest.sum()), 1 - joint)
            if self.flip(Coin(i + 1, self.position - 1, *chances, joint, threshold)):
                kept, leftover = i + 1, rest
        del self.path[kept + 1 :]
        del self.tokens[kept:]
        self.tokens.append(self.redraw(leftover))

    def flip(self, test: Coin, order: int = 0) -> bool:
        is_under = self.noise.flip(test.chance, test.position, order)
        if self.watch is not None:
            self.watch(test._replace(coin=self.noise.coin(test.position, order), is_under=is_under))
        return is_under

    def redraw(self, weights: torch.Tensor) -> int:
        """The target's own token after a rejection, from what p has left."""
        token = self.noise.draw(weights.log().cpu().numpy(), self.position, Purpose.RESAMPLE)
        self.show(Redraw(self.path[-1], self.position, weights, token))
        return token

    def verdict(self) -> Verdict:
        if self.dead_end is not None and self.dead_end < len(self.path):
            # As plain decoding does: emit the token that led here, and fail at its commit or the next choice.
            del self.path[self.dead_end :]
            del self.tokens[self.dead_end :]
        path, tokens, num_top = tuple(self.path), tuple(self.tokens), self.request.params.logprobs
        pairs = zip(path, tokens, strict=True) if num_top is not None else ()
        logprobs = tuple(logprobs_of(self.logits[node], token, num_top or 0) for node, token in pairs)
        return Verdict(path, tokens, self.draft.num_drafted, logprobs)


def _excess(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(0, p - q): what p has and q has not; p itself where nothing is left (p == q up to rounding)."""
    left = (p - q).clamp_min(0)
    return left if bool(left.any()) else p


def _ratio(p: float, q: float) -> float:
    assert q > 0, "a drafted token has no probability under the q it was drafted from"
    return p / q


def _share(left: float, missing: float) -> float:
    return left / (left + missing) if left + missing > 0 else 0.0
