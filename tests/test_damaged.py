"""Model files with bytes cut off, changed or taken out: each is refused in words or still loads; no traceback,
and no end of the process, which is therefore one of its own.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.core.errors import PacelineError
from tests.make_models import tiny_gguf

NUM_CASES = 60
FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "model.gguf")
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


def main(good: Path, place: Path) -> None:
    counts = dict.fromkeys(("loaded", "refused", "in many lines"), 0)
    for number in range(NUM_CASES):
        source = random.Random(number)
        name = source.choice(FILES)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(good, place)
        (place / name).write_bytes(damaged((good / name).read_bytes(), source))
        print(number, name, flush=True)  # the last line says which took the process down
        try:
            with LLM(str(place / name if name.endswith("gguf") else place), progress=False) as llm:
                llm.generate("the line", SamplingParams(max_tokens=3, temperature=0))
            counts["loaded"] += 1
        except PacelineError as error:
            counts["refused" if len(str(error).splitlines()) == 1 else "in many lines"] += 1
    print(counts)


def test_caches_that_cannot_be_written_are_done_without(
    tiny_folder: Path, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", os.devnull + "/none")
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM(str(tiny_folder), progress=False) as llm:
        assert llm.generate("the line", params)[0].text == tiny.generate("the line", params)[0].text


@pytest.mark.slow
def test_damaged_files_are_refused_in_words(tiny_folder: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    shutil.copytree(tiny_folder, good)
    tiny_gguf(good / "model.gguf", tiny_folder)
    root = Path(__file__).parent.parent
    code = f"from pathlib import Path; from tests.test_damaged import main; main(Path({str(good)!r}), Path({str(tmp_path / 'bad')!r}))"
    environment = {**os.environ, "PACELINE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-3000:]
    assert "'refused': 0" not in done.stdout
    assert "'in many lines': 0" in done.stdout
