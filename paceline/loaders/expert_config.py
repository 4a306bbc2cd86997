"""What files say about experts, to an ExpertsConfig: config.json of a Hugging Face folder, or GGUF metadata.

Invariant: counts are checked against each other and against a limit before anything is sized by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import ModelFileError
from paceline.loaders.fields import DAMAGED, MAX_LAYERS, Fields
from paceline.models.config import ExpertsConfig, Family

MAX_EXPERTS = 4_096
EXPERT_FAMILIES: tuple[Family, ...] = (
    "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "granitemoe", "glm4_moe", "gpt_oss",
    "qwen3_5_moe", "qwen3_next", "gemma4",
)  # fmt: skip
SHARING = ("qwen2_moe", "qwen3_5_moe", "qwen3_next")  # with a shared expert behind a gate
ALWAYS_NORMED = ("mixtral", "granitemoe", "gpt_oss", "qwen3_5_moe", "gemma4")  # whose shares sum up to one
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
WIDE = ("mixtral", "olmoe", "granitemoe", "gpt_oss")  # an expert is as wide as `intermediate_size` says
UNNORMED = ("olmoe", "qwen2_moe")  # in GGUF files that do not say whether shares sum up to one
SOFTMAX, SIGMOID, OF_CHOSEN = 1, 2, 3  # GGUF's numbers of gating functions; 3: softmax of the chosen


def hf_experts(family: Family, keys: Fields, num_layers: int) -> ExpertsConfig | None:
    """None where every layer is dense."""
    if family not in EXPERT_FAMILIES or (family == "gemma4" and not keys.flag("enable_moe_block", False)):
        return None
    inner = keys.count("intermediate_size" if family in WIDE else "moe_intermediate_size")
    layers = range(min(num_layers, MAX_LAYERS + 1))
    dense, shared = _listed(keys, "mlp_only_layers"), 0
    step, first = keys.count("decoder_sparse_step", 1), _optional(keys, "first_k_dense_replace")
    dense_layers = tuple(i for i in layers if i in dense or (i + 1) % step or i < first)
    if family in SHARING:
        shared = keys.count("shared_expert_intermediate_size")
    elif family == "glm4_moe":
        shared = inner * _optional(keys, "n_shared_experts")
    elif family == "gemma4":
        shared = keys.count("intermediate_size")
    chosen = keys.count(keys.spelling("top_k_experts", "num_experts_per_tok"))
    experts = ExpertsConfig(
        keys.count(keys.spelling(*COUNTS)), chosen, inner,
        router="sigmoid" if family == "glm4_moe" else "softmax",
        normalizes=family in ALWAYS_NORMED or keys.flag("norm_topk_prob", False),
        scale=keys.number("routed_scaling_factor", 1.0), has_bias=family == "gpt_oss",
        groups=keys.count("n_group", 1), top_groups=keys.count("topk_group", 1),
        shared_inner=shared, has_shared_gate=family in SHARING, dense_layers=dense_layers,
        has_norms=family == "gemma4",
    )  # fmt: skip
    return _checked(keys, experts) if len(dense_layers) < len(layers) else None


def gguf_experts(
    family: Family, keys: Fields, num_layers: int, tensors: Mapping[str, Any]
) -> ExpertsConfig | None:
    """Widths and which layers are dense follow from the tensors, which not every file repeats as keys."""
    if family not in EXPERT_FAMILIES:
        return None
    layers = range(min(num_layers, MAX_LAYERS + 1))
    sparse = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" in tensors]
    if not sparse:
        raise keys.refuse("expert_count", f"but no layer has a router (ffn_gate_inp); {DAMAGED}")

    def width(name: str, default: int) -> int:
        tensor = tensors.get(f"blk.{sparse[0]}.{name}.weight")
        return tensor.shape[-2] if tensor is not None and len(tensor.shape) > 1 else default

    gating = keys.count("expert_gating_func", SIGMOID if family == "glm4_moe" else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID, OF_CHOSEN):
        raise keys.refuse("expert_gating_func", "is not supported; use a model with softmax or sigmoid")
    experts = ExpertsConfig(
        keys.count("expert_count"), keys.count("expert_used_count"),
        width("ffn_gate_exps", width("ffn_gate_up_exps", 0) // 2),
        router="sigmoid" if gating == SIGMOID else "softmax",
        normalizes=gating == OF_CHOSEN or keys.flag("expert_weights_norm", family not in UNNORMED),
        has_bias=family == "gpt_oss",
        scale=keys.number("expert_weights_scale") if keys.get("expert_weights_scale") else 1.0,
        groups=_optional(keys, "expert_group_count") or 1,
        top_groups=_optional(keys, "expert_group_used_count") or 1,
        shared_inner=width("ffn_gate_shexp", 0),
        has_shared_gate=f"blk.{sparse[0]}.ffn_gate_inp_shexp.weight" in tensors,
        dense_layers=tuple(i for i in layers if i not in sparse),
    )  # fmt: skip
    return _checked(keys, experts)


def _optional(keys: Fields, key: str) -> int:
    """A count that may be zero or absent."""
    return keys.count(key) if keys.get(key) else 0


def _listed(keys: Fields, key: str) -> list[int]:
    value = keys.get(key) or []
    if not isinstance(value, list) or not all(isinstance(i, int) for i in value):
        raise keys.refuse(key, f"is not a list of layers; {DAMAGED}")
    return value


def _checked(keys: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    count, chosen, groups = experts.count, experts.per_token, experts.groups
    reachable = count // groups * experts.top_groups
    checks = (
        (count <= MAX_EXPERTS, f"{count} experts: more than {MAX_EXPERTS}"),
        (chosen <= count, f"{chosen} experts a token of {count}"),
        (count % groups == 0, f"{count} experts do not fill {groups} groups"),
        (experts.top_groups <= groups, f"{experts.top_groups} of {groups} groups of experts"),
        (chosen <= reachable, f"{chosen} experts a token, and {reachable} in the groups it may choose from"),
    )
    for is_right, problem in checks:
        if not is_right:
            raise ModelFileError(f"{keys.source}: {problem}; {DAMAGED}")
    return experts
