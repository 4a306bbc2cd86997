"""Where the tensors of a safetensors folder keep each weight of a config, whatever they are called.

Invariant: a weight is the rows of its tensors one below the other. Most have one tensor; a matrix of experts
has one for each of them, or a part of a stack, in which gate and up are joined.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import accumulate
from typing import NamedTuple

from paceline.loaders.fields import place_rows
from paceline.models.config import ModelConfig

# other names of what `weight_names` calls so, behind the number of a layer
OTHERS = {
    "mlp.gate.weight": (
        "block_sparse_moe.gate.weight", "block_sparse_moe.router.layer.weight", "mlp.router.weight",
        "router.proj.weight",
    ),
    "mlp.gate.bias": ("mlp.router.bias",),
    "mlp.gate.per_expert_scale": ("router.per_expert_scale",),
    "mlp.router_norm.weight": ("router.scale",),
    "mlp.experts_norm.weight": ("pre_feedforward_layernorm_2.weight",),
    "mlp.shared_norm.weight": ("pre_feedforward_layernorm.weight",),
    "mlp.after_experts_norm.weight": ("post_feedforward_layernorm_2.weight",),
    "mlp.after_shared_norm.weight": ("post_feedforward_layernorm_1.weight",),
}  # fmt: skip
for _part in ("gate", "up", "down"):
    OTHERS[f"mlp.shared_expert.{_part}_proj.weight"] = tuple(
        f"mlp.{where}{_part}_proj.weight" for where in ("shared_experts.", "")
    )
FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
}  # fmt: skip
SHORT = {"gate": "w1", "up": "w3", "down": "w2"}  # Mixtral's
# [experts, gate and up, hidden]
JOINED = ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight", "experts.gate_up_proj")
# [experts, hidden, inner]
DOWN = ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight", "experts.down_proj")


class Part(NamedTuple):
    """Some rows of a tensor, or of a matrix of a stack."""

    tensor: str
    rows: range
    matrix: int | None
    is_transposed: bool  # the matrix has them as columns


class Place(NamedTuple):
    tensors: list[str]  # each a matrix, or one that is a stack of them
    shape: tuple[int, ...]  # that each of them must have
    rows: tuple[range, ...]  # of a matrix that are the weight's, in their order
    is_stack: bool = False
    is_transposed: bool = False  # a stack's matrices have them as columns

    def parts(self, rows: slice) -> Iterator[Part]:
        """Where these rows of the weight lie."""
        each, count = sum(map(len, self.rows)), self.shape[0] if self.is_stack else len(self.tensors)
        start, stop, _ = rows.indices(each * count)
        for i in range(start // each, -(-stop // each)):
            tensor, matrix = self.tensors[0 if self.is_stack else i], i if self.is_stack else None
            low, high = start - i * each, stop - i * each
            for run in self.rows:
                if own := run[max(low, 0) : max(high, 0)]:
                    yield Part(tensor, own, matrix, self.is_transposed)
                low, high = low - len(run), high - len(run)


def places_of(config: ModelConfig, found: Container[str], prefix: str, head: str) -> dict[str, Place]:
    """Of every weight; what is not found would be where Hugging Face's files have it. prefix: begins all
    names but the head's."""
    names, weights = dict[str, str](), config.weight_names()
    for name in weights:
        number, _, part = name.partition("layers.")[2].partition(".")
        others = [f"{prefix}layers.{number}.{other}" for other in OTHERS.get(part, ())]
        plain = head if name == "lm_head.weight" else prefix + _joined(config, name)
        names[name] = next((other for other in others if other in found), plain)
    rows, shapes = place_rows(config, names)
    places = {name: Place([names[name]], shapes[names[name]], (rows[name],)) for name in weights}
    for name in (name for name in weights if ".mlp.experts." in name):
        layer, _, part = name.partition("mlp.experts.")
        of = _of_gpt_oss if config.family == "gpt_oss" else _of_experts
        places[name] = of(config, found, prefix + layer, part)
    if config.family == "gemma4":  # layers without a window may have no v_proj: keys' product is values' too
        for name in (name for name in weights if name.endswith("v_proj.weight")):
            if names[name] not in found:
                places[name] = places[name.replace("v_proj", "k_proj")]
    if config.family == "qwen3_next":
        places |= _mixed(config, prefix)
    return places


def _mixed(config: ModelConfig, prefix: str) -> dict[str, Place]:
    """Qwen3-Next's: each key head's rows of queries, keys, values and gates together, then the next one's;
    likewise of rates and steps."""
    sizes = config.recurrent
    assert sizes is not None
    each, places = sizes.value_heads // sizes.key_heads, dict[str, Place]()
    of_values = each * sizes.value_dim
    kinds = {
        "in_proj_qkvz": ((sizes.key_dim, sizes.key_dim, of_values, of_values), (("qkv", 0, 3), ("z", 3, 4))),
        "in_proj_ba": ((each, each), (("b", 0, 1), ("a", 1, 2))),
    }
    for i in (i for i, is_recurrent in enumerate(sizes.layers) if is_recurrent):
        layer = f"layers.{i}.linear_attn."
        for tensor, (counts, weights) in kinds.items():
            ends = list(accumulate(counts, initial=0))
            for name, first, last in weights:
                runs = tuple(
                    range(head * ends[-1] + ends[part], head * ends[-1] + ends[part + 1])
                    for part in range(first, last)
                    for head in range(sizes.key_heads)
                )
                shape = (sizes.key_heads * ends[-1], config.hidden_size)
                places[f"{layer}in_proj_{name}.weight"] = Place(
                    [f"{prefix}{layer}{tensor}.weight"], shape, runs
                )
    return places


def _joined(config: ModelConfig, name: str) -> str:
    """What transformers calls the tensor of which a weight is a part, in families that have such."""
    parts = name.split(".")
    if config.family == "phi3" and parts[-2] in FUSED:
        parts[-2] = FUSED[parts[-2]]
    return ".".join(parts)


def _of_experts(config: ModelConfig, found: Container[str], layer: str, part: str) -> Place:
    """part: of gate, up or down. Names end with the first that is not there."""
    experts, hidden, part = config.experts, config.hidden_size, part.partition("_")[0]
    assert experts is not None
    rows, width = (hidden, experts.inner) if part == "down" else (experts.inner, hidden)
    stacks = [layer + name for name in (DOWN if part == "down" else JOINED) if layer + name in found]
    if stacks:
        total, first = rows if part == "down" else 2 * rows, rows if part == "up" else 0
        return Place(stacks[:1], (experts.count, total, width), (range(first, first + rows),), is_stack=True)
    others = f"block_sparse_moe.experts.{{}}.{SHORT[part]}", f"experts.{{}}.{part}_proj"
    known = [f"{layer}{other}.weight" for other in (*others, f"mlp.experts.{{}}.{part}_proj")]
    pattern = next((each for each in known if each.format(0) in found), known[-1])
    names: list[str] = []
    while len(names) < experts.count and (not names or names[-1] in found):
        names.append(pattern.format(len(names)))
    return Place(names, (rows, width), (range(rows),))


def _of_gpt_oss(config: ModelConfig, found: Container[str], layer: str, part: str) -> Place:
    """Stacks whose matrices are transposed, with gate and up in turn; in MXFP4 (quantized/fp4.py) the
    weights have names of their own."""
    if part.endswith("weight") and f"{layer}mlp.experts.0.{part}" in found:
        return _of_experts(config, found, layer, part)
    (kind, end), experts, hidden = part.split("_proj."), config.experts, config.hidden_size
    assert experts is not None
    rows, width = (hidden, experts.inner) if kind == "down" else (experts.inner, hidden)
    name, own = f"{layer}mlp.experts.down_proj", range(rows)
    if kind != "down":
        name, own = f"{layer}mlp.experts.gate_up_proj", range(kind == "up", 2 * rows, 2)
    total = len(own) * own.step
    if end == "bias":
        return Place([f"{name}_bias"], (experts.count, total), (own,), is_stack=True)
    return Place([name], (experts.count, width, total), (own,), is_stack=True, is_transposed=True)
