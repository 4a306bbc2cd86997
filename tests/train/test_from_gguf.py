"""From a GGUF file to a head in use, with the command that a user types; and how many engines write."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import subprocess
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from paceline.api.llm import LLM
from paceline.cli.main import app
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.heads import target_hash
from paceline.train.data import BESIDE, LONGEST, MOST_ENGINES, SPENT, WriteConfig, shared_gpu, write_texts
from paceline.train.lessons import SIZES, covering
from paceline.train.programs import program_in, with_programs
from paceline.train.session import read_head
from paceline.train.talk import Style, conversations
from tests.make_models import tiny_gguf, tiny_hf, tiny_tokenizer

ROOT = Path(__file__).parent.parent.parent
GIB = 1 << 30


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 file with a chat template and one matrix for both ends, its weights in blocks of 8 bits."""
    folder = tmp_path_factory.mktemp("gguf")
    source = tiny_tokenizer(tiny_hf(folder / "qwen2", "qwen2"))
    return tiny_gguf(folder / "tiny-coder-q8_0.gguf", source, quant="Q8_0")


@pytest.fixture(scope="module")
def text(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What it wrote: interrupted, and taken up again."""
    folder = tmp_path_factory.mktemp("text")
    config = WriteConfig(model=str(gguf), folder=folder, device="cpu", num_tokens=6000, code=0.3)

    def interrupt(count: int) -> None:
        if count > 2000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_texts(config, interrupt)
    spent = json.loads((folder / SPENT).read_text())["seconds"]
    written = write_texts(config, lambda count: None)
    assert written.num_answer_tokens >= 6000
    assert len(list(folder.glob("*.npz"))) == 2
    assert json.loads((folder / SPENT).read_text())["seconds"] > spent > 0
    return folder


def train(gguf: Path, out: Path, *more: str) -> Result:
    sizes = "--tokens 6000 --code 0.3 --rounds 0.8 --bits 8 --set batch_tokens=1024 --set max_length=448"
    command = ["train", "eagle", "--target", str(gguf), "--device", "cpu", "-o", str(out), *sizes.split()]
    done = CliRunner().invoke(app, [*command, "--set", "num_held_out=8", "--draft-vocab", "192", *more])
    assert done.exit_code == 0, done.output
    return done


def test_a_head_is_trained_from_gguf_in_several_calls_and_changes_no_text(
    gguf: Path, text: Path, tmp_path: Path
) -> None:
    for name in ("whole", "parts"):
        shutil.copytree(text, tmp_path / name / "text")
    said = train(gguf, tmp_path / "whole").stderr
    assert "drafts 192 tokens" in said
    for _ in range(2):
        train(gguf, tmp_path / "parts", "--resume", "--stop-after", "1")
    train(gguf, tmp_path / "parts", "--resume")
    (config, tensors), (_, others) = (read_head(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    notes = json.loads((tmp_path / "parts" / "provenance.json").read_text())
    assert notes["target"]["hash"] == config.target_hash == target_hash(open_checkpoint(str(gguf)))
    assert notes["text"]["covered_by_drafts"] > 0.5
    assert notes["recipe"]["draft_vocab_size"] == 192
    assert all(len(record["by_position"]) == 5 for record in notes["curve"])
    assert (tmp_path / "parts" / "curves.png").stat().st_size > 1000
    greedy, prompts = SamplingParams(temperature=0, max_tokens=24), ["def add(a, b):", "The wind turns"]
    found = []
    for drafting in (
        None,
        {"method": "auto", "head": str(tmp_path / "parts")},
        {"method": "eagle", "model": str(tmp_path / "parts"), "num_speculative_tokens": 3},
    ):
        with LLM(str(gguf), speculative_config=drafting, device="cpu", progress=False) as llm:
            results = llm.generate(prompts, greedy)
        found.append([list(result.outputs[0].token_ids) for result in results])
    assert found[0] == found[1] == found[2]
    assert sum(result.stats.num_drafted for result in results) > 0


def test_a_deadline_ends_the_writing_and_no_engine_is_started_after_it(text: Path, gguf: Path) -> None:
    shards = sorted(text.glob("*.npz"))
    past = time.monotonic() - 1
    config = WriteConfig(model=str(gguf), folder=text, device="cpu", num_tokens=99_000, deadline=past)
    assert write_texts(config, lambda count: None).num_answer_tokens < 99_000
    assert sorted(text.glob("*.npz")) == shards


def test_engines_share_a_gpu_by_what_each_of_them_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    room = 132 * GIB
    for weights, per_token, least, most in (
        (0.27e9, 23_040, MOST_ENGINES, MOST_ENGINES),  # SmolLM2-135M
        (1.0e9, 12_288, MOST_ENGINES, MOST_ENGINES),  # Qwen2.5-0.5B
        (3.6e9, 28_672, 8, 12),  # Qwen2.5-1.5B
        (16e9, 131_072, 1, 4),  # Llama-8B
    ):
        found = shared_gpu(room, weights + BESIDE, 256 * per_token)
        assert least <= found.number <= most
        assert found.kv_bytes is not None
        assert found.number * (weights + BESIDE + found.kv_bytes) <= room
        assert found.kv_bytes <= LONGEST * 256 * per_token
    assert shared_gpu(room, 1e9 + BESIDE, 256 * 12_288, useful=2).number == 2, "for little text"
    with pytest.raises(
        ConfigError, match=r"processes is 40; of the GPU \d+ GB can be used and each takes 14"
    ):
        shared_gpu(room, 3.6e9 + BESIDE, 256 * 28_672, asked=40)


def test_the_draft_vocabulary_is_as_large_as_the_answers_ask_for() -> None:
    ranks = np.arange(1, 151_937)
    assert covering((1e6 / ranks).astype(np.int64)) == SIZES[1]
    assert covering((1e8 / ranks**1.1).astype(np.int64)) % 1024 == 0
    assert covering(np.ones(300, np.int64)) == SIZES[0]


def test_programs_are_the_targets_own_and_have_their_share(tiny: LLM) -> None:
    style = Style(tiny.tokenizer, random.Random(0))
    asked = [
        next(talk) for talk in islice(with_programs(style, conversations(tiny.tokenizer, [], 0), 0.5), 200)
    ]
    opening = [tiny.tokenizer.decode(ask.prompt) for ask in asked]
    share = sum(any(word in text for word in ("Python", "Java", "Rust", "SQL")) for text in opening) / 200
    assert 0.2 < share < 0.6
    long = "def add(a, b):\n    return a + b  # the sum of both"
    assert program_in(f"Here:\n```python\n{long}\n```\nand ```\nx\n``` too") == long
    assert program_in(f"```\n{long}") == long, "cut off by its length"
    assert program_in("no program") is None


@pytest.mark.parametrize("size", ["0.5", "1.5"])
def test_make_trains_heads_of_a_larger_model(size: str, tmp_path: Path) -> None:
    """What make would run is a command that the program takes, up to the model, which is not there."""
    given = [f"MODEL={tmp_path}/none.gguf", f"PROMPTS={tmp_path}/p.txt", "HOURS=0.5", "STOP_AFTER=540"]
    make = [
        "make",
        "-n",
        "--no-print-directory",
        f"heads/qwen2.5-coder-{size}b",
        *given,
        "KINDS=eagle,dflash",
    ]
    told = subprocess.run(make, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    line = shlex.split(told.replace("\\\n", " ").strip().splitlines()[-1])
    assert line[0].endswith("/paceline")
    done = CliRunner().invoke(app, line[1:])
    assert done.exit_code == 2
    assert "none.gguf" in done.stderr
    default = subprocess.run(make[:4], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert f"Qwen/Qwen2.5-Coder-{size}B-Instruct-GGUF:qwen2.5-coder-{size}b-instruct-q4_k_m.gguf" in default
