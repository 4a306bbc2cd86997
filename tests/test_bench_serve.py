"""`paceline bench serve` on a real Paceline server and on one of another kind whose delays are known; and its
arithmetic.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.core.errors import ConfigError
from paceline.measure import serve
from paceline.measure.load import Level, Record, difference, due_times, goals_of, level_report, peak_in_flight
from tests.make_models import tiny_hf, tiny_tokenizer
from tests.other_server import FIRST_S, WORD_S, other_server
from tests.server.harness import CODE, WAIT_S, Server, start_server

PNG = b"\x89PNG\r\n\x1a\n"
KEY = "a-key-of-the-bench"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    tiny_hf(folder, "llama", max_position_embeddings=4096)
    tiny_tokenizer(folder)
    server = start_server(str(folder), "--api-key", KEY, "--served-model-name", "tiny", key=KEY)
    yield server
    server.kill()


def bench(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", "serve", *arguments], env={"OPENAI_API_KEY": None})
    return done.exit_code, done.stdout, " ".join(done.stderr.split())


def report_of(tmp_path: Path, *arguments: str, prompt: str | None = None) -> dict[str, Any]:
    if prompt is not None:
        (tmp_path / "prompts.txt").write_text(prompt)
        arguments = (*arguments, "--prompts", str(tmp_path / "prompts.txt"))
    status, out, err = bench(*arguments, "--json", str(tmp_path / "r.json"))
    assert status == 0, err
    assert "throughput" in out
    report: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    return report


def test_a_sweep_of_rates_on_our_server(server: Server, tmp_path: Path) -> None:
    pictures = tmp_path / "plots"
    options = (
        f"--base-url {server.url}/v1 --api-key {KEY} --request-rate 20,40 --num-prompts 12"
        " --max-new-tokens 16"
    ).split()
    report = report_of(
        tmp_path, *options, "--ignore-eos", "--plot", str(pictures), "--metric-percentiles", "50,99.9"
    )
    assert (report["model"], report["is_interrupted"]) == ("tiny", False)
    assert [level["request_rate"] for level in report["levels"]] == [20, 40]
    for level in report["levels"]:
        assert (level["completed"], level["failed"], level["given_up"]) == (12, 0, 0)
        assert level["output_tokens"] == 12 * 16
        assert level["tokens_counted_by"] == "server"
        assert level["output_throughput"] == pytest.approx(12 * 16 / level["duration_s"], rel=1e-3)
        assert set(level["ttft_ms"]) == {"mean", "p50", "p99.9"}
        assert 0 < level["ttft_ms"]["p50"] <= level["e2el_ms"]["p50"]
        assert (
            level["speculative_decoding"]["num_draft_tokens"]
            >= level["speculative_decoding"]["num_accepted_tokens"]
        )
        assert [request["due_s"] for request in level["requests"]] == pytest.approx(
            due_times(12, level["request_rate"], 1.0, 0), abs=1e-5
        )
        assert len({request["prompt"] for request in level["requests"]}) == 12
    for name in ("latency.png", "throughput.png", "ttft.png"):
        assert (pictures / name).read_bytes().startswith(PNG)
    server.settled()


def test_the_server_can_be_told_not_to_draft(server: Server, tmp_path: Path) -> None:
    options = (
        f"--base-url {server.url} --api-key {KEY} --max-concurrency 2 --num-prompts 4 --max-new-tokens 24"
    ).split()
    level = report_of(
        tmp_path, *options, "--endpoint", "/v1/completions", "--extra-body", '{"speculative": "off"}'
    )["levels"][0]
    assert (level["completed"], level["speculative_decoding"]["num_draft_tokens"]) == (4, 0)
    assert level["peak_in_flight"] == 2


def test_without_its_key_nothing_is_measured(server: Server) -> None:
    status, _, err = bench("--base-url", server.url)
    assert status == 2
    assert "401" in err
    assert "--api-key" in err


@pytest.mark.serial
def test_delays_of_another_kind_of_server_are_measured_as_they_are(tmp_path: Path) -> None:
    with other_server() as (url, asked):
        options = (
            f"--base-url {url} --max-concurrency 1 --num-prompts 5 --num-warmups 2 --goodput ttft:5000,tpot:1"
        ).split()
        report = report_of(
            tmp_path, *options, "--temperature", "0.5", "--max-new-tokens", "9", prompt="plain"
        )
    level = report["levels"][0]
    assert level["output_tokens"] == 5 * 10
    # Nothing is quicker than the server is; what a machine does beside may delay a piece, and the next seems
    # early by as much.
    quickest = {
        name: min(request[name] for request in level["requests"])
        for name in ("ttft_ms", "tpot_ms", "e2el_ms")
    }
    assert 1000 * FIRST_S <= quickest["ttft_ms"] < 1000 * (FIRST_S + 3 * WORD_S)
    assert 1000 * (FIRST_S + 4 * WORD_S) <= quickest["e2el_ms"] < 1000 * (FIRST_S + 8 * WORD_S)
    assert (
        0.8 * 4000 * WORD_S / 9 < level["tpot_ms"]["p50"] < 2 * 4000 * WORD_S / 9
    )  # ten tokens in five pieces
    assert 0.8 * 1000 * WORD_S < level["itl_ms"]["p50"] < 2 * 1000 * WORD_S
    assert level["request_goodput"] == 0
    assert level["good_share"] == 0  # a millisecond a token is asked too much
    speculation = level["speculative_decoding"]
    assert speculation["num_drafts"] == 50
    assert speculation["acceptance_length"] == 2.5
    assert speculation["acceptance_rate"] == 0.5
    assert speculation["per_position_acceptance_rates"] == [1.5]
    assert len(asked) == 7
    body = asked[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("m", 9, 0.5, True)
    assert "ignore_eos" not in body


@pytest.mark.serial
def test_load_is_open_and_waiting_counts_from_when_a_request_was_due(tmp_path: Path) -> None:
    options = ("--num-prompts", "10", "--request-rate", "50", "--num-warmups", "0")
    with other_server() as (url, _):
        free = report_of(tmp_path, "--base-url", url, *options, prompt="plain")["levels"][0]
        capped = report_of(tmp_path, "--base-url", url, *options, "--max-concurrency", "1", prompt="plain")[
            "levels"
        ][0]
    one = FIRST_S + 4 * WORD_S
    assert free["peak_in_flight"] > 3
    assert free["duration_s"] < 0.7 * capped["duration_s"]  # no request waited for another
    assert capped["peak_in_flight"] == 1
    assert capped["duration_s"] >= 10 * one
    assert capped["e2el_ms"]["p99"] > 1000 * 7 * one


def test_a_server_without_counts_and_metrics_is_measured_all_the_same(tmp_path: Path) -> None:
    with other_server(has_metrics=False) as (url, asked):
        options = (
            "--base-url",
            url,
            "--max-concurrency",
            "2",
            "--num-prompts",
            "4",
            "--extra-body",
            '{"stream_options": null, "top_k": 3}',
        )
        level = report_of(tmp_path, *options, prompt="uncounted")["levels"][0]
    assert level["output_tokens"] == 20
    assert level["tokens_counted_by"] == "pieces of text"
    assert level["speculative_decoding"] is None
    assert "stream_options" not in asked[0]
    assert asked[0]["top_k"] == 3


def test_failures_are_counted_by_their_reason(tmp_path: Path) -> None:
    with other_server() as (url, _):
        options = f"--base-url {url} --max-concurrency 5 --num-prompts 5 --num-warmups 0 --timeout 20".split()
        patient = ("--goodput", "ttft:20000,tpot:20000")  # every answer is good enough
        level = report_of(tmp_path, *options, *patient, prompt="plain\nrefused\ncut\nsilent\nlate")["levels"][
            0
        ]
    assert (level["completed"], level["failed"]) == (1, 4)
    assert level["errors"] == {
        "HTTP 400: such prompts are refused": 1,
        "the connection broke off": 1,
        "no end after 20 s": 1,
        "broke off: the engine died": 1,
    }
    assert level["good_share"] == 0.2


def test_a_warm_up_that_is_refused_ends_it(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("refused")
    with other_server() as (url, _):
        status, _, err = bench("--base-url", url, "--prompts", str(tmp_path / "prompts.txt"))
    assert status == 2
    assert "such prompts are refused" in err


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("plain")
    with other_server() as (url, asked):
        load = ["--request-rate", "10,20", "--max-concurrency", "2", "--num-prompts", "200"]
        options = ["--base-url", url, *load, "--prompts", str(tmp_path / "prompts.txt")]
        command = [sys.executable, "-c", CODE, "bench", "serve", *options, "--json", str(tmp_path / "r.json")]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
        ) as process:
            end = time.monotonic() + WAIT_S
            while len(asked) < 10:  # one warms up, two are in flight: the other seven have been answered
                assert time.monotonic() < end, "no requests came"
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted" in out
    report = json.loads((tmp_path / "r.json").read_text())
    (level,) = report["levels"]
    assert report["is_interrupted"] is True
    assert 7 <= level["completed"] < 200
    assert level["completed"] + level["given_up"] == level["asked"] == 200
    assert level["failed"] == 0


def test_nobody_at_the_address_is_one_line() -> None:
    status, _, err = bench("--base-url", "http://127.0.0.1:9")
    assert status == 2
    assert "does not answer" in err
    assert "paceline serve" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--base-url", "127.0.0.1:8000"), "--base-url"),
        (("--base-url", "http://127.0.0.1:port"), "port is not a number"),
        (("--request-rate", "1,0"), "--request-rate is '1,0'"),
        (("--request-rate", "fast"), "--request-rate is 'fast'"),
        (("--max-concurrency", "1.5"), "whole numbers"),
        (("--goodput", "ttft:fast"), "--goodput holds 'ttft:fast'"),
        (("--goodput", "itl:5"), "--goodput holds 'itl:5'"),
        (("--metric-percentiles", "50,101"), "up to 100"),
        (("--endpoint", "/v1/chat"), "/v1/chat/completions"),
        (("--extra-body", "[1]"), "--extra-body"),
        (("--burstiness", "0"), "--burstiness is 0"),
        (("--api-key", "a\nb"), "--api-key"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(arguments: tuple[str, ...], words: str) -> None:
    status, _, err = bench(*arguments)
    assert status == 2
    assert words in err


def test_arrivals_are_poisson_and_belong_to_the_seed() -> None:
    times = due_times(4000, 8.0, 1.0, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times == due_times(4000, 8.0, 1.0, seed=3) != due_times(4000, 8.0, 1.0, seed=4)
    assert fmean(gaps) == pytest.approx(1 / 8, rel=0.06)
    assert pstdev(gaps) == pytest.approx(1 / 8, rel=0.1)  # an exponential's deviation is its mean
    even = due_times(4000, 8.0, 100.0, seed=3)
    assert pstdev([b - a for a, b in itertools.pairwise(even)]) < 0.2 / 8
    assert due_times(3, math.inf, 1.0, seed=0) == [0.0] * 3


def test_the_report_of_known_records() -> None:
    quick = Record(
        "1", 0.0, 0.0, [0.1, 0.2, 0.3], 0.3, num_tokens=5, num_prompt=10, num_cached=4, finish="stop"
    )
    slow = Record("2", 1.0, 1.5, [2.0, 3.0], 3.0, num_tokens=5, num_prompt=10, finish="length")
    failed = Record("3", 1.0, 1.0, [], 2.0, error="HTTP 500")
    level = level_report(Level(2.0, None), [quick, slow, failed], 4, (50,), goals_of("ttft:500, e2el:1000"))
    assert level["load"] == "2 req/s"
    assert level["completed"] == 2
    assert level["failed"] == 1
    assert level["given_up"] == 1
    assert level["errors"] == {"HTTP 500": 1}
    assert level["duration_s"] == 3.0
    assert level["request_throughput"] == 0.6667
    assert level["request_goodput"] == 0.3333
    assert level["good_share"] == 0.3333
    assert level["output_throughput"] == 3.3333
    assert level["total_token_throughput"] == 10.0
    assert level["cached_prompt_tokens"] == 4
    assert level["ttft_ms"] == {"mean": 550.0, "p50": 550.0}  # 100 and 1000, from when it was due
    assert level["tpot_ms"] == {"mean": 150.0, "p50": 150.0}  # 50 and 250
    assert level["e2el_ms"] == {"mean": 1150.0, "p50": 1150.0}
    assert level["client_lag_ms"] == 500.0
    assert peak_in_flight([quick, slow, failed]) == 2


def test_the_report_of_servers_that_take_turns_tells_how_smooth_their_streams_are() -> None:
    ours = [serve.Round(100, 1.0, 0, [10.0] * 99), serve.Round(100, 1.0, 0, [30.0] * 99)]
    peer = [serve.Round(50, 1.0, 1, [])] * 2  # whole answers in one piece: there is no gap
    level = serve._summary(1, {"paceline": ours, "Q8_0": peer})
    assert level["gap_ms"] == {"paceline": {"mean": 20.0, "p50": 20.0, "p99": 30.0}, "Q8_0": None}
    assert (level["ratio"], level["ratios_by_round"], level["failed"]) == (2.0, [2.0, 2.0], 2)
    speeds, gaps = serve.tables({"servers": ["paceline", "Q8_0"], "levels": [level]})
    assert speeds.rows == [("1", "100.0", "50.0", "2.00 (Q8_0)", "2")]
    assert (gaps.numbers, gaps.rows) == (["paceline", "llama.cpp Q8_0"], [("1", "20.0 / 30.0", "- / -")])


@pytest.mark.serial
def test_a_lone_stream_flows(tmp_path: Path) -> None:
    server = start_server("default")
    load = ("--max-concurrency", "1", "--num-prompts", "4", "--num-warmups", "3", "--max-new-tokens", "96")
    load += ("--metric-percentiles", "50,95,99")
    try:
        for _ in range(3):  # what else the machine does may delay a piece, but not every time
            gaps = report_of(tmp_path, "--base-url", server.url, *load)["levels"][0]["itl_ms"]
            if gaps["p95"] <= 60:  # the last percent of a few hundred gaps is what else the machine does
                break
        assert gaps["p95"] <= 60, gaps
    finally:
        server.kill()


def test_a_level_without_answers_has_no_latencies() -> None:
    level = level_report(Level(math.inf, 4), [Record("1", 0.0, 0.0, [], 1.0, error="x")], 1, (50,), {})
    assert level["load"] == "4 in flight"
    assert level["request_rate"] is None
    assert level["ttft_ms"] is None
    assert level["request_goodput"] is None


def test_goals_and_counters() -> None:
    assert goals_of("ttft:500,tpot:50") == {"ttft": 500.0, "tpot": 50.0}
    assert goals_of("none") == {}
    with pytest.raises(ConfigError, match="'ttft:-1'"):
        goals_of("ttft:-1")
    assert difference({}, {}) is None
    none = difference({"spec_decode_num_drafts": 2.0}, {"spec_decode_num_drafts": 2.0})
    assert none is not None
    assert none["acceptance_length"] is None
