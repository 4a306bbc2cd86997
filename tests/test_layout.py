"""`paceline plan` for several devices: bytes worked out by hand, limits that any layout keeps, the tables of the
documents, the command.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.loaders.checkpoint import LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B, SMOLLM2_135M
from paceline.measure.layout import Layout, Placed
from paceline.measure.roofline import GB, HARDWARE, Deployment, Hardware, Link
from paceline.measure.tables import rewritten
from paceline.models.config import ModelConfig

ROOT = Path(__file__).parent.parent


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def placed(
    config: ModelConfig, tensor: int = 1, pipeline: int = 1, *, per_node: int = 8, by_expert: bool = False,
    **changes: Any,
) -> Placed:  # fmt: skip
    target = Deployment(config, HARDWARE["h200"], "bfloat16", "bfloat16", **changes)
    return Placed(target, Layout(tensor, pipeline, 1, by_expert), per_node)


def test_one_device_takes_the_time_of_the_roofline_and_sends_nothing() -> None:
    alone = placed(LLAMA_8B, batch=4)
    assert alone.seconds(3) == alone.target.seconds(3)
    assert alone.traffic(1) == (0, 0, 0, 0)
    assert alone.stages[0].weight_bytes == alone.target.weight_bytes


def test_four_exchanges_of_a_layer_worked_out_by_hand() -> None:
    """Each rank of two gets the other's half of what attention found, of its output, of the inner values and
    of their output, in two bytes a number; and half of the logits in four.
    """
    sent = placed(LLAMA_8B, 2, batch=3).traffic(1)
    row = 32 * (4096 + 4096 + 14_336 + 4096) * 2 / 2 + 128_256 * 4 / 2
    assert sent.node_bytes == pytest.approx(3 * row)
    assert sent.node_seconds == pytest.approx(3 * row / 450e9 + (32 * 4 + 1) * 6e-6)
    assert sent.network_bytes == 0
    far = placed(LLAMA_8B, 4, per_node=2).traffic(1)  # of three other ranks one is in the same node
    assert far.network_bytes == pytest.approx(2 * far.node_bytes)
    assert far.network_seconds > far.node_seconds


def test_stages_hand_on_rows_and_give_logits_back() -> None:
    sent = placed(LLAMA_8B, 1, 2, batch=2).traffic(1)
    assert sent.node_bytes == 4096 * 2 + 128_256 * 4  # of one request: there is one in each stage
    between = placed(LLAMA_8B, 1, 2, per_node=1, batch=2).traffic(1)
    assert (between.node_bytes, between.network_bytes) == (0, sent.node_bytes)


def test_stages_work_at_once_if_there_are_as_many_requests() -> None:
    alone, one, two = placed(LLAMA_8B), placed(LLAMA_8B, 1, 2), placed(LLAMA_8B, 1, 2, batch=2)
    assert one.seconds(1) > alone.seconds(1)  # one request waits for both stages, and for what is sent
    assert two.seconds(1) < 1.1 * one.seconds(1)  # two are in different ones: the slower, with the head, sets
    assert two.seconds(1) > one.seconds(1)  # the pace


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (8, 1), (1, 4), (2, 4)])
def test_ranks_together_hold_the_whole_model(tensor: int, pipeline: int) -> None:
    stages, whole = placed(LLAMA_70B, tensor, pipeline).stages, placed(LLAMA_70B).target
    embedding = 2 * LLAMA_70B.vocab_size * LLAMA_70B.hidden_size  # whole on every rank of the first stage
    held = tensor * sum(stage.weight_bytes for stage in stages)
    assert held == pytest.approx(whole.weight_bytes + (tensor - 1) * embedding, rel=1e-6)
    assert tensor * sum(s.kv_bytes_per_token for s in stages) == whole.kv_bytes_per_token
    work = whole.work(1)
    assert tensor * sum(stage.work(1).flops for stage in stages) == pytest.approx(work.flops)
    assert tensor * sum(stage.work(1).num_bytes for stage in stages) == pytest.approx(work.num_bytes)


def test_a_rank_has_whole_heads() -> None:
    """Of three KV heads one of two ranks has two: that one sets the pace."""
    half = placed(SMOLLM2_135M, 2).stages[0]
    assert half.kv_bytes_per_token == placed(SMOLLM2_135M).target.kv_bytes_per_token * 2 / 3


def test_experts_that_are_whole_on_ranks() -> None:
    apart, split, alone = (
        placed(QWEN3_30B_A3B, n, by_expert=e) for n, e in ((4, True), (4, False), (1, False))
    )
    assert apart.stages[0].weight_bytes == split.stages[0].weight_bytes
    woken, all_woken = apart.stages[0].woken(1), alone.stages[0].woken(1)
    assert all_woken / 4 < woken < all_woken  # chance gives one of the ranks more than its share
    assert alone.stages[0].seconds(1) / 4 < split.stages[0].seconds(1) < apart.stages[0].seconds(1)
    crowded = placed(QWEN3_30B_A3B, 4, by_expert=True, batch=512).stages[0]
    assert crowded.woken(1) == pytest.approx(32, abs=0.1)  # all of them


def test_cores_share_what_was_measured_of_their_machine() -> None:
    machine = Hardware(
        "this", 20 * GB, 1e12, 1e12, 24 * GB, 2e12, 2, lone_bandwidth=14 * GB, link=Link(GB, 0)
    )
    target = Deployment(SMOLLM2_135M, machine, "int8", "int8", batch=2, context=0)
    replicas, stages = Layout(1, 1, 2, False), Layout(1, 2, 1, False)
    both, one = Placed(target, replicas, 2), Placed(replace(target, batch=1), replicas, 2)
    assert both.stages[0].hardware.bandwidth == 10 * GB
    assert one.stages[0].hardware.bandwidth == 14 * GB  # the other replica rests
    assert both.stages[0].hardware.int8_flops == one.stages[0].hardware.int8_flops == 1e12
    in_turn = Placed(target, stages, 2)  # each has all cores, and half of the memory
    found = in_turn.stages[0].hardware
    assert (found.bandwidth, found.int8_flops, found.memory) == (20 * GB, 2e12, 12 * GB)
    assert in_turn.num_groups == 1
    slower = Placed(target, stages, 2, reach=1.5)
    passes = sum(stage.seconds(1) for stage in in_turn.stages)
    assert slower.seconds(1) - in_turn.seconds(1) == pytest.approx(0.5 * passes)


def test_the_best_layout_that_fits_comes_first() -> None:
    asked = ("llama-70b", "--hardware", "h200", "--devices", "8", "--batch", "16", "--context", "4096")
    done = invoke(*asked, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["layouts"]
    rows = found["rows"]
    assert {(row["tensor"] * row["pipeline"] * row["replicas"]) for row in rows} == {8}
    assert rows[-1]["fits"] == "no"  # 141 GB of weights and K/V beside them, on one device
    fitting = [row["drafting"] for row in rows if row["fits"] == "yes"]
    assert fitting == sorted(fitting, reverse=True)
    assert all(row["drafting"] >= row["plain"] for row in rows)
    assert f"Best: {rows[0]['layout']}." in invoke(*asked).stdout


def test_what_is_asked_for_is_what_is_told() -> None:
    done = invoke("llama-8b", "--hardware", "h200", "-tp", "2", "-pp", "2", "--json")
    assert [row["layout"] for row in json.loads(done.stdout)["layouts"]["rows"]] == ["TP 2 x PP 2"]
    assert json.loads(invoke("llama-8b", "--hardware", "h200", "--json").stdout)["layouts"] is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--devices", "6", "-tp", "4"], "--devices is 6"),
        (["--devices", "4", "--nodes", "3"], "--nodes is 3"),
        (["-tp", "16"], "8 KV heads"),
        (["-pp", "40"], "32 layers"),
        (["-tp", "2", "--enable-expert-parallel"], "no experts"),
        (["--devices", "2", "--link", "-1"], "--link is -1"),
        (["--devices", "2", "--measured", "0.001"], "the roofline says"),
    ],
)
def test_what_a_user_can_mend_is_one_line(arguments: list[str], named: str) -> None:
    done = invoke("llama-8b", "--hardware", "h200", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_device_without_a_link_is_alone() -> None:
    done = invoke("llama-8b", "--hardware", "m2", "--devices", "2")
    assert "--link is None" in done.stderr
    assert invoke("llama-8b", "--hardware", "m2", "--devices", "2", "--link", "5").exit_code == 0


def test_the_documents_have_what_the_command_says() -> None:
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert text.count("<!-- plan:") == 2
    assert rewritten(text, ROOT / "docs" / "results") == text


@pytest.mark.serial
def test_ranks_of_this_machine_are_measured() -> None:
    from paceline.measure.limits import measure_ranks

    machine = measure_ranks(Hardware("this", 20 * GB, 1e12, 1e12, 24 * GB, 2e12, 2))
    assert machine.link is not None
    assert 1e8 < machine.link.bandwidth < 1e12
    assert 1e-8 < machine.link.latency < 1e-2
    assert machine.lone_bandwidth is not None
    assert 1e8 < machine.lone_bandwidth < 1e12
