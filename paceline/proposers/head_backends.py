"""What runs a head: compiled where the target is, in torch elsewhere. The drafters see one interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from paceline.errors import ConfigError
from paceline.loaders.head_files import Head
from paceline.models.head_config import DflashConfig, LayeredConfig, MedusaConfig
from paceline.models.head_rows import BlockBackend, ChainBackend, SideBackend
from paceline.models.other_heads import Eagle1Config, MlpSpeculatorConfig
from paceline.proposers.base import Surroundings
from paceline.runtime.runner import Decoder

if TYPE_CHECKING:
    from paceline.cpu.decoder import CpuDecoder


def refuse_stage(name: str, surroundings: Surroundings) -> None:
    """A head reads the hidden states of the model it was trained for, and the middle model of a stage is another."""
    if surroundings.vocab_size is not None:
        raise ConfigError(f"method {name!r} drafts for the target alone; use it beside other drafters, not inside 'staged'")


def chain_backend(head: Head, surroundings: Surroundings) -> ChainBackend:
    config, decoder = head.config, surroundings.runner.decoder
    if isinstance(config, MlpSpeculatorConfig):
        from paceline.models.mlp_head import TorchMlpHead

        return TorchMlpHead(config, head.tensors, surroundings.checkpoint.tensor("norm.weight"), surroundings.runner.kv.data.device)
    assert isinstance(config, LayeredConfig)
    norm = surroundings.checkpoint.tensor("norm.weight") if isinstance(config, Eagle1Config) else None
    if is_compiled(decoder):
        from paceline.cpu.chain_head import ChainHead

        return ChainHead(config, head.tensors, decoder, norm)
    from paceline.models.chain_head import TorchChainHead

    return TorchChainHead(config, head.tensors, decoder, norm, surroundings.runner.kv.data.device)


def side_backend(head: Head, surroundings: Surroundings) -> SideBackend:
    config, decoder, norm = head.config, surroundings.runner.decoder, surroundings.checkpoint.tensor("norm.weight")
    assert isinstance(config, MedusaConfig)
    if is_compiled(decoder):
        from paceline.cpu.medusa import MedusaHead

        return MedusaHead(config, head.tensors, norm)
    from paceline.models.side_heads import TorchMedusaHead

    return TorchMedusaHead(config, head.tensors, norm, surroundings.runner.kv.data.device)


def block_backend(head: Head, surroundings: Surroundings) -> BlockBackend:
    config, decoder = head.config, surroundings.runner.decoder
    assert isinstance(config, DflashConfig)
    if is_compiled(decoder):
        from paceline.cpu.block_head import BlockHead

        return BlockHead(config, head.tensors, decoder)
    from paceline.models.block_head import TorchBlockHead

    return TorchBlockHead(config, head.tensors, decoder, surroundings.runner.kv.data.device)


def is_compiled(decoder: Decoder) -> TypeGuard[CpuDecoder]:
    """Told by its name, so that nothing is compiled elsewhere."""
    return type(decoder).__module__ == "paceline.cpu.decoder"
