"""What runs a head: compiled or as CUDA graphs where the target is, in torch elsewhere. The drafters see one
interface.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

from paceline.core.errors import ConfigError
from paceline.drafters.base import Surroundings
from paceline.heads.config import TRUNK, DflashConfig, EagleConfig, LayeredConfig, MedusaConfig
from paceline.heads.others import Eagle1Config, MlpSpeculatorConfig
from paceline.heads.rows import BlockBackend, ChainBackend, RoundsBackend, SideBackend, TrunkBackend
from paceline.loaders.head_files import Head
from paceline.runtime.runner import Decoder

if TYPE_CHECKING:
    import torch

    from paceline.cpu.chain_head import ChainHead
    from paceline.cpu.decoder import CpuDecoder
    from paceline.cuda.block_head import CudaBlockHead
    from paceline.cuda.chain_head import CudaChainHead
    from paceline.cuda.decoder import CudaDecoder
    from paceline.cuda.rounds import CudaRounds
    from paceline.cuda.side_heads import CudaMedusaHead
    from paceline.heads.chain import TorchChainHead


def refuse_stage(name: str, surroundings: Surroundings) -> None:
    """A head reads the hidden states of the model it was trained for, and the middle model of a stage is
    another.
    """
    if surroundings.vocab_size is not None:
        raise ConfigError(
            f"method {name!r} drafts for the target alone; use it beside other drafters, not inside 'staged'"
        )


def chain_backend(head: Head, surroundings: Surroundings, steps: int) -> ChainBackend:
    """steps: tokens of the longest chain that will be asked for; 0: only trees."""
    config = head.config
    if isinstance(config, MlpSpeculatorConfig):
        from paceline.heads.mlp import TorchMlpHead

        return TorchMlpHead(
            config, head.tensors, surroundings.checkpoint.tensor("norm.weight"), surroundings.runner.kv.device
        )
    assert isinstance(config, LayeredConfig)
    norm = surroundings.checkpoint.tensor("norm.weight") if isinstance(config, Eagle1Config) else None
    backend = _layer_backend(head, surroundings, norm)
    if _is_recorded(backend):
        _warm_up(backend, steps)
    return backend


def trunk_backend(trunk: EagleConfig, head: Head, surroundings: Surroundings) -> TrunkBackend:
    """What the heads of `head` read; nobody speaks there."""
    own = {
        name.removeprefix(TRUNK): tensor for name, tensor in head.tensors.items() if name.startswith(TRUNK)
    }
    tensors = {**own, "lm_head.weight": head.tensors["lm_head.weight"]}
    backend = _layer_backend(replace(head, config=trunk, tensors=tensors), surroundings)
    if _is_recorded(backend) and backend.device.type == "cuda":
        backend.warm_up(0)
    return backend


def _layer_backend(
    head: Head, surroundings: Surroundings, norm: torch.Tensor | None = None
) -> ChainHead | CudaChainHead | TorchChainHead:
    """A head whose layers read token by token. norm: the target's last, for heads that read what comes out of
    it.
    """
    decoder, config, tensors = surroundings.runner.decoder, head.config, head.tensors
    assert isinstance(config, LayeredConfig)
    if is_compiled(decoder):
        from paceline.cpu.chain_head import ChainHead

        return ChainHead(config, tensors, decoder, norm)
    if is_on_gpu(decoder):
        from paceline.cuda.chain_head import CudaChainHead

        return CudaChainHead(head, decoder, surroundings.runner.kv.pool.num_blocks)
    from paceline.heads.chain import TorchChainHead

    return TorchChainHead(config, tensors, decoder, norm, surroundings.runner.kv.device)


def matching_backend(surroundings: Surroundings | None, steps: int) -> RoundsBackend | None:
    """What lets suffix matching and the target go on by themselves; None where nobody can."""
    if (
        surroundings is None
        or surroundings.vocab_size is not None
        or not is_compiled(surroundings.runner.decoder)
    ):
        return None
    from paceline.cpu.rounds import CpuRounds

    return CpuRounds(None, surroundings.runner.decoder, surroundings.runner.kv.layers, steps)


def rounds_backend(backend: ChainBackend, surroundings: Surroundings, steps: int) -> RoundsBackend | None:
    """The same of a head. steps: tokens of every chain; 0: only trees."""
    decoder, kv = surroundings.runner.decoder, surroundings.runner.kv.layers
    if is_compiled(decoder):
        from paceline.cpu.chain_head import ChainHead
        from paceline.cpu.rounds import LONGEST, CpuRounds

        can_fly = 0 < steps <= LONGEST and isinstance(backend, ChainHead) and backend.num_sources > 0
        return CpuRounds(backend, decoder, kv, steps) if can_fly and isinstance(backend, ChainHead) else None
    if not steps or not is_on_gpu(decoder):
        return None
    from paceline.cuda.chain_head import CudaChainHead
    from paceline.cuda.rounds import CudaRounds

    if not isinstance(backend, CudaChainHead) or not backend.taps:
        return None
    recorded = CudaRounds(backend, decoder, kv)
    _warm_up(recorded, steps)
    return recorded


def side_backend(head: Head, surroundings: Surroundings, steps: int) -> SideBackend:
    config, decoder = head.config, surroundings.runner.decoder
    assert isinstance(config, MedusaConfig)
    norm = (
        surroundings.checkpoint.tensor("norm.weight")
        if config.trunk is None
        else head.tensors[f"{TRUNK}norm.weight"]
    )
    if is_compiled(decoder):
        from paceline.cpu.medusa import MedusaHead

        return MedusaHead(config, head.tensors, norm)
    if is_on_gpu(decoder):
        from paceline.cuda.side_heads import CudaMedusaHead

        recorded = CudaMedusaHead(head, decoder)
        _warm_up(recorded, steps)
        return recorded
    from paceline.heads.side import TorchMedusaHead

    return TorchMedusaHead(config, head.tensors, norm, surroundings.runner.kv.device)


def block_backend(head: Head, surroundings: Surroundings, steps: int) -> BlockBackend:
    config, decoder = head.config, surroundings.runner.decoder
    assert isinstance(config, DflashConfig)
    if is_compiled(decoder):
        from paceline.cpu.block_head import BlockHead

        return BlockHead(config, head.tensors, decoder)
    if is_on_gpu(decoder):
        from paceline.cuda.block_head import CudaBlockHead

        recorded = CudaBlockHead(head, decoder, surroundings.runner.kv.pool.num_blocks)
        _warm_up(recorded, steps)
        return recorded
    from paceline.heads.block import TorchBlockHead

    return TorchBlockHead(config, head.tensors, decoder, surroundings.runner.kv.device)


def _warm_up(backend: CudaChainHead | CudaBlockHead | CudaMedusaHead | CudaRounds, steps: int) -> None:
    """What a GPU compiles and records on first use is not the first request's to wait for, nor to be taken
    for the cost of a draft.
    """
    if backend.device.type == "cuda" and steps:
        backend.warm_up(steps)


def is_compiled(decoder: Decoder) -> TypeGuard[CpuDecoder]:
    """Told by its name, so that nothing is compiled elsewhere."""
    return type(decoder).__module__ == "paceline.cpu.decoder"


def is_on_gpu(decoder: Decoder) -> TypeGuard[CudaDecoder]:
    """Told by its name, too: its module needs Triton."""
    return type(decoder).__module__ == "paceline.cuda.decoder"


def _is_recorded(backend: object) -> TypeGuard[CudaChainHead]:
    """Told by its name, as well."""
    return type(backend).__module__ == "paceline.cuda.chain_head"
