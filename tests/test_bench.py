"""`paceline bench` for real, on a small model: the report, its consistency, pictures, and what a dead or
hanging worker leads to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.loaders import hub
from paceline.measure.processes import MODULES, Worker, WorkerError
from paceline.measure.rows import FOLDERS, OURS, peer_python

ROOT = Path(__file__).parent.parent
KEYS = {
    "engine",
    "method",
    "task",
    "prompts",
    "tokens_per_second",
    "speedup",
    "tau",
    "alpha",
    "identical",
    "ttft_ms",
    "tpot_ms",
    "peak_mb",
}
PNG = b"\x89PNG\r\n\x1a\n"
PROMPTS = [
    {
        "question_id": 1,
        "category": "copy",
        "turns": ["the line the line the line the line", "and a second turn"],
    },
    {"question_id": 2, "category": "copy", "turns": ["who rides in front? who rides"]},
    {"question_id": 3, "category": "code", "turns": ["def ride(line): return def ride(line): return"]},
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)))
    return str(path)


def bench(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", *arguments])
    return done.exit_code, done.stdout, done.stderr


def report_of(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    status, out, err = bench(*arguments, "--max-new-tokens", "12", "--json", str(tmp_path / "r.json"))
    assert status == 0, err
    assert "overall" in out
    report: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    return report


@pytest.mark.slow
def test_report_and_pictures(tiny_folder: Path, prompts: str, tmp_path: Path) -> None:
    pictures = tmp_path / "plots"
    options = (
        f"--model {tiny_folder} --prompts {prompts} --dtypes float32 --repeats 2 --plot {pictures}"
    ).split()
    report = report_of(tmp_path, *options, "--methods", "none,ngram,early_exit")
    assert report["machine"]["cores"] >= 1
    rows = report["rows"]
    assert all(set(row) >= KEYS for row in rows)
    assert {(row["method"], row["task"]) for row in rows} == {
        (m, t) for m in ("plain", "ngram", "early_exit") for t in ("copy", "code", "overall")
    }
    for row in rows:
        assert row["engine"] == "paceline float32"
        assert row["identical"] == row["prompts"] == {"copy": 2, "code": 1, "overall": 3}[row["task"]]
        assert min(row["tokens_per_second"], row["ttft_ms"], row["tpot_ms"]) > 0
        assert row["tau"] >= 1
        base = next(r for r in rows if r["task"] == row["task"] and r["method"] == "plain")
        speedup = row["tokens_per_second"] / base["tokens_per_second"]
        assert row["speedup"] == pytest.approx(speedup, rel=0.01, abs=1e-4)
    for name in ("speedup.png", "acceptance.png"):
        assert (pictures / name).read_bytes().startswith(PNG)


@pytest.mark.slow
def test_requests_in_flight_together(tiny_folder: Path, prompts: str, tmp_path: Path) -> None:
    options = (
        f"--model {tiny_folder} --prompts {prompts} --dtypes float32 --repeats 1 --concurrency 2"
    ).split()
    rows = report_of(tmp_path, *options)["rows"]
    assert [(r["method"], r["identical"]) for r in rows if r["task"] == "overall"] == [
        ("plain", 3),
        ("auto", 3),
        ("ngram", 3),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompts", "missing.jsonl"), "missing.jsonl: cannot be read"),
        (("--methods", "ngrams"), "--methods holds 'ngrams'"),
        (("--dtypes", "none"), "nothing to measure"),
        (("--json", "no/such/folder/r.json"), "there is no folder"),
        (("--model", "no-such-model"), "no model 'no-such-model'"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    status, _, err = bench(*arguments)
    assert status == 2
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert words in line


def test_a_missing_peer_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PEERS", str(tmp_path))
    status, _, err = bench("--peers", "llama.cpp")
    assert status == 2
    assert "make peers" in err
    assert len(err.splitlines()) == 1


def our_worker(folder: Path, log: Path) -> Worker:
    worker = Worker("paceline", sys.executable, MODULES[OURS], log, 1)
    worker.ask(
        "load",
        options={
            "model": str(folder),
            "more": {"dtype": "float32", "speculative_config": None},
            "in_flight": 1,
            "method": "plain",
            "threads": 1,
        },
    )
    return worker


def ask_for(worker: Worker, num_tokens: int, seconds: float) -> dict[str, Any]:
    return worker.ask(
        "generate", seconds=seconds, prompts=[{"ids": [5, 6, 7], "num_tokens": num_tokens}], in_flight=1
    )


def test_a_killed_worker_is_an_error_with_its_log(tiny_folder: Path, tmp_path: Path) -> None:
    worker = our_worker(tiny_folder, tmp_path / "log")
    try:
        assert ask_for(worker, 8, 300)["answers"][0]["num_tokens"] == 8
        assert (worker.peak_mb() or 1) > 0
        (tmp_path / "log").write_text("the last words\n")
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"died \(signal 9.*the last words"):
            ask_for(worker, 8, 300)
    finally:
        worker.stop()


def test_a_hanging_worker_is_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    worker = our_worker(tiny_folder, tmp_path / "log")
    try:
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match="has not answered in 1 s"):
            ask_for(worker, 8, 1)
    finally:
        worker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_a_failing_worker_says_why(tmp_path: Path) -> None:
    worker = Worker("paceline", sys.executable, MODULES[OURS], tmp_path / "log", 1)
    options = {"model": "nowhere", "more": {"dtype": "float32"}, "in_flight": 1}
    try:
        with pytest.raises(WorkerError, match="no model 'nowhere'"):
            worker.ask("load", options=options)
    finally:
        worker.stop()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_ctrl_c_leaves_no_worker_behind(tiny_folder: Path, prompts: str) -> None:
    code = "from paceline.cli.entry import main; raise SystemExit(main())"
    options = f"bench --model {tiny_folder} --prompts {prompts} --dtypes float32 --repeats 100000".split()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("paceline float32, "):  # the timed turns have begun: all workers are there
            break
    workers = children_of(process.pid)
    assert len(workers) == 3
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    process.stderr.close()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < end, "a worker is still there"
        time.sleep(0.05)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("peer", list(FOLDERS))
def test_peers_answer(peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if not (Path(os.environ.get("PACELINE_PEERS") or ".peers") / FOLDERS[peer] / ".installed").exists():
        pytest.skip("not installed; `make peers` does it")
    assert Path(peer_python(peer)).exists()
    hub.resolve("default", progress=False)
    prompts = tmp_path / "one.jsonl"
    prompts.write_text(
        json.dumps(
            {
                "question_id": 1,
                "category": "copy",
                "turns": ["Say three times: the line goes on. The line goes on."],
            }
        )
    )
    chosen = "llama.cpp:Q8_0" if peer == "llama.cpp" else peer
    rows = report_of(
        tmp_path, "--prompts", str(prompts), "--dtypes", "none", "--peers", chosen, "--repeats", "1"
    )["rows"]
    plain, drafted, *raw = (row for row in rows if row["task"] == "overall")
    assert len(raw) == (peer == "llama.cpp")
    for row in raw:  # its loop without sampling and text: nothing is said that could be compared
        assert row["engine"] == "llama.cpp Q8_0 raw"
        assert (row["method"], row["identical"], row["tau"], row["speedup"]) == ("plain", None, 1.0, 1.0)
        assert row["tokens_per_second"] > 0
    assert plain["engine"].startswith(peer)
    assert (plain["method"], plain["identical"], plain["tau"]) == ("plain", 1, 1.0)
    assert drafted["method"] == "ngram"
    assert drafted["tau"] >= 1
    assert min(plain["tokens_per_second"], drafted["tokens_per_second"], plain["peak_mb"]) > 0
