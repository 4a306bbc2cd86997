"""Puts a model, its KV cache and a drafter together. Everything "auto" is decided here, before anything is
built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.options import EngineConfig, nearest, require
from paceline.core.params import SamplingParams
from paceline.core.types import Proposer, Request
from paceline.core.waiting import waiting
from paceline.drafters import registry, shipped
from paceline.drafters.base import DrafterConfig, Surroundings
from paceline.engine.engine import Engine
from paceline.engine.plan import Policy
from paceline.engine.policy import AutoPolicy
from paceline.engine.profile import profile_of, profile_path
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.loaders.tokenizer import Tokenizer
from paceline.models.config import ModelConfig
from paceline.runtime.device import cache_dtype, free_memory, resolve
from paceline.runtime.kv_cache import BLOCK_SIZE, Kept, KvCache, blocks_in, bytes_per_token
from paceline.runtime.runner import Runner, check_dtype, default_dtype, load_decoder

HEAD_COST = 0.1  # of a pass: what a learned head is taken to cost for each token until it is timed
SPARE = 0.125  # of the free memory, at most, for the KV cache when nothing is said


class Built(NamedTuple):
    engine: Engine
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    surroundings: Surroundings


class Speculation(NamedTuple):
    """What a speculative_config asks for."""

    drafters: tuple[tuple[type[Any], DrafterConfig], ...] = ()
    is_pinned: bool = True  # as many tokens as were asked for, always; else the policy chooses
    head: bool | str = (
        # whether the shipped head of the target is asked too, where there is one; or the kind it must be
        False
    )

    @property
    def most_nodes(self) -> int:
        return sum(config.num_speculative_tokens for _, config in self.drafters)


def parse_speculation(options: Mapping[str, Any] | str | None) -> Speculation:
    """None or "off": nobody drafts. "auto": the policy chooses drafters and lengths; with "head": False
    without the learned head that is shipped for the target, with its kind that one. A method: that one; with
    a length, always so much."""
    head: bool | str = True
    if isinstance(options, Mapping) and options.get("method") in ("auto", "off", "none"):
        if options["method"] == "auto":
            head = options.get("head", True)
            remedy = f"use True, False or one of {', '.join(shipped.KINDS)}"
            require(isinstance(head, bool) or head in shipped.KINDS, "speculative_config head", head, remedy)
        extra = next(
            (
                name
                for name in options
                if name != "method" and (name != "head" or options["method"] != "auto")
            ),
            None,
        )
        if extra is not None:
            raise ConfigError(
                f"speculative_config has {extra!r} beside method {options['method']!r}; name a drafter, or leave it out"
            )
        options = str(options["method"])
    if options is None or options in ("off", "none"):
        return Speculation()
    if options == "auto":
        return Speculation(tuple(registry.parse(each) for each in registry.AUTO), is_pinned=False, head=head)
    if isinstance(options, str):
        names = ["auto", "off"]
        known = options in registry.DRAFTERS
        remedy = (
            f"give a dict such as {{'method': {options!r}}}"
            if known
            else f"{nearest(options, names)} or give a dict"
        )
        raise ConfigError(f"speculative_config is {options!r}; {remedy}")
    return Speculation((registry.parse(options),), is_pinned="num_speculative_tokens" in options)


def build(
    model: str,
    speculative_config: Mapping[str, Any] | str | None,
    kv_cache_memory: int | float | None,
    max_model_len: int | None,
    kernels: str,
    dtype: str,
    device: str,
    exact: bool,
    load_format: str,
    kv_cache_dtype: str,
    progress: bool,
    **limits: Any,
) -> Built:
    asked = parse_speculation(speculative_config)
    config = EngineConfig(num_speculative_tokens=0, **limits)  # checked before a model is read
    require(
        isinstance(model, str) and bool(model),
        "model",
        model,
        "give a path, 'default' or a Hugging Face name",
    )
    place = resolve(device)
    dtype = default_dtype(place, kernels) if dtype == "auto" else dtype
    check_dtype(place, dtype)
    if max_model_len is not None:
        require(
            _is_whole(max_model_len) and max_model_len >= 2,
            "max_model_len",
            max_model_len,
            "use a whole number, 2 or more",
        )
    checkpoint = open_checkpoint(model, progress, load_format, str(place))
    tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source())
    asked = _with_head(asked, checkpoint)
    kept = cache_dtype(place, dtype, kv_cache_dtype, kernels)
    free = free_memory(place, checkpoint.config, dtype)
    memory = _kv_memory(kv_cache_memory, checkpoint.config, config, max_model_len, kept, free)
    num_blocks = blocks_in(memory, checkpoint.config, kept)
    length = _context(max_model_len, checkpoint.config, num_blocks)
    num_draft = asked.most_nodes if asked.is_pinned else min(asked.most_nodes, length - 1)
    config = EngineConfig(max_model_len=length, num_speculative_tokens=num_draft, **limits)

    def load(source: str | Checkpoint, its_dtype: str = dtype) -> tuple[Checkpoint, Tokenizer, Runner]:
        other = open_checkpoint(source, progress) if isinstance(source, str) else source
        words = Tokenizer.from_source(other.tokenizer_source()) if isinstance(source, str) else tokenizer
        with waiting("packing the weights for this machine (once)", progress):
            decoder = load_decoder(
                other, kernels=kernels, dtype=its_dtype, context=length, device=place, exact=exact
            )
        its_kept = cache_dtype(place, its_dtype, kv_cache_dtype, kernels)
        runner = Runner(
            decoder,
            KvCache(other.config, num_blocks, device=place, kept=its_kept, has_spare=place.type == "cuda"),
        )
        with waiting("compiling the kernels for this machine (once, half a minute)", progress):
            runner.warm_up()
        return other, words, runner

    runner = load(checkpoint)[2]
    surroundings = Surroundings(runner, checkpoint, tokenizer, load)
    drafters = [registry.create(*drafter, surroundings) for drafter in asked.drafters]
    policy = None if asked.is_pinned else _policy(drafters, num_draft, runner, checkpoint, dtype)
    return Built(
        Engine(runner, drafters[0] if drafters else None, config, policy), checkpoint, tokenizer, surroundings
    )


def _with_head(asked: Speculation, checkpoint: Checkpoint) -> Speculation:
    options = shipped.shipped_head(checkpoint, asked.head)
    return asked if options is None else asked._replace(drafters=(*asked.drafters, registry.parse(options)))


def _policy(
    drafters: list[Proposer], num_draft: int, runner: Runner, checkpoint: Checkpoint, dtype: str
) -> Policy:
    """Chooses among the drafters, those of a hybrid one by one; starts from what is known of this model on
    this machine.
    """
    single = [each for drafter in drafters for each in getattr(drafter, "drafters", (drafter,))]
    for drafter in single:
        if (
            drafter.is_free
        ):  # what is compiled on first use is not the first request's to wait for, nor to be taken for a cost
            example = Request("example", SamplingParams(), [0, 1, 0, 1], 4, 0)
            drafter.propose([example], [1])
            drafter.release(example)
    profile = profile_of(runner, profile_path(checkpoint.fingerprint, dtype, runner))
    one = profile.costs.pass_seconds(1)
    usual = {
        drafter.name: (one * HEAD_COST, (share,))
        for drafter in single
        if (share := getattr(drafter, "usual", 0.0))
    }
    known = usual | {
        name: (drafter.seconds, drafter.acceptance) for name, drafter in profile.drafters.items()
    }
    has_trees = getattr(runner.decoder, "checks_trees", True)
    return AutoPolicy(single, profile.costs, most_nodes=num_draft, has_trees=has_trees, known=known)


def _kv_memory(
    asked: int | float | None,
    model: ModelConfig,
    config: EngineConfig,
    max_model_len: int | None,
    kept: Kept,
    free: int,
) -> int:
    """Bytes for the KV cache: as said, a fraction of the free memory, or enough for every sequence within a
    bound.
    """
    if isinstance(asked, bool) or (asked is not None and (not isinstance(asked, (int, float)) or asked <= 0)):
        raise ConfigError(
            f"kv_cache_memory is {asked!r}; give bytes as a whole number, or a fraction of the free memory between 0 and 1"
        )
    if isinstance(asked, float):
        require(
            asked < 1, "kv_cache_memory", asked, "a fraction must be below 1; give bytes as a whole number"
        )
        return int(asked * free)
    if asked is not None:
        require(asked <= free, "kv_cache_memory", asked, f"there are {free:,} bytes free; give less")
        return asked
    per_token = bytes_per_token(model, kept)
    length = max_model_len or model.max_context
    return min((length + BLOCK_SIZE) * config.max_num_seqs * per_token, int(SPARE * free))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _context(asked: int | None, model: ModelConfig, num_blocks: int) -> int:
    """The longest sequence: what was asked, or the model's context as far as the KV cache can hold it
    once.
    """
    room = num_blocks * BLOCK_SIZE
    if asked is None:
        return min(model.max_context, room)
    require(
        asked <= model.max_context,
        "max_model_len",
        asked,
        f"the model's context is {model.max_context:,} tokens",
    )
    require(
        asked <= room,
        "max_model_len",
        asked,
        f"the KV cache holds {room:,} tokens; raise kv_cache_memory or lower max_model_len",
    )
    return asked
