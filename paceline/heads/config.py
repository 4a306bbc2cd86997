"""What a learned drafter is on disk: one frozen config a kind, and which target it was trained for.

A head is a folder: config.json (a config of this file), model.safetensors (exactly the tensors of its
definition, heads/modules.py), provenance.json (how it was made). The target's embeddings are used by
reference and never stored. Layers are counted as `Needs.hidden_layers` counts them: hidden[n] is the residual
stream after n layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

from paceline.core.errors import ConfigError, ModelFileError
from paceline.core.options import from_options, is_whole, nearest, require
from paceline.models.config import ExpertsConfig, RopeConfig

Kind = Literal["eagle", "medusa", "dflash", "draft", "mlp_speculator", "mtp"]
FORMAT = 1
TRUNK = "trunk."  # before the names of a trunk's tensors
LARGE = 1 << 24
LIMITS = {  # beyond, a file is not believed
    **dict.fromkeys(("vocab_size", "hidden_size", "target_layers", "draft_vocab_size", "inner_dim"), LARGE),
    **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "intermediate_size"), 1 << 20),
    **{"num_predict": 16, "block_size": 64, "num_heads_ahead": 32, "num_layers": 64, "num_blocks": 16},
}


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
        for name in (f.name for f in fields(self) if f.name in LIMITS):
            value, most = getattr(self, name), LIMITS[name]
            remedy = f"a head has a whole number from 1 to {most}"
            require(is_whole(value) and 1 <= value <= most, name, value, remedy)
        words, remedy = self.draft_vocab_size, f"the target knows {self.vocab_size} tokens"
        require(words <= self.vocab_size, "draft_vocab_size", words, remedy)
        share, remedy = self.first_accepted, "it is a share, from 0 to 1"
        require(not isinstance(share, bool) and 0 <= share <= 1, "first_accepted", share, remedy)
        for tap in self.hidden_layers:
            if not is_whole(tap) or not 0 <= tap <= self.target_layers:
                raise ConfigError(f"the head reads layer {tap!r}; the target has {self.target_layers}")

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What `Needs.hidden_layers` asks of the target's pass: the last, unless a kind says otherwise."""
        return (self.target_layers,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredConfig(HeadConfig):
    """Kinds that attend."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    qk_norm: bool = False  # queries and keys are normed

    @property
    def rotary_width(self) -> int:
        """Numbers of a head that turn."""
        return self.head_dim

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        heads = f"{self.num_heads} heads of {self.head_dim} over {self.num_kv_heads} key heads"
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ConfigError(f"{heads} do not divide evenly")
        if self.num_heads * self.head_dim > LARGE:
            raise ConfigError(f"{heads} are too large to be believed; the head's config is damaged")


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedConfig(LayeredConfig):
    """Kinds that read hidden states of several layers."""

    taps: tuple[int, ...]

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.taps


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(TappedConfig):
    """EAGLE-3: one layer reads the next token's embedding beside fused hidden states, then its own output."""

    kind: ClassVar[Kind] = "eagle"
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_output: bool = False  # the next step reads the output after `norm`


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """K heads on the target's last hidden state, or on a trunk's output; each is a stack of residual blocks,
    and one output layer serves all of them."""

    kind: ClassVar[Kind] = "medusa"
    num_heads_ahead: int  # K
    num_blocks: int = 1
    # a layer that reads the text and the newest token first, as Hydra's prefix attention does
    trunk: EagleConfig | None = None

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        if self.trunk is None:
            return
        shared = ("target_hash", "vocab_size", "hidden_size", "target_layers", "rms_eps", "draft_vocab_size")
        differs = next((name for name in shared if getattr(self.trunk, name) != getattr(self, name)), None)
        if differs is not None:
            theirs, mine = getattr(self.trunk, differs), getattr(self, differs)
            raise ConfigError(f"the trunk's {differs} is {theirs!r}, the head's {mine!r}")
        if self.trunk.has_lm_head or self.trunk.norm_output or not self.has_lm_head:
            wanted = "a trunk's has_lm_head and norm_output are false, and its head's has_lm_head is true"
            raise ConfigError(f"{wanted}: the output layer is the head's")

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self.target_layers,) if self.trunk is None else self.trunk.hidden_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class DflashConfig(TappedConfig):
    """A block in one pass: the target's features are keys and values of every layer; queries are the root and
    masks."""

    kind: ClassVar[Kind] = "dflash"
    num_layers: int
    block_size: int
    mask_token_id: int
    # the root's row predicts the next token; else it predicts nothing and a block drafts one less
    sample_from_anchor: bool = True
    markov_rank: int = 0  # 0: no Markov head
    qk_norm: bool = True

    def __post_init__(self) -> None:
        LayeredConfig.__post_init__(self)
        if not 0 <= self.mask_token_id < self.vocab_size or not 0 <= self.markov_rank <= 4096:
            found = f"mask_token_id is {self.mask_token_id} and markov_rank {self.markov_rank}"
            raise ConfigError(f"{found}; the head's config is damaged")

    @property
    def num_drafts(self) -> int:
        """K: tokens a pass drafts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(LayeredConfig):
    """A small llama that reads the target's embeddings and writes a reduced vocabulary."""

    kind: ClassVar[Kind] = "draft"
    num_layers: int

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return ()


# Heads of other projects that Paceline runs and does not train.


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle1Config(LayeredConfig):
    """EAGLE-1 and -2: one layer without norms at its ends reads the next token's embedding fused with the
    target's last hidden state (after its norm); logits are the target's output layer's."""

    kind: ClassVar[Kind] = "eagle"
    has_fc_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(Eagle1Config):
    """A module of the target's own checkpoint (multi-token prediction): as EAGLE-1, with norms of both
    inputs and at the layer's ends; what follows reads its output after the last. The layer is as the
    target's are."""

    kind: ClassVar[Kind] = "mtp"
    has_bias: bool = False  # queries, keys and values
    is_gated: bool = False
    rotary_dim: int = 0
    experts: ExpertsConfig | None = None
    norm_output: bool = True  # the next step reads the output after `norm`

    @property
    def rotary_width(self) -> int:
        return self.rotary_dim or self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateMedusaConfig(MedusaConfig):
    """Medusa as it was published: every head has an output layer of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpeculatorConfig(HeadConfig):
    """IBM's MLP speculator: the target's last hidden state (after its norm) takes in one token a step."""

    kind: ClassVar[Kind] = "mlp_speculator"
    inner_dim: int
    num_predict: int
    is_tied: bool = False  # all steps but the first share their weights
    is_scaled: bool = False  # the hidden state is normed first


TRAINED = (EagleConfig, MedusaConfig, DflashConfig, DraftConfig)
CONFIGS: dict[str, type[HeadConfig]] = {config.kind: config for config in TRAINED}


def write_head_config(config: HeadConfig) -> dict[str, Any]:
    """What config.json holds."""
    return {"paceline_head": FORMAT, "kind": config.kind, **asdict(config)}


def read_head_config(values: Mapping[str, Any], where: str) -> HeadConfig:
    """A config from config.json; anything unknown or impossible is one error that names the file."""
    options = dict(values)
    version, name = options.pop("paceline_head", None), options.pop("kind", None)
    if version != FORMAT:
        raise ModelFileError(f"{where}: paceline_head is {version!r}; this version reads format {FORMAT}")
    if str(name) not in CONFIGS:
        raise ModelFileError(f"{where}: kind is {name!r}; {nearest(str(name), list(CONFIGS))}")
    try:
        return _from_values(CONFIGS[str(name)], options, where)
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


def default_taps(num_layers: int, count: int = 3) -> tuple[int, ...]:
    """Low, middle and high as EAGLE-3 has them; spread evenly for another count or very few layers."""
    if count == 3 and num_layers >= 6:
        return 2, num_layers // 2, num_layers - 3
    low, high = (2, num_layers - 2) if num_layers >= 6 else (0, num_layers)
    return tuple(round(low + i * (high - low) / max(1, count - 1)) for i in range(count))
