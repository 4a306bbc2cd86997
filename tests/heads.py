"""Random heads for a target, and what each kind computes, in plain torch without any cache: the oracle of the
compiled kernels.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from paceline.heads.config import (
    TRUNK,
    DflashConfig,
    DraftConfig,
    Eagle1Config,
    EagleConfig,
    HeadConfig,
    LayeredConfig,
    MedusaConfig,
    MlpSpeculatorConfig,
    MtpConfig,
    write_head_config,
)
from paceline.heads.modules import tensor_shapes
from paceline.loaders.heads import target_hash
from paceline.loaders.mtp import DIALECTS
from paceline.loaders.stored import tensors_of
from paceline.models.config import ModelConfig
from paceline.models.layer import Linear, rms_norm
from paceline.models.rope import rotary_tables, rotate
from paceline.train.recipes import shared_fields

Tensors = dict[str, torch.Tensor]


def config_of(
    kind: str, target: ModelConfig, digest: str = "", draft_vocab: int | None = None, **fields: Any
) -> HeadConfig:
    shared = shared_fields(target, "random", digest, draft_vocab or target.vocab_size)
    if kind == "medusa":
        trunk = (
            config_of("eagle", target, digest, draft_vocab, has_lm_head=False)
            if fields.pop("has_trunk", False)
            else None
        )
        return MedusaConfig(**shared, **{"num_heads_ahead": 4, "trunk": trunk, **fields})
    layer = {
        "num_heads": target.num_heads, "num_kv_heads": target.num_kv_heads, "head_dim": target.head_dim,
        "intermediate_size": target.intermediate_size, "rope": target.rope,
    }  # fmt: skip
    taps = (0, target.num_layers // 2, target.num_layers)
    if kind == "eagle":
        return EagleConfig(**{**shared, **layer, "taps": taps, **fields})
    if kind == "draft":
        return DraftConfig(**{**shared, **layer, "num_layers": 2, **fields})
    return DflashConfig(
        **{**shared, **layer, "taps": taps, "num_layers": 2, "block_size": 4, "mask_token_id": 0, **fields}
    )


def eagle_1(target: ModelConfig, **fields: Any) -> Eagle1Config:
    shared = {
        **shared_fields(target, "random", "", target.vocab_size),
        "has_lm_head": False,
        "rope": target.rope,
    }
    layer = {"num_heads": target.num_heads, "num_kv_heads": target.num_kv_heads, "head_dim": target.head_dim}
    return Eagle1Config(**{**shared, **layer, "intermediate_size": target.intermediate_size, **fields})


def mlp_speculator(target: ModelConfig, **fields: Any) -> MlpSpeculatorConfig:
    shared = {**shared_fields(target, "random", "", target.vocab_size), "has_lm_head": False, "rms_eps": 1e-6}
    return MlpSpeculatorConfig(**{**shared, "inner_dim": 32, "num_predict": 3, "is_scaled": True, **fields})


def random_tensors(config: HeadConfig, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, shape in tensor_shapes(config).items():
        if name == "draft_ids":
            tensors[name] = (
                torch.randperm(config.vocab_size, generator=generator)[: shape[0]]
                .sort()
                .values.to(torch.int32)
            )
        elif name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            tensors[name] = (
                torch.randn(shape, generator=generator)
                * (2.0 if "lm_head" in name else 1.0)
                * shape[-1] ** -0.5
            )
    return tensors


def trunk_of(config: MedusaConfig, tensors: Tensors) -> tuple[EagleConfig, Tensors]:
    """What Medusa's heads read the text with, as a head of its own."""
    assert config.trunk is not None
    own = {name.removeprefix(TRUNK): tensor for name, tensor in tensors.items() if name.startswith(TRUNK)}
    return config.trunk, {**own, "lm_head.weight": tensors["lm_head.weight"]}


def write_head(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


_folders = tempfile.TemporaryDirectory()  # gone when the tests end


@functools.cache
def random_head(kind: str, target: Any, seed: int = 0, draft_vocab: int | None = None, **fields: Any) -> str:
    """The folder of an untrained head, for this checkpoint."""
    config = config_of(kind, target.config, target_hash(target), draft_vocab, **fields)
    name = f"{kind}-{len(list(Path(_folders.name).iterdir()))}"
    return str(
        write_head(Path(_folders.name) / name, write_head_config(config), random_tensors(config, seed))
    )


def mtp(target: ModelConfig, **fields: Any) -> MtpConfig:
    shared = eagle_1(target)
    return MtpConfig(
        **{field.name: getattr(shared, field.name) for field in dataclass_fields(shared)} | fields
    )


@functools.cache
def with_mtp(target: Any) -> dict[str, Any]:
    """How to draft with a module that this checkpoint's files hold from now on."""
    config = target.config
    own = {"qk_norm": config.qk_norm, "is_gated": config.gated_attention, "rotary_dim": config.rotary_dim}
    tensors = random_tensors(mtp(config, **own, has_bias=config.qkv_bias))
    file = Path(_folders.name) / "mtp.safetensors"
    save_file({DIALECTS["qwen"].stored(name, 0): tensor for name, tensor in tensors.items()}, file)
    target.stored = tensors_of([file])
    return {"method": "mtp"}


@functools.cache
def random_mlp(target: Any) -> str:
    """The folder of an MLP speculator, as other projects write it."""
    config = mlp_speculator(target.config)
    values = {
        "model_type": "mlp_speculator",
        "vocab_size": config.vocab_size,
        "emb_dim": config.hidden_size,
        "inner_dim": 32,
    }
    tensors = {f"speculator.{name}": tensor for name, tensor in random_tensors(config).items()}
    return str(
        write_head(Path(_folders.name) / "mlp", {**values, "n_predict": 3, "scale_input": True}, tensors)
    )


@dataclass
class Oracle:
    """A head whose products round as the int8 kernels do (bits=8) or not at all (32)."""

    config: Any
    tensors: Tensors
    embedding: torch.Tensor  # [vocab, hidden] as the target's kernels see it
    bits: int = 8

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name == "fc" and self.bits == 8:  # its columns are made equally long before they are rounded
            lengths = self.tensors["fc.weight"].norm(dim=0)
            return Linear(self.tensors["fc.weight"] / lengths, self.tensors.get("fc.bias"), bits=8)(
                x * lengths
            )
        return Linear(self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"), bits=self.bits)(x)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config.rms_eps)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.product("lm_head", x)

    def attend(
        self, prefix: str, q_in: Tensor, kv_in: Tensor, places: Tensor, context: Tensor, mask: Tensor
    ) -> Tensor:
        """q_in [n, w] at `places`, kv_in [m, w] at `context`; mask [n, m]."""
        config: LayeredConfig = self.config
        dim = config.head_dim
        tables = rotary_tables(config.rope, dim, int(max(places.max(), context.max())) + 1)
        inputs = {"q": q_in, "k": kv_in, "v": kv_in}
        q, k, v = (
            self.product(f"{prefix}self_attn.{name}_proj", x).unflatten(-1, (-1, dim))
            for name, x in inputs.items()
        )
        if f"{prefix}self_attn.q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{prefix}self_attn.q_norm"), self.norm(k, f"{prefix}self_attn.k_norm")
        q, k = (
            rotate(q, tables.cos[places], tables.sin[places]),
            rotate(k, tables.cos[context], tables.sin[context]),
        )
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("nhd,mhd->hnm", q, k) * dim**-0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return self.product(f"{prefix}self_attn.o_proj", torch.einsum("hnm,mhd->nhd", weights, v).flatten(1))

    def mlp(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.product(f"{prefix}mlp.gate_proj", x), self.product(f"{prefix}mlp.up_proj", x)
        return self.product(f"{prefix}mlp.down_proj", functional.silu(gate) * up)

    def eagle(self, features: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """features [n, 3 * hidden] of positions 0..n-1, tokens of positions 1.. (n true pairs, then guesses):
        logits and outputs of the last row, as a chain drafts them."""
        n, total = len(features), len(tokens)
        g = self.product("fc", features)
        e = self.norm(self.embedding[list(tokens)], "midlayer.input_layernorm")
        known, outputs = [*g], g[:0]
        for length in range(n, total + 1):
            rows = torch.stack(known)
            normed = self.norm(rows, "midlayer.hidden_norm")
            x, residual = (
                torch.cat([e[:length], normed], 1),
                normed if self.config.norm_before_residual else rows,
            )
            places = torch.arange(length)
            h = residual + self.attend(
                "midlayer.", x, x, places, places, torch.ones(length, length).tril().bool()
            )
            outputs = h + self.mlp("midlayer.", self.norm(h, "midlayer.post_attention_layernorm"))
            known.append(self.norm(outputs[-1:], "norm")[0] if self.config.norm_output else outputs[-1])
        return self.logits(self.norm(outputs[-1:], "norm"))[0], known[-1]

    def medusa(self, hidden: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """[heads, draft vocabulary] after the target's last hidden state [hidden], or a trunk's output."""
        h, found = rms_norm(hidden[None], norm, self.config.rms_eps), []
        for head in range(self.config.num_heads_ahead):
            y = h
            for block in range(self.config.num_blocks):
                y = y + functional.silu(self.product(f"blocks.{head}.layers.{block}", y))
            found.append(
                self.logits(y) if "lm_head.weight" in self.tensors else self.product(f"lm_heads.{head}", y)
            )
        return torch.cat(found)

    def dflash(self, features: torch.Tensor, root: int) -> torch.Tensor:
        """[block, draft vocabulary] after a context of n features, without the Markov head."""
        config, n = self.config, len(features)
        context = self.norm(self.product("fc", features), "hidden_norm")
        h = self.embedding[[root, *[config.mask_token_id] * (config.block_size - 1)]]
        places, here = torch.arange(n + config.block_size), torch.arange(n, n + config.block_size)
        for i in range(config.num_layers):
            prefix = f"layers.{i}."
            x = self.norm(h, f"{prefix}input_layernorm")
            mask = torch.ones(config.block_size, n + config.block_size).bool()
            h = h + self.attend(prefix, x, torch.cat([context, x]), here, places, mask)
            h = h + self.mlp(prefix, self.norm(h, f"{prefix}post_attention_layernorm"))
        return self.logits(self.norm(h, "norm"))

    def markov(self, word: int) -> torch.Tensor:
        """What a token before adds to the logits; word: its draft id."""
        return self.product("markov_w2", self.tensors["markov_w1.weight"][word : word + 1])[0]

    def eagle_1(self, features: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after the last of the tokens; features [n, hidden] after the target's last norm, the head's
        own output where they end.
        """
        known = [*features]
        for length in range(len(features), len(tokens) + 1):
            x = self.product("fc", torch.cat([self.embedding[list(tokens[:length])], torch.stack(known)], 1))
            places = torch.arange(length)
            h = x + self.attend("midlayer.", x, x, places, places, torch.ones(length, length).tril().bool())
            h = h + self.mlp("midlayer.", self.norm(h, "midlayer.post_attention_layernorm"))
            known.append(h[-1])
        return self.logits(known[-1][None])[0]

    def draft(self, tokens: Sequence[int]) -> torch.Tensor:
        h, places = self.embedding[list(tokens)], torch.arange(len(tokens))
        for i in range(self.config.num_layers):
            x = self.norm(h, f"layers.{i}.input_layernorm")
            h = h + self.attend(
                f"layers.{i}.", x, x, places, places, torch.ones(len(tokens), len(tokens)).tril().bool()
            )
            h = h + self.mlp(f"layers.{i}.", self.norm(h, f"layers.{i}.post_attention_layernorm"))
        return self.logits(self.norm(h[-1:], "norm"))[0]
