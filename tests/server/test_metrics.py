"""/metrics counts what happened, and the dashboard and the units in deploy/ speak of what exists."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paceline.server.calls import Call, added
from paceline.server.metrics import Metrics
from tests.server.harness import Server

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"


def test_requests_are_counted(tiny_server: Server) -> None:
    before = tiny_server.settled()
    answers = [
        tiny_server.post(
            "/v1/completions", prompt="abc abc abc abc", max_tokens=20, temperature=0, ignore_eos=True
        ).json()
        for _ in range(3)
    ]
    after = tiny_server.settled()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    usage = [answer["usage"] for answer in answers]
    assert grown["paceline:generation_tokens_total"] == 60
    assert grown["paceline:prompt_tokens_total"] == sum(each["prompt_tokens"] for each in usage)
    assert grown['paceline:request_success_total{finished_reason="length"}'] == 3
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_time_per_output_token_seconds",
    ):
        assert grown[f"paceline:{name}_count"] == 3
        assert 0 < grown[f"paceline:{name}_sum"] < 60
    drafted = sum(each["speculative"]["num_drafted"] for each in usage)
    assert grown["paceline:spec_decode_num_draft_tokens_total"] == drafted
    assert grown["paceline:spec_decode_num_accepted_tokens_total"] == sum(
        each["speculative"]["num_accepted"] for each in usage
    )
    by_drafter = [
        value
        for name, value in grown.items()
        if name.startswith("paceline:spec_decode_num_draft_tokens_by_drafter_total")
    ]
    assert sum(by_drafter) == drafted
    assert grown['paceline:http_requests_total{route="/v1/completions",status="200"}'] == 3
    assert after["paceline:engine_up"] == 1


def test_cached_prompts_are_said_and_counted(tiny_server: Server) -> None:
    prompt = "a prompt that nobody else has, and that fills a few blocks of the cache: 0123456789 0123456789"
    first, second = (
        tiny_server.post("/v1/completions", prompt=prompt, max_tokens=4, ignore_eos=True).json()["usage"]
        for _ in range(2)
    )
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= 32


def test_counters_grow_over_a_restart_of_the_engine() -> None:
    metrics = Metrics("m")
    figures: dict[str, Any] = {
        "gauges": {"num_requests_running": 1, "kv_cache_blocks_used": 2, "kv_cache_blocks_total": 8},
        "counters": {"num_preemptions": 3, "prefix_cache_queries": 5, "prefix_cache_hits": 1},
    }
    stats = {
        "lengths": {"0": 4, "2": 3},
        "num_steps": 7,
        "num_drafted": 6,
        "num_accepted": 4,
        "drafted_at": [3, 3],
        "accepted_at": [3, 1],
    }
    for _ in range(2):
        metrics.step({"figures": {**figures, "stats": stats}})
        metrics.step({"figures": {**figures, "stats": stats}})
        metrics.engine_up(False)
    text = metrics.text().decode()
    assert 'paceline:num_preemptions_total{model_name="m"} 6.0' in text
    assert 'paceline:spec_decode_num_drafts_total{model_name="m"} 6.0' in text
    assert 'paceline:kv_cache_blocks_used{model_name="m"} 0.0' in text


def test_counts_of_choices_add_up() -> None:
    from paceline.core.tree import Tree
    from paceline.core.types import Draft
    from paceline.engine.stats import SpecStats

    one, two = SpecStats(), SpecStats()
    one.record(Draft(Tree.chain(0, [1, 2, 3]), "ngram"), [1, 2], 3)
    two.record(Draft(Tree.chain(0, [1])), [], 1)
    two.record(Draft(Tree.chain(0, [1, 2]), "suffix"), [1, 2], 3)
    sent = [json.loads(json.dumps(asdict(stats.settle()))) for stats in (one, two)]
    total = added(sent)
    assert total.num_tokens == 7
    assert total.accepted_at == [2, 2, 0]
    assert total.tau == pytest.approx(7 / 3)
    assert total.by_source["ngram"].num_accepted == 2
    assert total.lengths == {3: 1, 1: 1, 2: 1}
    theirs = Call("c", 1, 2, ends={index: {"stats": stats} for index, stats in enumerate(sent)}).speculation()
    assert theirs["acceptance_histogram"] == [1, 0, 2, 0]
    assert theirs["num_spec_steps"] == 3
    assert theirs["mean_acceptance_length"] == pytest.approx(1 + 4 / 3, abs=1e-4)


def test_the_dashboard_asks_for_metrics_that_exist(tiny_server: Server) -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"paceline:\w+", target["expr"])
    }
    there = set(re.findall(r"^# TYPE (paceline:\w+) ", tiny_server.http.get("/metrics").text, re.MULTILINE))
    there |= {f"{name}_{part}" for name in there for part in ("bucket", "sum", "count")}
    assert len(asked) > 15
    assert asked <= there, asked - there
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_unit_and_the_image_start_the_server_with_flags_it_has() -> None:
    from typer.testing import CliRunner

    from paceline.cli.main import app

    known = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "400"}).output
    unit, image = (DEPLOY / "paceline.service").read_text(), (DEPLOY / "Dockerfile").read_text()
    for text in (unit, image):
        assert "paceline" in text
        for flag in re.findall(
            r"(?<=\s)(--[a-z-]+)(?=[\s=\"\\])",
            " ".join(line for line in text.splitlines() if re.search(r"\bserve\b", line)),
        ):
            assert flag in known, flag
    assert "KillMode=mixed" in unit  # else systemd would signal the engine, too
    assert "HEALTHCHECK" in image
    assert "USER" in image
