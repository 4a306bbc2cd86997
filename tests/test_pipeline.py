"""Pipeline parallelism: the same bits and the same text with stages, several passes under way, stages that
fail, and stages that come from elsewhere.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError, RankError
from paceline.core.types import Batch, Cached, ColumnsOf, Moves, Pick, Request, Segment
from paceline.core.watch import Choice
from paceline.engine.engine import Engine
from paceline.loaders.checkpoint import LLAMA_8B, SMOLLM2_135M
from paceline.models.config import RecurrentConfig
from paceline.models.stage import Stage, bounds
from paceline.runtime import meet
from paceline.runtime.link import Link, PassInput, received
from paceline.runtime.stages import Stages, StagesExecutor
from tests.heads import random_head
from tests.make_models import tiny_hf, tiny_tokenizer
from tests.scale.test_kv_events import free_port
from tests.test_parallel import LONG, OPTIONS, PROMPTS, SIZES, WAYS, Run, logits_of

NUM_LAYERS = 5
KINDS = [  # kernels, type, ranks of a stage, stages
    ("torch", "float32", 1, 2),
    ("exact", "int8", 1, 2),
    pytest.param(("exact", "float32", 2, 2), marks=pytest.mark.slow),
    pytest.param(("exact", "int4", 1, 3), marks=pytest.mark.slow),
    pytest.param(("torch", "float32", 2, 2), marks=pytest.mark.slow),
]
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "eagle": {"method": "eagle"},
    "draft_model": {"method": "draft_model"},
    "early_exit": {"method": "early_exit", "num_layers": 2},
    "late_exit": {"method": "early_exit", "num_layers": 4},
    "tree": {"method": "early_exit", "num_layers": 3, "tree_width": 2},
    "staged": {"method": "staged", "middle": {"method": "early_exit"}, "drafter": {"method": "ngram"}},
    "hybrid": {"method": ["ngram", {"method": "early_exit", "num_layers": 1}]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pipeline")
    tiny_hf(made, "llama", **SIZES, num_hidden_layers=NUM_LAYERS)
    tiny_tokenizer(made)
    return made


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Run, Run]]:
    """Stages overlap, as those of several machines do."""
    kernels, dtype, ranks, stages = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stages, "take_turns", False)
        one, several = Run(folder, kernels, dtype, 1), Run(folder, kernels, dtype, ranks, stages)
    yield one, several
    for run in (one, several):
        run.llm.close()


def outputs_of(llm: LLM, depth: int | None) -> list[torch.Tensor]:
    """Logits of a prompt and of a tree after it, and the hidden states of every layer."""
    executor, cached = llm.engine.executor, Cached()
    assert executor.kv.reserve(cached, 40)
    layers = tuple(range((depth or NUM_LAYERS) + 1))
    first = executor.forward([Segment(list(range(3, 30)), cached, None, 27)], num_layers=depth)
    logits = first.logits.clone()
    cached.num_cached = 27
    tree = executor.forward(
        [Segment([5, 6, 7, 8], cached, [-1, 0, 0, 2], 4)],
        num_layers=depth,
        hidden_layers=layers,
        top_tokens=3,
    )
    executor.kv.free(cached)
    assert tree.top is not None
    return [logits, tree.logits.clone(), tree.top.float(), *(tree.hidden[n].clone() for n in layers)]


@pytest.mark.parametrize("depth", [None, 1, 2, 4])
def test_logits_and_hidden_states_have_the_same_bits(pair: tuple[Run, Run], depth: int | None) -> None:
    one, several = (outputs_of(run.llm, depth) for run in pair)
    assert all(torch.equal(*each) for each in zip(one, several, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_texts_are_the_same(pair: tuple[Run, Run], method: str, way: str) -> None:
    """Eight requests, for which there is not enough room, then one that begins like them, alone. The torch
    reference rounds by the number of rows, and with stages others are in a pass: there tokens are compared.
    """
    one, given = pair[0], METHODS[method]
    if given is not None:
        given = {"num_speculative_tokens": 3, **given}
    if method == "draft_model":
        given = one.drafts
    if method == "eagle":
        given = {**given, "model": random_head("eagle", one.llm.checkpoint)} if given else None
    params, found = replace(WAYS[way], max_tokens=16), []
    for run in pair:
        said = [*run.say(given, params, [*PROMPTS, *PROMPTS[::-1]]), *run.say(given, params, PROMPTS[1:2])]
        if not run.llm.engine.executor.decoder.is_exact:
            said = [[tokens for tokens, _ in outputs] for outputs in said]
        found.append(said)
    assert found[0] == found[1]


def test_logits_travel_where_they_are_read(folder: Path) -> None:
    """Where the last stage picks all tokens, rank 0 gets those alone."""
    with LLM(str(folder), kernels="exact", dtype="int8", pipeline_parallel_size=2, **OPTIONS) as llm:
        executor, cached = llm.engine.executor, Cached()
        assert executor.kv.reserve(cached, 8)
        given = {
            "picked": (Pick(0.0, 0), 0, 0), "by the host": (None, 0, 3), "scored": (None, 2, 5), "top": (Pick(0.0, 0), 0, 3),
        }  # fmt: skip
        for name, (pick, num_scored, rows) in given.items():
            segment = Segment([5, 6, 7, 8, 9], cached, None, 3, pick, num_scored)
            output = executor.forward([segment], top_tokens=2 if name == "top" else 0)
            assert (name, len(output.logits)) == (name, rows)
            assert len(output.picked or ()) == (0 if name in ("by the host", "scored") else 3)


def test_what_is_watched_is_the_same(pair: tuple[Run, Run]) -> None:
    """`explain` reads logits, which a stage does not send otherwise."""
    found = []
    for run in pair:
        events: list[Any] = []
        engine = Engine(run.llm.engine.executor, None, run.built.config)
        engine.watch = events.append
        for request in requests_of(run.llm, 1, replace(WAYS["greedy"], max_tokens=8)):
            engine.add(request)
        while engine.has_work:
            engine.step()
        found.append([(e.token, e.logits.tolist()) for e in events if isinstance(e, Choice)])
    assert found[0] == found[1]
    assert len(found[0]) == 8


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gpt_oss", "mixtral"])
def test_other_architectures(family: str, tmp_path: Path) -> None:
    """Layers of several kinds, windows, sinks, experts: a stage has those of its own layers."""
    tiny_hf(tmp_path, family)
    tiny_tokenizer(tmp_path)
    found = []
    for stages in (1, 2):
        with LLM(str(tmp_path), kernels="torch", pipeline_parallel_size=stages, **OPTIONS) as llm:
            found.append(logits_of(llm))
    assert torch.equal(*found)


def requests_of(llm: LLM, count: int, params: SamplingParams) -> list[Request]:
    prompts = [llm.tokenizer.encode(PROMPTS[i % len(PROMPTS)])[: 3 + i] for i in range(count)]
    return [llm._intake.requests(tokens, params, 0)[0] for tokens in prompts]


def test_passes_are_under_way_together(pair: tuple[Run, Run]) -> None:
    """As many as there are stages, each over other requests; with one request one."""
    llm, greedy = pair[1].llm, WAYS["greedy"]
    executor = llm.engine.executor
    assert isinstance(executor, StagesExecutor)
    engine, most = Engine(executor, None, replace(pair[1].built.config, max_num_seqs=8)), 0
    for request in requests_of(llm, 8, greedy):
        engine.add(request)
    while engine.has_work:
        engine.step()
        engine.check()
        ids = [r.id for pending, _ in engine._under_way for r in pending.requests]
        assert len(ids) == len(set(ids))
        most = max(most, len(engine._under_way))
    assert most == executor.num_stages - 1, "beside the one that has landed"
    (lone,) = requests_of(llm, 1, greedy)
    engine.add(lone)
    while engine.has_work:
        engine.step()
        assert not engine._under_way


def test_stages_of_one_machine_take_turns(folder: Path) -> None:
    """One pass over all requests: each stage has all cores for it, and reads its weights once."""
    texts = []
    for stages in (1, 2):
        with LLM(str(folder), kernels="torch", pipeline_parallel_size=stages, **OPTIONS) as llm:
            requests, most = requests_of(llm, 6, WAYS["greedy"]), 0
            for request in requests:
                llm.engine.add(request)
            while llm.engine.has_work:
                llm.engine.step()
                most = max(most, len(llm.engine._under_way))
            assert most == 0, "beside the one that has landed"
            texts.append([request.output for request in requests])
    assert texts[0] == texts[1]


UNREADABLE = """
import sys
from paceline import LLM
from paceline.core.errors import PacelineError
options = dict(kernels="torch", max_model_len=64, progress=False, pipeline_parallel_size=3)
try:
    LLM(sys.argv[1], speculative_config={"method": "eagle", "model": sys.argv[1]}, **options)
except PacelineError:
    print("refused")
"""


def test_a_program_that_could_not_load_ends_by_itself(folder: Path) -> None:
    """Threads that read from stages have ended before the interpreter does: else it is aborted, as a rule."""
    for _ in range(3):
        command = [sys.executable, "-c", UNREADABLE, str(folder)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr


@pytest.mark.parametrize("seed", range(3))
def test_arrivals_stops_and_preemptions(pair: tuple[Run, Run], seed: int) -> None:
    """In any order: the books balance after every step, and every text is a beginning of the plain one."""
    one, several = pair
    method = {"method": "early_exit", "num_layers": 3, "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
    plain = [r.tokens for r in finished(one.llm, requests_of(one.llm, 12, params))]
    several.say(method, replace(params, max_tokens=1), PROMPTS[:1])  # an engine that drafts
    engine, kv, chance = several.llm.engine, several.llm.engine.executor.kv, random.Random(seed)
    waiting, live = requests_of(several.llm, 12, params), list[Request]()
    every, stopped = list(waiting), set[str]()
    while waiting or engine.has_work:
        if waiting and chance.random() < 0.4:
            live.append(waiting.pop())
            engine.add(live[-1])
        if live and chance.random() < 0.04:
            stopped.add((gone := chance.choice(live)).id)
            engine.abort(gone)
        if chance.random() < 0.02:
            for request in engine.set_aside():
                engine.scheduler.add(request)
        engine.step()
        engine.check()
        assert kv.num_free + kv.num_used == kv.num_blocks
    assert kv.num_used == 0
    assert sum(request.num_preemptions for request in every) > 0
    for request, text in zip(every, plain, strict=True):
        assert request.tokens == text[: len(request.tokens)]
        assert request.id in stopped or len(request.tokens) == len(text)


def finished(llm: LLM, requests: list[Request]) -> list[Request]:
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
    return requests


def test_auto_writes_the_plain_text(folder: Path) -> None:
    """The policy knows each of the passes under way by itself."""
    options = {**OPTIONS, "speculative_config": "auto", "max_num_seqs": 8}
    said = []
    for stages in (1, 2):
        with LLM(str(folder), kernels="torch", pipeline_parallel_size=stages, **options) as llm:
            said.append([r.token_ids for r in llm.generate(PROMPTS * 2, WAYS["greedy"])])
    assert said[0] == said[1]


def test_a_stage_holds_its_part(pair: tuple[Run, Run]) -> None:
    one, several = (run.llm.engine.executor for run in pair)
    assert isinstance(several, StagesExecutor)
    assert several.config == one.config
    assert len(several.memory.layers) == len(several._part.layers) < len(one.memory.layers)
    assert several.decoder.num_bytes < one.decoder.num_bytes


@pytest.mark.parametrize("size", [1, 2, 3, 7, 30])
def test_stages_share_all_layers(size: int) -> None:
    for config in (SMOLLM2_135M, LLAMA_8B):
        found = bounds(config, size)
        assert [i for part in found for i in part] == list(range(config.num_layers))
        assert all(found)
    assert [len(part) for part in bounds(SMOLLM2_135M, 2)] == [19, 11], "the output layer weighs as 8 layers"


def test_what_cannot_be_split(folder: Path) -> None:
    with pytest.raises(ConfigError, match="5 layers; use at most that many"):
        LLM(str(folder), pipeline_parallel_size=6, **OPTIONS)
    with pytest.raises(ConfigError, match="recurrent layers"):
        Stage(0, 2).check(replace(SMOLLM2_135M, recurrent=RecurrentConfig((True,) * 30, 1, 1, 16, 16)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("kernels", ["torch", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_lost_stage_ends_requests(folder: Path, kernels: str, number: signal.Signals) -> None:
    """Killed, or stopped for good: in the middle of a text, with an error, and nothing is left."""
    with LLM(str(folder), kernels=kernels, pipeline_parallel_size=3, **OPTIONS) as llm:
        stages = llm.engine.executor.stages  # type: ignore[attr-defined]
        next(llm.stream("the wind", LONG))
        threading.Timer(0.2, stages.processes[1].send_signal, [number]).start()
        started = time.monotonic()
        with pytest.raises(RankError, match=r"stage 2.*make a new LLM"):
            llm.generate(["the wind"] * 400, LONG)  # more than it can have said by then
        assert time.monotonic() - started < ENDS_S
        with pytest.raises(RankError):
            llm.generate("again", LONG)
        for process in stages.processes:
            process.wait(ENDS_S)


@pytest.mark.slow
def test_a_lost_rank_of_a_stage_ends_requests(folder: Path) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with LLM(str(folder), kernels="exact", **sizes, **OPTIONS) as llm:
        stages = llm.engine.executor.stages  # type: ignore[attr-defined]
        (stage,) = stages.processes
        (rank,) = children(stage.pid)
        threading.Timer(0.2, os.kill, [rank, signal.SIGKILL]).start()
        started = time.monotonic()
        with pytest.raises(RankError, match="rank 1 of 2 has ended"):
            llm.generate(["the wind"] * 400, LONG)  # more than it can have said by then
        assert time.monotonic() - started < ENDS_S
    stage.wait(ENDS_S)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


ENDS_S = 60  # after which requests would hang: 10 s on a machine that does nothing else
SAY = """
import json, sys
from paceline import LLM, SamplingParams
with LLM(sys.argv[1], kernels="torch", pipeline_parallel_size=2, max_model_len=128, speculative_config=None,
         progress=False) as llm:
    print(json.dumps(llm.generate("the wind", SamplingParams(temperature=0, max_tokens=8)).pop().token_ids))
"""


def start(folder: Path, rank: int, port: int, **variables: str) -> subprocess.Popen[str]:
    given = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", SAY, str(folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **given, **variables}, **pipes)


def test_stages_come_by_themselves(folder: Path) -> None:
    """The same command twice, with torchrun's variables; strangers are turned away while rank 0 listens."""
    port = free_port()
    first = start(folder, 0, port, PACELINE_RANK_KEY="s3cret")
    while not is_listening(port):  # a connection that says nothing
        time.sleep(0.1)
        assert first.poll() is None, first.communicate()
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"\x00" * 100)
        wrong = start(folder, 1, port, PACELINE_RANK_KEY="guess")
        assert "do not agree" in wrong.communicate(timeout=100)[1]
        assert wrong.returncode
    second = start(folder, 1, port, PACELINE_RANK_KEY="s3cret")
    said, errors = first.communicate(timeout=100)
    assert first.returncode == 0, errors
    assert second.communicate(timeout=100)[0] == ""
    assert second.returncode == 0
    with LLM(str(folder), kernels="torch", **OPTIONS) as llm:
        (result,) = llm.generate("the wind", SamplingParams(temperature=0, max_tokens=8))
    assert said.strip() == str(list(result.token_ids))


def is_listening(port: int) -> bool:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


def test_places_are_checked() -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    assert meet.place_of({}, 2) is None
    assert meet.place_of(given, 1) is None
    assert meet.place_of(given, 2) == meet.Place(1, 2, "127.0.0.1", 29511, b"")
    with_agent = {**given, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert meet.place_of(with_agent, 2) == meet.Place(1, 2, "127.0.0.1", 29512, b"")
    wrong = {
        "WORLD_SIZE is 4": {"WORLD_SIZE": "4"},
        "RANK is 2": {"RANK": "2"},
        "RANK is 'first'": {"RANK": "first"},
        "set PACELINE_RANK_KEY": {"MASTER_ADDR": "0.0.0.0"},
        "is not found": {"MASTER_ADDR": "no.such.host.invalid"},
    }
    for message, changed in wrong.items():
        with pytest.raises(ConfigError, match=message):
            meet.place_of({**given, **changed}, 2)


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    ours, theirs = map(Link, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_pass_travels_whole(links: tuple[Link, Link]) -> None:
    ours, theirs = links
    columns = ColumnsOf([3, 4], [0, 1], [16, 17], [-1, 0], [0, 0], [0, 2], [1], [0], [1], [], [])
    picks = [Pick(0.7, 2**63 + 1, 5, 0.9, 1e-300)]
    given = PassInput(Batch(columns, "cpu", picks, Moves([1, 2], [3, 4])), 5, (0, 2))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    ours.send("pass", given.fields(), [*given.arrays(), x])
    found = received(*theirs.receive())
    assert (found.batch.columns, found.batch.picks) == (columns, picks)
    assert (found.batch.moves, found.num_layers, found.hidden_layers) == (Moves([1, 2], [3, 4]), 5, [0, 2])
    assert found.x is not None
    assert torch.equal(found.x, torch.from_numpy(x))


FRAMES = [
    b"\xff\xff\xff\xff",
    b"\x02\x00\x00\x00[]",
    b"\x03\x00\x00\x00{}}",
    b'\x2a\x00\x00\x00{"kind": "pass", "arrays": [["|O", [999]]]}',
    b'\x2e\x00\x00\x00{"kind": "pass", "arrays": [["<f4", [-1, -99]]]}',
    b'\x33\x00\x00\x00{"kind": "pass", "arrays": [["<f4", [99999999999999]]]}',
]


@pytest.mark.parametrize("frame", FRAMES)
def test_what_is_no_frame_is_refused(frame: bytes, links: tuple[Link, Link]) -> None:
    ours, theirs = links
    ours.socket.sendall(frame)
    ours.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match=r"frame|ended"):
        theirs.receive()
