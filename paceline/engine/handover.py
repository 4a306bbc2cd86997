"""Prefill and decode apart: what an engine has of a prompt it has read, for another engine of the same kind,
as arrays in a frame that holds no code.

It is the prefix cache that is handed over: the target's K/V of the prompt's whole blocks, the draft model's,
and what learned heads have read. The other engine then finds the prompt as if it had read it itself, and
reads what is left, at least the last token. Drafters that match look at the tokens. Invariant: both engines
are of one identity and each part has the very size the taker asked for, so no text changes; what is missing
is read again.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import torch

from paceline import __version__
from paceline.core.errors import ConfigError, HandoverError
from paceline.core.params import SamplingParams
from paceline.core.types import BLOCK_SIZE
from paceline.engine.engine import Engine
from paceline.runtime.kv_cache import whole_blocks

MAGIC, MOST_HEADER = b"PLKV", 2**26  # bytes of a header, which has the prompt's tokens
TARGET = "target"
# What reads a prompt: it is handed over when the first token is there, and the request is not yet over, since
# drafters forget those that are.
READING = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, seed=0)
DTYPES = {str(each): each for each in (torch.float32, torch.bfloat16, torch.float16, torch.int8)}
Shapes = dict[str, list[Any]]  # by part: the name of its dtype, and its shape


class Handover(NamedTuple):
    """One part is a piece of memory: the target's keys, a head's rows."""

    identity: Mapping[str, str]
    tokens: Sequence[int]  # of the whole prompt
    parts: Mapping[str, torch.Tensor]  # on the CPU

    @property
    def num_tokens(self) -> int:
        """Of the prompt whose K/V are here."""
        return whole_blocks(self.tokens)

    def frame(self) -> list[Any]:
        """Bytes to be sent, one after the other; nothing is copied."""
        datas = [
            tensor.contiguous().view(-1).view(torch.uint8).numpy().data for tensor in self.parts.values()
        ]
        header = {
            "identity": dict(self.identity),
            "tokens": list(self.tokens),
            "parts": shapes_of(self.parts),
        }
        packed = json.dumps(header).encode()
        return [MAGIC + len(packed).to_bytes(4, "little") + packed, *datas]


def shapes_of(parts: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in parts.items()}


def received(
    source: BinaryIO, tokens: Sequence[int], identity: Mapping[str, str], wanted: Shapes
) -> Handover:
    """Read a frame; memory is taken for nothing but the wanted parts in their wanted sizes."""
    start = _exactly(source, len(MAGIC) + 4)
    length = int.from_bytes(start[len(MAGIC) :], "little")
    if start[: len(MAGIC)] != MAGIC or length > MOST_HEADER:
        raise HandoverError("what came is no handover; let --prefill name a server with --role prefill")
    try:
        header = json.loads(_exactly(source, length))
        theirs, found, parts = header["identity"], header["tokens"], header["parts"]
    except (ValueError, KeyError, TypeError):
        raise HandoverError("a handover's header cannot be read; update both servers") from None
    check_identity(theirs, identity)
    is_asked = isinstance(parts, dict) and all(wanted.get(name) == shape for name, shape in parts.items())
    if found != list(tokens) or not is_asked:
        raise HandoverError("a handover is not of what was asked for; update both servers")
    tensors = {}
    for name, (dtype, shape) in parts.items():
        tensors[name] = torch.empty(shape, dtype=DTYPES[dtype])
        _fill(source, tensors[name])
    return Handover(theirs, found, tensors)


def _exactly(source: BinaryIO, count: int) -> bytes:
    data = source.read(count)
    if len(data) < count:
        raise HandoverError("a handover ended in its middle")
    return data


def _fill(source: BinaryIO, tensor: torch.Tensor) -> None:
    rest = memoryview(tensor.view(-1).view(torch.uint8).numpy().data).cast("B")
    while rest:
        count = source.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise HandoverError("a handover ended in its middle")
        rest = rest[count:]


def check_identity(theirs: Any, ours: Mapping[str, str]) -> None:
    theirs = theirs if isinstance(theirs, dict) else {}
    name = next((name for name, value in ours.items() if theirs.get(name) != value), None)
    if name is not None:
        what = f"{name} is {str(theirs.get(name))[:40]!r} there and {ours[name][:40]!r} here"
        raise HandoverError(
            f"prefill and decode are not of one kind: {what}; start both with the same options"
        )


class Handovers:
    """One engine's side of it. Between steps alone."""

    def __init__(self, engine: Engine, fingerprint: str, dtype: str) -> None:
        """fingerprint: of the model's files."""
        executor = self._executor = engine.executor
        alone = "give one process a model of attending layers, with its prefix cache on"
        if (
            executor.num_ranks * executor.num_stages > 1
            or executor.kv.states is not None
            or not engine.config.enable_prefix_caching
        ):
            raise ConfigError(f"this engine can hand nothing over: {alone}")
        self._drafters = {f"{number}.{each.name}": each for number, each in enumerate(engine.policy.drafters)}
        memory, kind = executor.memory, type(executor.backend).__name__
        self.identity = {
            "the version of paceline": __version__, "the model": fingerprint, "dtype": dtype,
            "the form of K/V": ", ".join(f"{x.dtype} {list(x.shape[2:])}" for x in memory.parts),
            "the size of a block": str(BLOCK_SIZE), "the device": f"{kind} on {platform.machine()}",
        }  # fmt: skip

    def shapes(self, tokens: Sequence[int]) -> Shapes:
        """What this engine can take of a prompt: by part, of what dtype and shape."""
        count = whole_blocks(tokens)
        found = _named(TARGET, shapes_of(self._executor.kept(count)))
        for name, drafter in self._drafters.items():
            found |= _named(f"{name}.{drafter.identity}", shapes_of(drafter.kept(count)))
        return found

    def num_missing(self, tokens: Sequence[int]) -> int:
        """Tokens of the prompt that would be taken and are not here; from any thread."""
        return max(whole_blocks(tokens) - self._executor.kv.num_known(tokens), 0)

    def export(self, tokens: Sequence[int], wanted: Shapes | None = None) -> Handover:
        """Of a prompt that READING has just read; wanted: the taker's shapes. What is missing is left out."""
        parts = _named(TARGET, self._executor.export(tokens))
        if not parts:
            raise HandoverError("the prompt's K/V are not here any more; give both servers more KV memory")
        for name, drafter in self._drafters.items():
            prefix = f"{name}.{drafter.identity}"
            known = _named(prefix, shapes_of(drafter.kept(whole_blocks(tokens))))
            if known and (wanted is None or known.items() <= wanted.items()):
                parts |= _named(prefix, drafter.export(tokens))
        if wanted is not None:
            shapes = shapes_of(parts)
            parts = {name: part for name, part in parts.items() if wanted.get(name) == shapes[name]}
        return Handover(self.identity, list(tokens), parts)

    def adopt(self, handover: Handover) -> int:
        """Take it in; tokens that need not be read now, 0 where there is no room for them."""
        check_identity(handover.identity, self.identity)
        tokens, parts, ours = handover.tokens, handover.parts, self.shapes(handover.tokens)
        theirs = shapes_of(parts)
        if any(name.startswith(TARGET) and ours.get(name) != shape for name, shape in theirs.items()):
            raise HandoverError("a handover's K/V have another size than here; use the same options")
        target = {name: part for name, part in parts.items() if name.startswith(f"{TARGET}/")}
        if not target or not self._executor.adopt(tokens, _unnamed(target)):
            return 0
        for name, drafter in self._drafters.items():
            prefix = f"{name}.{drafter.identity}/"
            own = {n: part for n, part in parts.items() if n.startswith(prefix) and ours.get(n) == theirs[n]}
            if own:
                drafter.adopt(tokens, _unnamed(own))
        return handover.num_tokens


def _named(prefix: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{name}": part for name, part in parts.items()}


def _unnamed(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.rpartition("/")[2]: part for name, part in parts.items()}


def num_bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in shapes.values())
