"""GGUF models in several files, NAME-00001-of-0000N.gguf: any part stands for all of them.

Invariant: the parts are all there, each says that it is the one its name says, and together they hold as many
tensors as they claim. The first has the metadata. A model in one file is a model of one part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import ModelFileError
from paceline.loaders.gguf_header import GgufHeader, TensorInfo, read_header

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MOST_PARTS = 1_000


class Parts(NamedTuple):
    header: GgufHeader  # metadata of the first part, tensors of all
    files: dict[str, PartFile]  # where each tensor lies
    paths: tuple[Path, ...]


class PartFile(NamedTuple):
    path: Path
    data_start: int
    size: int


def part_names(name: str) -> tuple[str, ...]:
    """All parts of the model that a file name belongs to; of a model in one file itself."""
    found = PART.fullmatch(name)
    if found is None or not 1 <= int(found["count"]) <= MOST_PARTS:
        return (name,)
    return tuple(f"{found['stem']}-{i + 1:05d}-of-{found['count']}.gguf" for i in range(int(found["count"])))


def models_among(names: Iterable[str]) -> list[str]:
    """One name for each model: its file, or its first part."""
    return sorted({part_names(name)[0] for name in names})


def part_paths(path: Path) -> tuple[Path, ...]:
    return tuple(path.with_name(name) for name in part_names(path.name))


def main_type(path: Path) -> str:
    """The quantization most matrices of a model have."""
    import gguf

    kinds = Counter(info.kind for info in read_parts(path).header.tensors.values() if len(info.shape) > 1)
    kind = next((kind for kind, _ in kinds.most_common(1)), 0)
    names = {each.value: each.name for each in gguf.GGMLQuantizationType}
    return names.get(kind, f"type {kind}")


def read_parts(path: Path) -> Parts:
    """The headers of all parts, checked against each other."""
    paths = part_paths(path)
    missing = [part.name for part in paths if len(paths) > 1 and not part.is_file()]
    if missing:
        listed = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else missing[0]
        raise ModelFileError(f"{path}: of {len(paths)} parts {listed} is missing; fetch all parts")
    headers = [read_header(part) for part in paths]
    files: dict[str, PartFile] = {}
    tensors: dict[str, TensorInfo] = {}
    for i, (part, header) in enumerate(zip(paths, headers, strict=True)):
        count, number = (header.metadata.get(f"split.{key}") for key in ("count", "no"))
        if (count or 1) != len(paths) or (len(paths) > 1 and number != i):
            said = f"says that it is part {number!r:.20} of {count!r:.20}, counted from 0"
            remedy = "give it back the name it was published under, with all other parts beside it"
            raise ModelFileError(f"{part} {said}; {remedy}")
        if twice := header.tensors.keys() & tensors.keys():
            found = f"tensor {min(twice)!r} is in another part too"
            raise ModelFileError(f"{part}: {found}; fetch all parts again")
        files |= dict.fromkeys(header.tensors, PartFile(part, header.data_start, header.file_size))
        tensors |= header.tensors
    wanted = headers[0].metadata.get("split.tensors.count") if len(paths) > 1 else None
    if wanted is not None and wanted != len(tensors):
        raise ModelFileError(f"{path}: its parts hold {len(tensors)} tensors, not {wanted}; fetch them again")
    return Parts(headers[0]._replace(tensors=tensors), files, paths)
