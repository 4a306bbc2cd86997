"""What a client that asks for details is told of each step: its tokens with who proposed them, and the tree
that was drafted with the fate of every node. Invariant: all of it but p, q and the rule is read off what was
committed, so that steps run as they do for others, in bursts as well; p, q and the rule are those of a
watched step, the very numbers that decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.cli.explain_steps import Fate, Step
from paceline.engine.commit import Emission

TARGET = "target"  # the source of a token that no drafter proposed


def details_json(
    emission: Emission, number: int, text: Callable[[int], str], watched: Step | None
) -> dict[str, Any]:
    """Of the number-th step of a request. text: of a token; watched: the same step, where it was."""
    if emission.draft is None:  # it failed before it was judged
        return {"tokens": [], "steps": []}
    drafted, num_accepted, tokens = _draft(emission, text, watched), emission.num_accepted, []
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


def _draft(emission: Emission, text: Callable[[int], str], watched: Step | None) -> list[dict[str, Any]]:
    """Every drafted node, each after its parent; node 0 is the token before them."""
    assert emission.draft is not None
    draft, tree, nodes = emission.draft, emission.draft.tree, []
    for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        is_looked_at = (
            parent in emission.path
        )  # the target has chosen among the children of each node it kept
        fate: Fate = "accepted" if i in emission.path else "rejected" if is_looked_at else "not reached"
        seen = watched.nodes[i - 1] if watched is not None and i else None
        node = {"node": i, "id": token, "parent": parent, "text": text(token), "source": draft.source_of(i)}
        node |= {"chance": draft.chances and round(draft.chances[i], 4)}  # the drafter's own guess
        nodes.append(node | {"p": seen and seen.p, "q": seen and seen.q, "fate": seen.fate if seen else fate})
    return nodes[1:]
