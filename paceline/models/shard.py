"""Tensor parallelism: which rows of which weight a rank holds, and where what ranks have computed is put
together again.

Every weight is split by its outputs, and inputs are gathered before a product. Invariant: a dot product is
summed by one rank, whole and in the order that it has with one rank, so no bit depends on the number of
ranks. Attention is split by KV heads; norms and the embedding are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.kept import Kept

TILE, COLUMNS = 16, 64  # outputs that stay together: a tile of a product; columns of the MLP, as kernels do
HEADS = 0  # the same for what belongs to a KV head
# By the last name of a module, or of a vector that has none: what its rows are split in.
UNITS = {
    "q_proj": HEADS, "k_proj": HEADS, "v_proj": HEADS, "sinks": HEADS, "o_proj": TILE,
    "gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": TILE, "lm_head": TILE,
}  # fmt: skip


class Shard(NamedTuple):
    rank: int = 0
    size: int = 1
    is_by_expert: bool = False  # an expert is whole on one rank; else every rank has a part of each

    def of(self, count: int, unit: int = 1) -> slice:
        """This rank's part of `count` things, of which `unit` stay together."""
        units = -(-count // unit)
        first, last = (units * rank // self.size for rank in (self.rank, self.rank + 1))
        return slice(min(first * unit, count), min(last * unit, count))

    def rows(self, config: ModelConfig, name: str) -> slice:
        """Of a tensor of the model; all where it is not split."""
        unit = UNITS.get(name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2])
        count = config.weight_names()[name][0]
        return slice(0, count) if unit is None else self.of(count, unit or count // config.num_kv_heads)

    def sizes(self, count: int, unit: int) -> list[int]:
        """Of all ranks' parts."""
        parts = [Shard(rank, self.size).of(count, unit) for rank in range(self.size)]
        return [part.stop - part.start for part in parts]

    def own(self, config: ModelConfig) -> ModelConfig:
        """With this rank's heads: what its attention and its KV cache are made for."""
        kept = self.of(config.num_kv_heads)
        count, group = kept.stop - kept.start, config.num_heads // config.num_kv_heads
        return replace(config, num_heads=count * group, num_kv_heads=count)

    def check(self, config: ModelConfig, kernels: str = "exact") -> None:
        """Refuse what cannot be split so."""
        asked = f"tensor_parallel_size is {self.size} and the model has"
        if self.size > config.num_kv_heads:
            raise ConfigError(f"{asked} {config.num_kv_heads} KV heads; use at most that many")
        is_reference = kernels == "torch"
        if self.is_by_expert and config.experts is None:
            raise ConfigError("enable_expert_parallel is True and the model has no experts; leave it out")
        found = {
            "two sizes of heads": config.global_head_dim, "recurrent layers": config.recurrent,
            "experts": is_reference and config.experts,
            "norms over all heads": is_reference and config.qk_norm_over_heads,
        }  # fmt: skip
        for what, is_there in found.items():
            if is_there:
                raise ConfigError(f"{asked} {what}, which are not split here; use 1")


class Group(Protocol):
    """Ranks that run the same pass."""

    shard: Shard

    # x [..., own] of every rank side by side, [..., sum of sizes]
    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor: ...


class Slices:
    """A checkpoint of which a rank reads its rows alone."""

    def __init__(self, source: Any, shard: Shard) -> None:
        self.config, self._source, self._shard = source.config, source, shard

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._source.tensor(name, self._shard.rows(self.config, name))
        return found

    def kept(self, name: str) -> Kept | None:
        found: Kept | None = self._source.kept(name, self._shard.rows(self.config, name))
        return found


class Gathered(nn.Module):
    """A product of which a rank has some outputs; sizes of its inputs' parts, if they are split, and of its
    outputs'."""

    def __init__(self, part: nn.Module, group: Group, inputs: list[int] | None, outputs: list[int]) -> None:
        super().__init__()
        self.part, self.group, self.inputs, self.outputs = part, group, inputs, outputs

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.inputs is None else self.group.gather(x, self.inputs)
        return self.group.gather(self.part(x), self.outputs)


def gather_products(model: Any, group: Group) -> None:
    """In a torch model whose weights were read by slices."""
    config, sizes = model.config, group.shard.sizes
    hidden = sizes(config.hidden_size, TILE)
    heads = sizes(
        config.num_heads * config.head_dim, config.num_heads // config.num_kv_heads * config.head_dim
    )
    for layer in model.layers:
        layer.self_attn.o_proj = Gathered(layer.self_attn.o_proj, group, heads, hidden)
        inner = sizes(config.intermediate_size, COLUMNS)
        layer.mlp.down_proj = Gathered(layer.mlp.down_proj, group, inner, hidden)
    if not config.has_head:
        return
    head = model.lm_head
    if config.tie_embeddings:  # the same memory: the embedding is whole
        head = type(head)(head.weight[group.shard.of(config.vocab_size, TILE)], bits=32)
        head.bits = model.embed_tokens.bits
    model.lm_head = Gathered(head, group, None, sizes(config.vocab_size, TILE))
