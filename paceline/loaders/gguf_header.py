"""The header of a GGUF file: its metadata and where each tensor lies.

Invariant: every count, length and offset is checked against the bytes that are really there before it sizes
anything, so a damaged or hostile file costs no more memory than itself. (The gguf package's own reader trusts
counts and makes an array of each token, which takes seconds; gguf.py uses only its dequantizers.)
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16  # metadata keys; tensors
MAX_ELEMENTS = 1 << 23  # of all metadata arrays together; the largest vocabularies need about a million
MAX_STRING = 1 << 24
MAX_DIMS = 4

# The format's value types, by number. Strings (8) and arrays (9) have a length of their own.
STRING, ARRAY = 8, 9
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SCALARS = {kind: struct.Struct("<" + code) for kind, code in CODES.items()}
UINT32, UINT64 = SCALARS[4], SCALARS[10]


class TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]  # outermost dimension first, as numpy and torch have it
    kind: int  # number of the quantization type
    offset: int  # from the start of the data section


class GgufHeader(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data_start: int
    file_size: int


def read_header(path: Path) -> GgufHeader:
    """Parse and check the header of `path`, or raise a ModelFileError that names the damage."""
    try:
        size = path.stat().st_size
        if size < len(MAGIC):
            raise ModelFileError(f"{path} is only {size} bytes long, which no GGUF file is; fetch it again")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data, size).header()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error


class _Cursor:
    """A position in the mapped file that only moves forward, and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.at = 0
        self.elements_left = MAX_ELEMENTS

    def header(self) -> GgufHeader:
        if (start := self.take(4)) != MAGIC:
            raise ModelFileError(f"{self.path} is not a GGUF file: it starts with {start!r}, not {MAGIC!r}")
        version = self.number(UINT32)
        if version not in VERSIONS:
            raise self.damage(f"GGUF version {version} is not one of {VERSIONS} (big-endian is not read)")
        num_tensors, num_keys = self.number(UINT64), self.number(UINT64)
        if max(num_tensors, num_keys) > MAX_ENTRIES:
            raise self.damage(f"{num_tensors} tensors and {num_keys} metadata keys, over {MAX_ENTRIES}")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.text()
            if key in metadata:
                raise self.damage(f"metadata key {key!r} is there twice")
            metadata[key] = self.value(key, self.number(UINT32))
        tensors: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name, num_dims = self.text(), self.number(UINT32)
            if name in tensors:
                raise self.damage(f"tensor {name!r} is there twice")
            if num_dims > MAX_DIMS:
                raise self.damage(f"tensor {name!r} has {num_dims} dimensions")
            shape = tuple(self.number(UINT64) for _ in range(num_dims))[::-1]
            tensors[name] = TensorInfo(name, shape, self.number(UINT32), self.number(UINT64))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.damage(f"general.alignment {alignment!r} is not a power of two")
        data_start = (self.at + alignment - 1) // alignment * alignment
        return GgufHeader(metadata, tensors, data_start, self.size)

    def value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise self.damage(f"metadata key {key!r} has the unknown value type {kind}")
        kind, length = self.number(UINT32), self.number(UINT64)
        self.elements_left -= length
        if self.elements_left < 0:
            raise self.damage(f"metadata array {key!r} has {length} elements, over {MAX_ELEMENTS} in all")
        if kind == STRING:
            return [self.text() for _ in range(length)]
        if kind not in SCALARS:
            raise self.damage(f"metadata array {key!r} has the unknown element type {kind}")
        data = self.take(length * SCALARS[kind].size)
        return list(struct.unpack(f"<{length}{CODES[kind]}", data))

    def text(self) -> str:
        length = self.number(UINT64)
        if length > MAX_STRING:
            raise self.damage(f"a string of {length} bytes, more than the {MAX_STRING} allowed")
        # Some vocabularies hold tokens cut inside a character; a tokenizer must see that they are there.
        return self.take(length).decode("utf-8", errors="replace")

    def number(self, layout: struct.Struct) -> Any:
        start, self.at = self.at, self.at + layout.size
        if self.at > self.size:
            raise self.truncated()
        return layout.unpack_from(self.data, start)[0]

    def take(self, length: int) -> bytes:
        start, self.at = self.at, self.at + length
        if self.at > self.size:
            raise self.truncated()
        return self.data[start : self.at]

    def truncated(self) -> ModelFileError:
        return ModelFileError(f"{self.path} is truncated in its header, at byte {self.size}; fetch it again")

    def damage(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} has a damaged GGUF header: {what}; fetch it again")
