"""Where the tensors of a safetensors folder keep each weight of a config, whatever they are called.

Invariant: a weight is the rows of its tensors one below the other. Most have one tensor; a matrix of experts
has one for each of them, or a part of a stack, in which gate and up are joined.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

from paceline.models.config import ModelConfig

# other names of what `weight_names` calls so, behind the number of a layer
OTHERS = {
    "mlp.gate.weight": ("block_sparse_moe.gate.weight", "block_sparse_moe.router.layer.weight"),
    **{
        f"mlp.shared_expert.{part}_proj.weight": (f"mlp.shared_experts.{part}_proj.weight",)
        for part in ("gate", "up", "down")
    },
}
SHORT = {"gate": "w1", "up": "w3", "down": "w2"}  # Mixtral's
JOINED = (
    "mlp.experts.gate_up_proj",
    "block_sparse_moe.input_linear.weight",
)  # [experts, gate and up, hidden]
DOWN = ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight")  # [experts, hidden, inner]


class Part(NamedTuple):
    """Some rows of a tensor, or of a matrix of a stack."""

    tensor: str
    rows: slice
    matrix: int | None


class Place(NamedTuple):
    tensors: list[str]
    shape: tuple[int, ...]  # that each of them must have; of three dimensions, it is a stack
    num_rows: int  # of the weight, in each tensor or matrix
    first: int = 0  # the row where they begin

    def parts(self, rows: slice) -> Iterator[Part]:
        """Where these rows of the weight lie."""
        is_stack, each = len(self.shape) == 3, self.num_rows
        start, stop, _ = rows.indices(each * (self.shape[0] if is_stack else len(self.tensors)))
        for i in range(start // each, -(-stop // each)):
            low, high = max(start - i * each, 0), min(stop - i * each, each)
            own = slice(self.first + low, self.first + high)
            yield Part(self.tensors[0 if is_stack else i], own, i if is_stack else None)


def places_of(config: ModelConfig, found: Container[str], prefix: str, head: str) -> dict[str, Place]:
    """Of every weight; what is not found would be where Hugging Face's files have it. prefix: begins all
    names but the head's."""
    places = {}
    for name, shape in config.weight_names().items():
        number, _, part = name.partition("layers.")[2].partition(".")
        layer = f"{prefix}layers.{number}."
        if part.startswith("mlp.experts."):
            places[name] = _of_experts(config, found, layer, part.split(".")[2].partition("_")[0])
        else:
            others = [layer + other for other in OTHERS.get(part, ()) if layer + other in found]
            plain = head if name == "lm_head.weight" else prefix + name
            places[name] = Place([*others, plain][:1], shape, shape[0])
    return places


def _of_experts(config: ModelConfig, found: Container[str], layer: str, part: str) -> Place:
    """part: gate, up or down. Names end with the first that is not there."""
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    rows, width = (hidden, experts.inner) if part == "down" else (experts.inner, hidden)
    stacks = [layer + name for name in (DOWN if part == "down" else JOINED) if layer + name in found]
    if stacks:
        total, first = rows if part == "down" else 2 * rows, rows if part == "up" else 0
        return Place(stacks[:1], (experts.count, total, width), rows, first)
    short = f"{layer}block_sparse_moe.experts.{{}}.{SHORT[part]}.weight"
    pattern = short if short.format(0) in found else f"{layer}mlp.experts.{{}}.{part}_proj.weight"
    names: list[str] = []
    while len(names) < experts.count and (not names or names[-1] in found):
        names.append(pattern.format(len(names)))
    return Place(names, (rows, width), rows)
