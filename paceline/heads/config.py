"""What a learned drafter is on disk: one frozen config a kind, the tensors it has, and which target it was
trained for.

A head is a folder: config.json (a config of this file), model.safetensors (exactly `tensor_shapes()`),
provenance.json (how it was made). The target's embeddings are used by reference and never stored. Layers are
counted as `Needs.hidden_layers` counts them: hidden[n] is the residual stream after n layers. The forward of
each kind is written down in docs/heads.md and, in torch, in paceline/train/modules.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paceline.core.errors import ConfigError, ModelFileError
from paceline.core.options import from_options, nearest
from paceline.models.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from paceline.loaders.checkpoint import Checkpoint

Kind = Literal["eagle", "medusa", "dflash", "draft"]
FORMAT = 1
Shapes = dict[str, tuple[int, ...]]
TRUNK = "trunk."  # before the names of a trunk's tensors
LIMITS = {
    "block_size": 64,
    "num_heads_ahead": 32,
    "num_layers": 64,
    "num_blocks": 16,
}  # beyond, a file is not believed


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What all kinds share. Sizes are the target's unless said otherwise."""

    kind: ClassVar[Kind]
    target_name: str
    target_hash: str
    vocab_size: int
    hidden_size: int
    target_layers: int
    rms_eps: float
    draft_vocab_size: int  # equal to vocab_size: every token can be drafted, and no `draft_ids` are stored
    has_lm_head: bool = True  # False: the rows `draft_ids` of the target's own output layer
    first_accepted: float = 0.0  # share of held-out drafts whose first token was right; 0: not known

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "target_layers", "draft_vocab_size")
        for name in (
            *sizes,
            *(n for n in ("num_layers", "num_blocks", "num_heads_ahead", "block_size") if hasattr(self, n)),
        ):
            value, most = getattr(self, name), LIMITS.get(name, 1 << 24)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{name} is {value!r}; a head has a whole number from 1 to {most}")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size is {self.draft_vocab_size}; the target knows {self.vocab_size} tokens"
            )
        if isinstance(self.first_accepted, bool) or not 0 <= self.first_accepted <= 1:
            raise ConfigError(f"first_accepted is {self.first_accepted!r}; it is a share, from 0 to 1")
        for tap in self.hidden_layers:
            if isinstance(tap, bool) or not isinstance(tap, int) or not 0 <= tap <= self.target_layers:
                raise ConfigError(f"the head reads layer {tap!r}; the target has {self.target_layers}")

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What `Needs.hidden_layers` asks of the target's pass."""
        return ()

    def tensor_shapes(self) -> Shapes:
        """Every tensor of the file, with its shape."""
        shapes: Shapes = self._own_shapes()
        if self.has_lm_head:
            shapes["lm_head.weight"] = (self.draft_vocab_size, self.hidden_size)
        if self.draft_vocab_size < self.vocab_size:
            shapes["draft_ids"] = (self.draft_vocab_size,)
        return shapes

    def _own_shapes(self) -> Shapes:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredConfig(HeadConfig):
    """Kinds that attend."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeConfig = field(default_factory=RopeConfig)

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
                raise ConfigError(f"{name} is {value!r}; a head has a whole number, 1 or more")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"{self.num_heads} heads of {self.head_dim} over {self.num_kv_heads} key heads do not divide evenly"
            )

    def _layer_shapes(self, prefix: str, width: int) -> Shapes:
        """A llama layer whose queries, keys and values read `width` numbers."""
        d, hd, inner = self.hidden_size, self.head_dim, self.intermediate_size
        shapes: Shapes = {}
        for name, heads in (("q", self.num_heads), ("k", self.num_kv_heads), ("v", self.num_kv_heads)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (heads * hd, width)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (d, self.num_heads * hd)
        shapes[f"{prefix}mlp.gate_proj.weight"] = shapes[f"{prefix}mlp.up_proj.weight"] = (inner, d)
        shapes[f"{prefix}mlp.down_proj.weight"] = (d, inner)
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (d,)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(LayeredConfig):
    """EAGLE-3: one layer reads the next token's embedding beside three fused hidden states of the target,
    then its own output.
    """

    kind: ClassVar[Kind] = "eagle"
    taps: tuple[int, ...]
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_output: bool = False  # the next step reads the output after `norm`

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.taps

    def _own_shapes(self) -> Shapes:
        d = self.hidden_size
        shapes = {"fc.weight": (d, len(self.taps) * d), **self._layer_shapes("midlayer.", 2 * d)}
        return {**shapes, "midlayer.hidden_norm.weight": (d,), "norm.weight": (d,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """K heads on the target's last hidden state, or on a trunk's output; each is a stack of residual blocks,
    and one output layer speaks for all of them."""

    kind: ClassVar[Kind] = "medusa"
    num_heads_ahead: int  # K
    num_blocks: int = 1
    trunk: EagleConfig | None = (
        None  # a layer that reads the text and the newest token first, as Hydra's prefix attention does
    )

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        if self.trunk is None:
            return
        shared = ("target_hash", "vocab_size", "hidden_size", "target_layers", "rms_eps", "draft_vocab_size")
        differs = next((name for name in shared if getattr(self.trunk, name) != getattr(self, name)), None)
        if differs is not None:
            raise ConfigError(
                f"the trunk's {differs} is {getattr(self.trunk, differs)!r}, the head's {getattr(self, differs)!r}"
            )
        if self.trunk.has_lm_head or self.trunk.norm_output or not self.has_lm_head:
            raise ConfigError(
                "a trunk's has_lm_head and norm_output are false, and its head's has_lm_head is true: the heads speak for it"
            )

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self.target_layers,) if self.trunk is None else self.trunk.hidden_layers

    def _own_shapes(self) -> Shapes:
        d, shapes = self.hidden_size, Shapes()
        if self.trunk is not None:
            shapes.update((TRUNK + name, shape) for name, shape in self.trunk._own_shapes().items())
        for head in range(self.num_heads_ahead):
            for block in range(self.num_blocks):
                shapes[f"blocks.{head}.layers.{block}.weight"] = (d, d)
                shapes[f"blocks.{head}.layers.{block}.bias"] = (d,)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class DflashConfig(LayeredConfig):
    """A whole block in one pass: the target's features are keys and values of every layer; queries are the
    root and masks.
    """

    kind: ClassVar[Kind] = "dflash"
    taps: tuple[int, ...]
    num_layers: int
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool = (
        True  # the root's row predicts the next token; else it predicts nothing and a block drafts one less
    )
    markov_rank: int = 0  # 0: no Markov head

    def __post_init__(self) -> None:
        LayeredConfig.__post_init__(self)
        if not 0 <= self.mask_token_id < self.vocab_size or not 0 <= self.markov_rank <= 4096:
            raise ConfigError(
                f"mask_token_id is {self.mask_token_id} and markov_rank {self.markov_rank}; the head's config is damaged"
            )

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.taps

    @property
    def num_drafts(self) -> int:
        """K: tokens a pass drafts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def _own_shapes(self) -> Shapes:
        d, hd = self.hidden_size, self.head_dim
        shapes: Shapes = {
            "fc.weight": (d, len(self.taps) * d),
            "hidden_norm.weight": (d,),
            "norm.weight": (d,),
        }
        for i in range(self.num_layers):
            shapes.update(self._layer_shapes(f"layers.{i}.", d))
            shapes[f"layers.{i}.self_attn.q_norm.weight"] = shapes[f"layers.{i}.self_attn.k_norm.weight"] = (
                hd,
            )
        if self.markov_rank:
            shapes["markov_w1.weight"] = (
                self.draft_vocab_size + 1,
                self.markov_rank,
            )  # by draft id; the last: any other token
            shapes["markov_w2.weight"] = (self.draft_vocab_size, self.markov_rank)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(LayeredConfig):
    """A small llama that reads the target's embeddings and writes a reduced vocabulary."""

    kind: ClassVar[Kind] = "draft"
    num_layers: int

    def _own_shapes(self) -> Shapes:
        shapes: Shapes = {"norm.weight": (self.hidden_size,)}
        for i in range(self.num_layers):
            shapes.update(self._layer_shapes(f"layers.{i}.", self.hidden_size))
        return shapes


CONFIGS: dict[str, type[HeadConfig]] = {
    c.kind: c for c in (EagleConfig, MedusaConfig, DflashConfig, DraftConfig)
}


def write_head_config(config: HeadConfig) -> dict[str, Any]:
    """What config.json holds."""
    return {"paceline_head": FORMAT, "kind": config.kind, **asdict(config)}


def read_head_config(values: Mapping[str, Any], where: str) -> HeadConfig:
    """A config from config.json; anything unknown or impossible is one error that names the file."""
    if values.get("paceline_head") != FORMAT:
        raise ModelFileError(
            f"{where}: paceline_head is {values.get('paceline_head')!r}; this version reads format {FORMAT}"
        )
    kind = CONFIGS.get(str(values.get("kind")))
    if kind is None:
        raise ModelFileError(
            f"{where}: kind is {values.get('kind')!r}; {nearest(str(values.get('kind')), list(CONFIGS))}"
        )
    options = {name: value for name, value in values.items() if name not in ("paceline_head", "kind")}
    try:
        return _from_values(kind, options, where)
    except (ConfigError, TypeError) as error:
        raise ModelFileError(f"{where}: {error}") from error


def _from_values(kind: type[HeadConfig], values: Mapping[str, Any], where: str) -> HeadConfig:
    """JSON has lists where a config has tuples, and no configs inside configs."""
    options = dict(values)
    if isinstance(options.get("taps"), list):
        options["taps"] = tuple(options["taps"])
    if isinstance(options.get("rope"), dict):
        rope = dict(options["rope"])
        rope["divisors"] = tuple(rope["divisors"]) if rope.get("divisors") is not None else None
        options["rope"] = from_options(RopeConfig, rope, f"{where} rope")
    if options.get("trunk") is not None:
        if not isinstance(options["trunk"], dict):
            raise ConfigError(f"trunk is {options['trunk']!r:.60}; it is a config of its own")
        options["trunk"] = _from_values(EagleConfig, options["trunk"], f"{where} trunk")
    return from_options(kind, options, f"a head of kind {kind.kind}")


def shared_fields(target: ModelConfig, name: str, digest: str, draft_vocab_size: int) -> dict[str, Any]:
    """What every head of this target has in its config."""
    return {
        "target_name": name,
        "target_hash": digest,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "target_layers": target.num_layers,
        "rms_eps": target.rms_eps,
        "draft_vocab_size": min(draft_vocab_size, target.vocab_size),
    }


def default_taps(num_layers: int, count: int = 3) -> tuple[int, ...]:
    """Low, middle and high as EAGLE-3 has them; spread evenly for another count or a target of very few
    layers.
    """
    if count == 3 and num_layers >= 6:
        return 2, num_layers // 2, num_layers - 3
    low, high = (2, num_layers - 2) if num_layers >= 6 else (0, num_layers)
    return tuple(round(low + i * (high - low) / max(1, count - 1)) for i in range(count))


def target_hash(checkpoint: Checkpoint) -> str:
    """Which weights a head belongs to: sizes, the last norm, and the keys of the first and last layer. File
    names do not matter.
    """
    import torch

    config = checkpoint.config
    sizes = (
        config.family,
        config.vocab_size,
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
    )
    digest = hashlib.sha256(repr(sizes).encode())
    for name in ("norm.weight", *(f"layers.{i}.self_attn.k_proj.weight" for i in (0, config.num_layers - 1))):
        digest.update(checkpoint.tensor(name).to(torch.float16).contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_target(config: HeadConfig, checkpoint: Checkpoint, where: str) -> None:
    """A head only runs on the target it was trained for."""
    found = target_hash(checkpoint)
    if found != config.target_hash:
        raise ModelFileError(
            f"{where}: this {config.kind} head was trained for {config.target_name} ({config.target_hash[:12]}), not for "
            f"{checkpoint.name} ({found[:12]}); use a head of that target, or train one: paceline train {config.kind}"
        )
