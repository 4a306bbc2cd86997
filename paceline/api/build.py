"""Puts a model, its KV cache and its drafters together. What "auto" means is decided here."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.api.options import EngineOptions
from paceline.core.errors import ConfigError
from paceline.core.options import EngineConfig, nearest, require
from paceline.core.params import SamplingParams
from paceline.core.types import BLOCK_SIZE, PassSizes, Request
from paceline.drafters import registry
from paceline.drafters.base import Drafter, DrafterConfig, DrafterContext
from paceline.engine.engine import Engine
from paceline.engine.handover import Handovers
from paceline.engine.policy.auto import AutoPolicy
from paceline.engine.profile import profile_of, profile_path
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.loaders.fields import read_json
from paceline.loaders.tokenizer import Tokenizer
from paceline.models.attention import KvFormat, bytes_per_token
from paceline.models.config import ModelConfig
from paceline.models.shard import Shard
from paceline.models.stage import Stage, without_layers
from paceline.runtime.backend import backend_for, free_memory, resolve
from paceline.runtime.executor import KvMemory, LocalExecutor, blocks_in
from paceline.runtime.meet import join, listen, place_of
from paceline.runtime.part import load_part
from paceline.runtime.ranks import Ranks, RankSetup
from paceline.runtime.stage import follow
from paceline.runtime.stages import Stages, StagesExecutor

PATIENCE_S = 1.0  # what is done sooner needs no words
SPARE = 0.125  # of the free memory, at most, for the KV cache by default, and for recurrent states
MOST_VERSIONS = 8  # of a sequence's recurrent state, after drafted tokens
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # that a model may have
SNAPSHOTS = 16  # of recurrent states after prompts: what can be found again


class Built(NamedTuple):
    engine: Engine
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    context: DrafterContext
    defaults: dict[str, Any]  # of sampling, as the model's own files have them


class Speculation(NamedTuple):
    """What a speculative_config asks for."""

    drafters: tuple[tuple[type[Drafter], DrafterConfig], ...] = ()
    is_pinned: bool = True  # as many tokens as were asked for, always; else the policy chooses
    head: bool | str = False  # whether the target's head drafts too; or the kind it must be, or its folder


def parse_speculation(options: Mapping[str, Any] | str | None) -> Speculation:
    """None or "off": plain decoding. "auto": the policy chooses drafters and lengths; with "head": False
    without the learned head that is found for the target, with a kind or a folder that one. A method: that
    one; with a length, always that many tokens."""
    head: bool | str = True
    if isinstance(options, Mapping) and options.get("method") in ("auto", "off", "none"):
        if options["method"] == "auto":
            head = options.get("head", True)
            if not isinstance(head, bool) and head not in registry.SHIPPED:
                registry.kind_of(head)  # refused before a model is read
        known = ("method", "head") if options["method"] == "auto" else ("method",)
        extra = next((name for name in options if name not in known), None)
        if extra is not None:
            found = f"{extra!r} beside method {options['method']!r}"
            raise ConfigError(f"speculative_config has {found}; name a drafter, or leave it out")
        options = str(options["method"])
    if options is None or options in ("off", "none"):
        return Speculation()
    if options == "auto":
        return Speculation((registry.parse(registry.AUTO),), is_pinned=False, head=head)
    if isinstance(options, str):
        remedy = f"{nearest(options, ['auto', 'off'])} or give a dict"
        if options in registry.DRAFTERS:
            remedy = f"give a dict such as {{'method': {options!r}}}"
        raise ConfigError(f"speculative_config is {options!r}; {remedy}")
    return Speculation((registry.parse(options),), is_pinned="num_speculative_tokens" in options)


def build(options: EngineOptions) -> Built:
    follow_if_told(options)
    asked = parse_speculation(options.speculative_config)  # refused before a model is read
    place = resolve(options.device)
    backend = backend_for(place, options.kernels, options.exact)
    if options.dtype != "auto":
        backend.check_dtype(options.dtype)
    checkpoint = open_checkpoint(options.model, options.progress, options.load_format, str(place))
    dtype = backend.default_dtype(checkpoint) if options.dtype == "auto" else options.dtype
    defaults = sampling_defaults(options, checkpoint.path)
    tokenizer = Tokenizer(checkpoint.tokenizer_source())
    head = registry.head_for(checkpoint, asked.head)
    is_for_cpu = checkpoint.config.experts is not None and (head or {}).get("method") == "mtp"
    if head is not None and (place.type == "cpu" or not is_for_cpu):
        asked = asked._replace(drafters=(*asked.drafters, registry.parse(head)))
    kept = backend.kv_format(dtype, options.kv_cache_dtype)
    free = free_memory(place, checkpoint.config, dtype)
    num_blocks = blocks_in(_kv_memory(options, checkpoint.config, kept, free), checkpoint.config, kept)
    length = _context(options.max_model_len, checkpoint.config, num_blocks)
    most = sum(each.num_speculative_tokens for _, each in asked.drafters)
    num_draft = most if asked.is_pinned else min(most, length - 1)
    config = options.engine_config(length, num_draft)

    def load(
        source: str | Checkpoint, its_dtype: str = dtype, setup: RankSetup | None = None,
        skipped: Collection[int] = (),
    ) -> tuple[Checkpoint, Tokenizer, LocalExecutor]:  # fmt: skip
        """setup: of the target, of which other processes may hold parts; else it is whole in this one, but
        for the layers that are skipped."""
        other = open_checkpoint(source, options.progress) if isinstance(source, str) else source
        other = without_layers(other, skipped)
        words = Tokenizer(other.tokenizer_source()) if isinstance(source, str) else tokenizer
        if setup is not None and setup.stage.size * setup.num_ranks > 1:
            executor = _spread(options, other, setup)
        else:
            with waiting("packing the weights for this machine (once)", options.progress):
                decoder = backend.load(other, its_dtype, length)
            its_format = backend.kv_format(its_dtype, options.kv_cache_dtype)
            num_states = _num_states(other.config, config, free)
            kv = KvMemory(other.config, num_blocks, place, its_format, num_states)
            executor = LocalExecutor(backend, decoder, kv)
        with waiting("compiling the kernels for this machine (once, a minute)", options.progress):
            executor.warm_up()
            executor.record(PassSizes(config.max_num_seqs, num_draft))
        return other, words, executor

    path, stage = str(checkpoint.path), Stage(0, options.pipeline_parallel_size)
    executor = load(checkpoint, setup=RankSetup(
        options.model if options.load_format == "dummy" else path, options.load_format, options.kernels,
        dtype, options.kv_cache_dtype, num_blocks, length, torch.get_num_threads(),
        options.enable_expert_parallel, options.tensor_parallel_size, stage, device=str(place),
    ))[2]  # fmt: skip
    context = DrafterContext(executor, checkpoint, tokenizer, load)
    with waiting("compiling the kernels for this machine (once, a minute)", options.progress):
        drafters = [registry.create(*drafter, context) for drafter in asked.drafters]
        policy = None if asked.is_pinned else _policy(drafters, num_draft, context, dtype)
        engine = Engine(executor, drafters[0] if drafters else None, config, policy)
    return Built(engine, checkpoint, tokenizer, context, defaults)


def handovers_of(engine: Engine, checkpoint: Checkpoint, options: EngineOptions) -> Handovers:
    is_auto, backend = options.dtype == "auto", engine.executor.backend
    dtype = backend.default_dtype(checkpoint) if is_auto else options.dtype
    return Handovers(engine, checkpoint.fingerprint, f"{dtype} by {options.kernels} kernels")


def sampling_defaults(options: EngineOptions, folder: Path) -> dict[str, Any]:
    """What a generation_config.json says of sampling, and what was put in its place, by vLLM's rules."""
    chosen, override = options.generation_config, options.override_generation_config or {}
    is_known = isinstance(override, dict) and all(name in DEFAULTS for name in override)
    remedy = f"give an object with some of {', '.join(DEFAULTS)}"
    require(is_known, "override_generation_config", override, remedy)
    path = (folder if chosen == "auto" else Path(str(chosen))) / "generation_config.json"
    has_file = chosen != "vllm" and path.is_file()
    remedy = "use auto, vllm, or a folder that has a generation_config.json"
    require(has_file or chosen in ("auto", "vllm"), "generation_config", chosen, remedy)
    merged = (read_json(path) if has_file else {}) | dict(override)
    values = {name: merged[name] for name in DEFAULTS if merged.get(name) is not None}
    try:
        SamplingParams(**values)
    except ConfigError as error:
        raise ConfigError(f"generation_config: {error}; or choose 'vllm', which leaves it aside") from None
    return values


def _spread(options: EngineOptions, checkpoint: Checkpoint, setup: RankSetup) -> LocalExecutor:
    """Over stages, and each of these over ranks."""
    device, stage = resolve(options.device), setup.stage
    is_possible = stage.size == 1 or device.type == "cpu"
    remedy = f"on {device} use 1, or set device to cpu"
    require(is_possible, "pipeline_parallel_size", stage.size, remedy)
    stage.check(checkpoint.config)
    if setup.num_ranks > 1:
        shard = Shard(0, setup.num_ranks, setup.is_by_expert)
        shard.check(checkpoint.config, options.kernels if device.type == "cpu" else "torch")
    with waiting("starting the ranks", options.progress):
        stages = None if stage.size == 1 else _stages(stage.size)
        if stages is not None:
            stages.set_up(setup, checkpoint.fingerprint)
        ranks = None if setup.num_ranks == 1 else Ranks(setup)
    backend = backend_for(device, options.kernels, group=ranks and ranks.group)
    with waiting("packing the weights for this machine (once)", options.progress):
        own = load_part(backend, checkpoint, setup, ranks)
    return own if stages is None else StagesExecutor(own, stages, checkpoint.config)


def _stages(size: int) -> Stages:
    """Started here, or as this process was, from outside."""
    place = place_of(os.environ, size)
    return Stages.start(size) if place is None else Stages(listen(place))


def follow_if_told(options: EngineOptions) -> None:
    """As another rank than 0 of a pipeline (runtime/meet.py) this process is a stage, and nothing else."""
    place = place_of(os.environ, options.pipeline_parallel_size)
    if place is not None and place.rank:
        follow(join(place), options.model)
        raise SystemExit(0)


def _policy(drafters: list[Drafter], num_draft: int, context: DrafterContext, dtype: str) -> AutoPolicy:
    """Chooses among the drafters, those of a hybrid one by one; starts from what is known of this model on
    this machine."""
    single = [member for drafter in drafters for member in drafter.members]
    for drafter in single:
        if drafter.is_free:  # compiled now: else the first request would wait, and that be taken for a cost
            example = Request("example", SamplingParams(), [0, 1, 0, 1], 4, 0)
            drafter.propose([example], [1])
            drafter.release(example)
    executor = context.executor
    profile = profile_of(executor, profile_path(context.checkpoint.fingerprint, dtype, executor))
    backend, known = executor.backend, profile.drafters
    limits: dict[str, Any] = {"most_requests": backend.most_drafted, "most_matched": backend.most_matched}
    return AutoPolicy(single, profile.costs, most_nodes=num_draft, known=known, **limits)


def _kv_memory(options: EngineOptions, model: ModelConfig, kept: KvFormat, free: int) -> int:
    """Bytes for the KV cache: as asked, a fraction of the `free` ones, or enough for every sequence within a
    bound."""
    asked = options.kv_cache_memory
    if isinstance(asked, float):
        return int(asked * free)
    if asked is not None:
        require(asked <= free, "kv_cache_memory", asked, f"there are {free:,} bytes free; give less")
        return asked
    num_blocks = -(-(options.max_model_len or model.max_context) // BLOCK_SIZE) + 1
    wanted = num_blocks * BLOCK_SIZE * options.max_num_seqs * bytes_per_token(model, kept)
    return min(wanted, int(SPARE * free))


def _num_states(model: ModelConfig, config: EngineConfig, free: int) -> int:
    """Slots for recurrent states: of every sequence before and after a pass and after drafted tokens, and of
    prompts that may come again, within a bound; 0 where no layer is recurrent."""
    if model.recurrent is None:
        return 0
    each = 2 + min(config.num_speculative_tokens, MOST_VERSIONS)
    wanted = 1 + each * config.max_num_seqs + SNAPSHOTS
    found = min(wanted, int(SPARE * free) // model.recurrent.num_bytes)
    least, size = 3 * config.max_num_seqs, f"{model.recurrent.num_bytes:,} bytes each"
    remedy = f"its {least} recurrent states ({size}) do not fit beside it; lower it"
    require(found >= least, "max_num_seqs", config.max_num_seqs, remedy)
    return found


def _context(asked: int | None, model: ModelConfig, num_blocks: int) -> int:
    """The longest sequence: what was asked, or the model's context as far as the KV cache holds it."""
    room = num_blocks * BLOCK_SIZE
    if asked is None:
        return min(model.max_context, room)
    remedy = f"the model's context is {model.max_context:,} tokens"
    require(asked <= model.max_context, "max_model_len", asked, remedy)
    remedy = f"the KV cache holds {room:,} tokens; raise kv_cache_memory or lower max_model_len"
    require(asked <= room, "max_model_len", asked, remedy)
    return asked


@contextmanager
def waiting(what: str, is_wanted: bool = True) -> Iterator[None]:
    """Around slow work: after a second a line on stderr counts the seconds; in a log, it says so once."""
    done = threading.Event()
    reporter = threading.Thread(target=_report, args=(what, done), daemon=True)
    if is_wanted:
        reporter.start()
    try:
        yield
    finally:
        done.set()
        if is_wanted:
            reporter.join()


def _report(what: str, done: threading.Event) -> None:
    say, started, end = partial(print, file=sys.stderr, flush=True), time.monotonic(), ""
    while not done.wait(PATIENCE_S):
        if not sys.stderr.isatty():
            say(f"paceline: {what}")
            return
        say(f"\rpaceline: {what} {time.monotonic() - started:.0f} s", end="")
        end = "\r\x1b[K"
    say(end=end)
