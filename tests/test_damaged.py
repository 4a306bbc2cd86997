"""Model files with bytes cut off, changed or taken out: each is refused in words or still loads; no traceback,
and no end of the process, which is therefore one of its own. Disks that are full.
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
from paceline.cli.options import write_result
from paceline.core.errors import PacelineError
from paceline.measure.faults_files import damaged, room_for
from tests.make_models import tiny_gguf

NUM_CASES = 60
FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "model.gguf")


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


@pytest.mark.parametrize("place", ["no folder", "full disk"])
def test_caches_that_cannot_be_written_are_done_without(
    place: str, tiny_folder: Path, tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", os.devnull + "/none" if place == "no folder" else str(tmp_path))
    params = SamplingParams(max_tokens=8, temperature=0)
    with room_for(100), LLM(str(tiny_folder), progress=False) as llm:
        assert llm.generate("the line", params)[0].text == tiny.generate("the line", params)[0].text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_result_that_does_not_fit_leaves_nothing_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with room_for(100), pytest.raises(OSError, match="report"):
        write_result(path, "x" * 1000)
    assert not path.exists()
    write_result(path, "x" * 1000)
    assert path.read_text() == "x" * 1000


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
