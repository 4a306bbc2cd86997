"""What safetensors files hold, from their headers, and tensors or slices of them on demand.

Invariant: shards lie inside the folder, no pickle is opened, and a damaged file is a ModelFileError.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from paceline.core.errors import ModelFileError
from paceline.loaders.fields import ALL, read_fields
from paceline.loaders.places import Part

TYPES = ("F32", "F16", "BF16", "F64")  # of plain weights
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class StoredTensor(NamedTuple):
    file: Path
    dtype: str  # as safetensors spells it: "BF16"
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_fields(index).section("weight_map").values
        shards = sorted({str(name) for name in weight_map.values()})
        for shard in shards:
            if Path(shard).name != shard:
                raise ModelFileError(f"{index}: shard {shard!r} is not a plain file name; do not use it")
        files = [folder / shard for shard in shards]
    else:
        single = folder / "model.safetensors"  # other files beside it are copies in other layouts
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    for file in files:
        if not file.is_file():
            raise ModelFileError(f"{folder}: shard {file.name} is missing; fetch the model again")
    if not files:
        pickled = (f"only {file.name}" for file in sorted(folder.iterdir()) if file.suffix in PICKLED)
        remedy = "only .safetensors and .gguf weights are read, convert the model first"
        raise ModelFileError(f"{folder} has {next(pickled, 'no weights')}; {remedy}")
    return files


def tensors_of(files: list[Path]) -> dict[str, StoredTensor]:
    """Each tensor's file, type and shape, from the headers alone."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                    part = opened.get_slice(name)
                    tensors[name] = StoredTensor(file, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{file} is not a whole safetensors file ({error}); fetch it") from error
    return tensors


def read_tensor(file: Path, name: str, *index: int | slice) -> torch.Tensor:
    """One tensor, or some of its rows (then columns), in the type it is stored in."""
    try:
        with safe_open(file, framework="pt") as opened:
            is_whole = all(each == ALL for each in index)
            return opened.get_tensor(name) if is_whole else opened.get_slice(name)[index]
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{file}: tensor {name} cannot be read ({error}); fetch it again") from error


def read_part(stored: StoredTensor, part: Part) -> torch.Tensor:
    """Some rows of a tensor, or of a matrix of a stack."""
    span = slice(part.rows.start, part.rows[-1] + 1)
    if part.matrix is None:
        return read_tensor(stored.file, part.tensor, ALL if span == slice(0, stored.shape[0]) else span)
    index = slice(part.matrix, part.matrix + 1), *([ALL] if part.is_transposed else []), span
    matrix = read_tensor(stored.file, part.tensor, *index)[0]
    return (matrix.T if part.is_transposed else matrix)[:: part.rows.step].contiguous()
