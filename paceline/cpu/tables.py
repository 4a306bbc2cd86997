"""Packed tensors as the compiled pass finds them: matrices by their addresses, experts, and what room they
need.

Invariant: addresses point into the tensors they were made from, which their user keeps alive.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paceline.cpu.compile import entry_of
from paceline.cpu.layer import COLUMNS, ExpertRow
from paceline.cpu.matmul import Matrix
from paceline.cpu.routing import Routing
from paceline.models.config import ExpertsConfig
from paceline.models.quantize import DOT_ROWS, FLOAT_ROWS, GROUP, padded

Tensors = Mapping[str, Tensor]


def matrix_of(tensors: Tensors, name: str, width: int, bits: int) -> Matrix:
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    assert weight.is_contiguous() & bias.is_contiguous(), "the kernels read contiguous tensors"
    k = width if bits == 32 else padded(width, GROUP[bits])
    rows = FLOAT_ROWS if bits == 32 else DOT_ROWS
    return Matrix(weight.data_ptr(), bias.data_ptr(), k, weight.shape[0] * rows)


def expert_rows(
    tensors: Tensors, layer: str, experts: ExpertsConfig, hidden: int, bits: int
) -> list[ExpertRow]:
    """A layer's experts, whose matrices follow each other in one tensor, and then the shared one. layer:
    begins its names."""

    def each(name: str, width: int) -> list[Matrix]:
        weight = tensors[f"{layer}{name}.weight"]
        size = weight.numel() * weight.element_size() // experts.count
        first = matrix_of(tensors, layer + name, width, bits)
        first = first._replace(n=first.n // experts.count)
        step = 4 * first.n if experts.has_bias else 0  # else one bias of zeros is all experts'
        return [
            first._replace(weight=first.weight + e * size, bias=first.bias + e * step)
            for e in range(experts.count)
        ]

    both = zip(each("experts.gate_up", hidden), each("experts.down", experts.inner), strict=True)
    rows = [ExpertRow(*matrices) for matrices in both]
    if experts.shared_inner:
        gate_up = matrix_of(tensors, layer + "shared.gate_up", hidden, bits)
        rows.append(ExpertRow(gate_up, matrix_of(tensors, layer + "shared.down", experts.shared_inner, bits)))
    return rows


def slots_of(experts: ExpertsConfig) -> int:
    """Experts that work for a row."""
    return experts.per_token + (experts.shared_inner > 0)


def routing_of(experts: ExpertsConfig | None, bits: int, is_by_rank: bool = False) -> Routing:
    """The kernel is compiled for models that have experts alone."""
    if experts is None:
        return Routing()
    from paceline.cpu.experts import MIX

    entry = entry_of(MIX[bits], 10)
    has = experts.router == "sigmoid", experts.normalizes, experts.has_shared_gate
    groups = experts.groups, experts.top_groups
    sizes = experts.count, experts.per_token, slots_of(experts)
    return Routing(*sizes, *has, float(experts.scale), *groups, entry, is_by_rank)


def room_of_experts(experts: ExpertsConfig | None, hidden: int, rows: int) -> dict[str, int]:
    """Bytes of a pass's memory: of parts that have other uses too, the least."""
    if experts is None:
        return {}
    slots = slots_of(experts)
    inner = experts.per_token * padded(experts.inner, COLUMNS) + padded(experts.shared_inner, COLUMNS)
    inputs = rows * max(inner, slots * padded(hidden, COLUMNS))
    return {
        "wide": rows * inner * 2 * 4,
        "narrow": rows * slots * padded(hidden, COLUMNS) * 4,
        "values": inputs * 4,
        "scales": inputs // 32 * 4,
        "sums": inputs // 32 * 4,
        "routed": 2 * rows * padded(experts.count + 1, FLOAT_ROWS) * 4,
        "chosen": rows * slots * 8,
        "shares": rows * slots * 4,
        "ranks": rows * slots * 8,
        "starts": (experts.count + 2) * 8,
    }
