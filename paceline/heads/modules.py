"""Every kind of head in torch: the definition that drafts as a reference, that is trained, and that says
which tensors a file holds.

docs/heads.md writes the same down in words. A definition knows no cache: attention is handed in (see
models/layer.py), so drafting, simulated steps and whole texts run the same lines. Invariant: `state_dict()`
has exactly the names and shapes of the head's file; the draft ids, which are no weights, are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.heads import config as configs
from paceline.models.config import ModelConfig
from paceline.models.experts import ExpertFfn
from paceline.models.layer import AttendIn, Layer, Linear, Norm
from paceline.models.rope import Angles

Tensors = Mapping[str, Tensor]


def layer_config(config: configs.LayeredConfig) -> ModelConfig:
    """What one of its layers is made by."""
    names = [each.name for each in fields(ModelConfig) if hasattr(config, each.name)]
    shared = {name: getattr(config, name) for name in names}
    values: dict[str, Any] = {"family": "llama", "num_layers": 1, "max_context": 0} | shared
    if isinstance(config, configs.MtpConfig):
        values |= {"qkv_bias": config.has_bias, "gated_attention": config.is_gated}
    return ModelConfig(**values)


class HeadModule(nn.Module):
    """What all kinds share: an output layer over the draft vocabulary, unless rows of the target's own do."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, sizes = config, (config.hidden_size, config.draft_vocab_size)
        self.lm_head: Any = Linear.empty(*sizes) if config.has_lm_head else None


class ChainModule(HeadModule):
    """A head that reads a token and a source a row: the target's features at first, then its own output."""

    num_layers = 1

    def source(self, features: Tensor) -> Tensor:
        """Features of the target [..., taps * hidden] -> what `forward` reads beside the tokens."""
        return features

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the output layer reads of the rows that were put out, and the source of those that follow."""
        return x, x


class Eagle(ChainModule):
    """EAGLE-3: its layer reads a token and a source, each with a norm of its own."""

    def __init__(self, config: configs.EagleConfig) -> None:
        super().__init__(config)
        d = config.hidden_size
        self.fc = Linear.empty(len(config.taps) * d, d)
        self.midlayer: Any = Layer(layer_config(config), width=2 * d)
        self.midlayer.hidden_norm = Norm(d, config.rms_eps)
        self.norm = Norm(d, config.rms_eps)

    def source(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def inputs(self, embedded: Tensor, source: Tensor) -> Tensor:
        """The next token's embedding beside the source, each normed: [..., 2 * hidden]."""
        return torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(source)], -1)

    def forward(self, embedded: Tensor, source: Tensor, angles: Angles, attend: AttendIn) -> Tensor:
        inputs = self.inputs(embedded, source)
        residual = inputs[..., source.shape[-1] :] if self.config.norm_before_residual else source
        return self.midlayer(residual, angles, partial(attend, 0), inputs)

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        return normed, normed if self.config.norm_output else x


class Eagle1(ChainModule):
    """EAGLE-1 and -2: no norms at the ends."""

    def __init__(self, config: configs.Eagle1Config) -> None:
        super().__init__(config)
        self.fc = Linear.empty(2 * config.hidden_size, config.hidden_size, has_bias=config.has_fc_bias)
        self.midlayer = Layer(layer_config(config))
        self.midlayer.input_layernorm = nn.Identity()

    def forward(self, embedded: Tensor, source: Tensor, angles: Angles, attend: AttendIn) -> Tensor:
        return self.midlayer(self.fc(torch.cat([embedded, source], -1)), angles, partial(attend, 0))


class Mtp(ChainModule):
    """A module of the target's own: both inputs normed and fused, a layer as the target's, a norm."""

    def __init__(self, config: configs.MtpConfig) -> None:
        super().__init__(config)
        d = config.hidden_size
        own = layer_config(config)
        ffn = None if own.experts is None else ExpertFfn(own, own.experts, 32)
        self.fc, self.midlayer = Linear.empty(2 * d, d), Layer(own, ffn=ffn)
        self.embed_norm, self.hidden_norm, self.norm = (Norm(d, config.rms_eps) for _ in range(3))

    def forward(self, embedded: Tensor, source: Tensor, angles: Angles, attend: AttendIn) -> Tensor:
        inputs = torch.cat([self.embed_norm(embedded), self.hidden_norm(source)], -1)
        return self.midlayer(self.fc(inputs), angles, partial(attend, 0))

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        return normed, normed if self.config.norm_output else x


class Draft(ChainModule):
    """A small llama on the target's embeddings."""

    def __init__(self, config: configs.DraftConfig) -> None:
        super().__init__(config)
        self.num_layers = config.num_layers
        self.layers = nn.ModuleList(Layer(layer_config(config)) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_eps)

    def forward(self, embedded: Tensor, source: Tensor | None, angles: Angles, attend: AttendIn) -> Tensor:
        return through(self.layers, embedded, angles, attend)

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x), x


class Dflash(HeadModule):
    """A block in one pass: fused features are keys and values of every layer, beside those of the block."""

    def __init__(self, config: configs.DflashConfig) -> None:
        super().__init__(config)
        d = config.hidden_size
        self.num_layers = config.num_layers
        self.fc = Linear.empty(len(config.taps) * d, d)
        self.hidden_norm, self.norm = Norm(d, config.rms_eps), Norm(d, config.rms_eps)
        self.layers = nn.ModuleList(Layer(layer_config(config)) for _ in range(config.num_layers))
        if config.markov_rank:  # rows of the first are draft ids, the last stands for any other token
            self.markov_w1 = Linear.empty(config.markov_rank, config.draft_vocab_size + 1)
            self.markov_w2 = Linear.empty(config.markov_rank, config.draft_vocab_size)

    def keys_values(self, features: Tensor, angles: Angles) -> list[tuple[Tensor, Tensor]]:
        """Of the context, layer by layer: features [..., taps * hidden] -> [..., kv_heads, dim] each."""
        context = self.hidden_norm(self.fc(features))
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]
        return [layer.self_attn.keys_values(context, angles) for layer in layers]

    def forward(self, x: Tensor, angles: Angles, attend: AttendIn) -> Tensor:
        """Embeddings of a root and masks -> what the output layer reads."""
        return self.norm(through(self.layers, x, angles, attend))


class Medusa(HeadModule):
    """Stacks of residual blocks, one a position ahead."""

    def __init__(self, config: configs.MedusaConfig) -> None:
        super().__init__(config)
        d, count = config.hidden_size, config.num_heads_ahead
        self.blocks = nn.ModuleList(nn.Module() for _ in range(count))
        for block in self.blocks:
            block.layers = nn.ModuleList(Linear.empty(d, d, has_bias=True) for _ in range(config.num_blocks))
        self.trunk = None if config.trunk is None else Eagle(config.trunk)
        if isinstance(config, configs.SeparateMedusaConfig):
            self.lm_heads = nn.ModuleList(Linear.empty(d, config.draft_vocab_size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] after the target's last norm, or the trunk's -> [heads, ..., hidden]."""
        found = []
        for block in self.blocks:
            y = x
            for layer in block.layers:  # type: ignore[union-attr]
                y = y + functional.silu(layer(y))
            found.append(y)
        return torch.stack(found)

    def logits(self, x: Tensor) -> Tensor:
        """[heads, ..., hidden] -> [heads, ..., draft vocabulary]."""
        if self.lm_head is not None:
            return self.lm_head(x)
        return torch.stack([layer(y) for layer, y in zip(self.lm_heads, x, strict=True)])


class ShiftedNorm(Norm):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.bias = nn.Parameter(torch.zeros(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class MlpSpeculator(HeadModule):
    """A state takes in one token a step; where weights are tied, all steps but the first share theirs."""

    def __init__(self, config: configs.MlpSpeculatorConfig) -> None:
        super().__init__(config)
        inner, vocab, steps = config.inner_dim, config.vocab_size, config.num_predict
        shared = 1 if config.is_tied else steps
        widths = [config.hidden_size, *[inner] * (steps - 1)][: 2 if config.is_tied else steps]
        self.emb = nn.ModuleList(Linear.empty(inner, vocab) for _ in range(shared))
        self.proj = nn.ModuleList(Linear.empty(width, inner) for width in widths)
        self.head = nn.ModuleList(Linear.empty(inner, vocab) for _ in range(shared))
        self.ln = nn.ModuleList(ShiftedNorm(inner, config.rms_eps) for _ in range(shared))
        self.kept = 0.5 ** (0.5 / steps)  # of the state
        self.taken = ((1 - self.kept**2) * inner / 2) ** 0.5  # of the token

    def forward(self, state: Tensor, tokens: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """state [n, hidden or inner], tokens [n] -> logits [n, vocab], the next state [n, inner]."""
        parts = (self.emb, self.proj, self.head, self.ln)
        emb, proj, head, ln = (part[min(step, len(part) - 1)] for part in parts)
        mixed = proj(state) * self.kept + emb.rows(tokens) * self.taken  # type: ignore[operator]
        state = functional.gelu(ln(mixed))
        return head(state), state


MODULES: dict[type[configs.HeadConfig], Any] = {
    configs.EagleConfig: Eagle,
    configs.Eagle1Config: Eagle1,
    configs.MtpConfig: Mtp,
    configs.DraftConfig: Draft,
    configs.DflashConfig: Dflash,
    configs.MedusaConfig: Medusa,
    configs.SeparateMedusaConfig: Medusa,
    configs.MlpSpeculatorConfig: MlpSpeculator,
}


def through(layers: nn.ModuleList, x: Tensor, angles: Angles, attend: AttendIn) -> Tensor:
    for i, layer in enumerate(layers):
        x = layer(x, angles, partial(attend, i))
    return x


def empty_module(config: configs.HeadConfig) -> Any:
    """The definition, its weights without numbers."""
    with torch.device("meta"):
        return MODULES[type(config)](config)


def load_module(
    config: configs.HeadConfig, tensors: Tensors, device: torch.device, dtype: torch.dtype
) -> Any:
    """The definition with these weights. Rows of the target's output layer may be among them as `lm_head`."""
    module = empty_module(replace(config, has_lm_head="lm_head.weight" in tensors))
    weights = {name: t.to(device, dtype) for name, t in tensors.items() if name != "draft_ids"}
    module.load_state_dict(weights, assign=True)
    return module


def tensor_shapes(config: configs.HeadConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a head's file, with its shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in empty_module(config).state_dict().items()}
    if config.draft_vocab_size < config.vocab_size:
        shapes["draft_ids"] = (config.draft_vocab_size,)
    return shapes
