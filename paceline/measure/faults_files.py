"""What is done to files: a copy of the model is cut or changed and opened, caches are written to a disk that
is full. Both in a process apart, with a limit of memory and of time, which is replaced when it ends.
Invariant: what is read is used, or refused in one line that names it; what is written is whole, or not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError
from paceline.measure.processes import Worker, WorkerError

ANSWERED, REFUSED, LEFT, LOST = "answered", "refused", "left", "lost"  # what becomes of a request, or a file
MOST_BYTES, MOST_S = 4 * 2**30, 60.0
HEAD = 2**23  # bytes of a file that are copied; what follows in a larger one is a hole, which takes no room
INSTEAD = (b"-1", b"99999", b"null", b"1e9", b"0", b"[]", b"true", b"{")


def damaged(data: bytes, source: random.Random) -> bytes:
    kind, made = source.randrange(4), bytearray(data)
    near = min(source.choice((64, 2000, len(data))), len(data))  # headers are where most can go wrong
    at = source.randrange(near)
    if kind == 0:
        return data[:at]
    if kind == 1:
        made[at : at + source.randrange(1, 40)] = b""
    elif kind == 2:
        digits = [i for i in range(near) if chr(data[i]).isdigit()] or [at]
        made[source.choice(digits) : source.choice(digits) + 1] = source.choice(INSTEAD)
    else:
        for _ in range(source.choice((1, 3, 20))):
            made[source.randrange(near)] ^= 1 << source.randrange(8)
    return bytes(made)


@contextlib.contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """While inside, a file of this process can have no more: the system answers as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Files:
    """The process, as the one that asks sees it."""

    def __init__(self, model: str, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._asking = asyncio.Lock()
        self._worker: Worker | None = None

    async def ask(self, what: str, source: random.Random) -> str:
        async with self._asking:
            return await asyncio.to_thread(self._ask, what, source.random())

    def _ask(self, what: str, seed: float) -> str:
        try:
            if self._worker is None:
                self._worker = Worker("files", sys.executable, __name__, self._folder / "log", 1)
                self._worker.ask("load", options={"model": self._model})
            with tempfile.TemporaryDirectory(dir=self._folder) as place:
                return str(self._worker.ask(what, MOST_S, place=place, seed=seed)["found"])
        except WorkerError as error:
            self.close()
            return f"{LOST}: {error}"

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        self._worker = None


def load(options: dict[str, Any]) -> dict[str, Any]:
    """The process's side: what can be asked."""
    from paceline.loaders import hub

    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    good = hub.resolve(options["model"], progress=False)

    def opened(place: str, seed: float) -> dict[str, str]:
        return {"found": _opened(good, Path(place), random.Random(seed))}

    def written(place: str, seed: float) -> dict[str, str]:
        return {"found": _written(Path(place), random.Random(seed))}

    return {"opened": opened, "written": written}


def _opened(good: Path, place: Path, source: random.Random) -> str:
    from paceline.loaders.checkpoint import open_checkpoint
    from paceline.loaders.tokenizer import Tokenizer

    kinds = (".json", ".safetensors")
    files = [good] if good.is_file() else [path for path in sorted(good.iterdir()) if path.suffix in kinds]
    chosen = source.choice(files)
    for path in files:
        if path != chosen:
            (place / path.name).symlink_to(path.absolute())
    with chosen.open("rb") as file:
        head = file.read(HEAD)
    target, bad, size = place / chosen.name, damaged(head, source), chosen.stat().st_size
    target.write_bytes(bad)
    if size > HEAD:
        os.truncate(target, source.choice((size, source.randrange(len(bad), size))))
    try:
        model = open_checkpoint(str(target if good.is_file() else place), progress=False)
        Tokenizer(model.tokenizer_source()).encode("the line")
        for name in source.sample(sorted(model.config.weight_names()), 4):
            model.tensor(name)
        return ANSWERED
    except PacelineError as error:
        is_clear = str(place) in str(error) and len(str(error).splitlines()) == 1
        return REFUSED if is_clear else f"{LOST}: {error}"


def _written(place: Path, source: random.Random) -> str:
    import torch

    from paceline.engine.policy.cost import CostTable
    from paceline.engine.profile import Profile, save_profile
    from paceline.loaders import head_files, packed

    path, num_bytes = place / "made" / "a.safetensors", source.randrange(1, 2**16)
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    with room_for(source.randrange(2**16)), contextlib.suppress(OSError):
        kind = source.randrange(3)
        if kind == 0:
            packed.write(path, {"a": (torch.uint8, (num_bytes,))}, [("a", [tensor])])
        elif kind == 1:
            head_files.write_tensors(path, {"a": tensor}, {})
        else:
            save_profile(path, Profile(CostTable(dict.fromkeys(range(1, 1 + num_bytes // 8), 1.0))))
            num_bytes = 1
    left = list(path.parent.iterdir())
    if not left:
        return REFUSED
    return ANSWERED if left == [path] and path.stat().st_size >= num_bytes else f"{LOST}: {left} is left"
