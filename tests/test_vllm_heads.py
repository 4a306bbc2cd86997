"""The real thing: vLLM loads what `paceline export` writes of the shipped heads, and accepts as many of their
tokens as Paceline does.

Both run the same float32 weights (a folder written from the default model's file), the same prompts,
greedily.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import paceline
from paceline import LLM
from paceline.cli.main import app
from paceline.core.params import SamplingParams
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.tokenizer import Tokenizer
from paceline.measure import prompts
from paceline.measure.models import write_folder
from paceline.measure.rows import FOLDERS

VLLM = Path(os.environ.get("PACELINE_PEERS") or Path(__file__).parent.parent / ".peers") / FOLDERS["vllm"]
HEADS = Path(paceline.__file__).parent / "data" / "heads"
WORKER = Path(__file__).parent / "vllm_worker.py"
NUM_TOKENS, MINUTES = 128, 8
TOLERANCE, RARE = (
    0.10,
    0.01,
)  # of what Paceline accepts; and of all drafts, since the last places of Medusa are right a few times in all


class Counts(NamedTuple):
    ids: list[list[int]]
    num_drafts: int
    accepted_at: list[int]

    @property
    def shares(self) -> list[float]:
        """Of all drafts, those accepted down to each place: as vLLM reports it."""
        return [count / self.num_drafts for count in self.accepted_at]

    @property
    def tau(self) -> float:
        return 1 + sum(self.shares)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("target")
    write_folder(open_checkpoint("default"), folder)
    yield str(folder)
    shutil.rmtree(folder)  # half a gigabyte


@functools.cache
def asked() -> tuple[list[list[int]], list[int]]:
    """Twelve of the shipped prompts, two of each category, as token ids; and the tokens that end an
    answer.
    """
    checkpoint = open_checkpoint("default")
    tokenizer = Tokenizer(checkpoint.tokenizer_source())
    chosen = prompts.chosen(None, 2)
    return [tokenizer.encode_chat([{"role": "user", "content": p.text}]) for p in chosen], list(
        checkpoint.eos_ids
    )


@functools.cache
def ours(target: str, kind: str, num_drafted: int) -> Counts:
    ids, stop = asked()
    config = {"method": kind, "model": str(HEADS / kind), "num_speculative_tokens": num_drafted}
    with LLM(
        target, dtype="float32", device="cpu", speculative_config=config, max_num_seqs=4, progress=False
    ) as llm:
        results = llm.generate(ids, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, stop_token_ids=stop))
    accepted = [sum(r.stats.accepted_at[depth] for r in results) for depth in range(num_drafted)]
    return Counts([r.token_ids for r in results], sum(r.stats.drafted_at[0] for r in results), accepted)


def theirs(target: str, speculative: dict[str, Any], folder: Path) -> Counts:
    ids, stop = asked()
    options = {
        "model": target,
        "speculative": speculative,
        "prompts": ids,
        "stop": stop,
        "num_tokens": NUM_TOKENS,
    }
    (folder / "asked.json").write_text(json.dumps(options))
    command = [
        str(VLLM / "bin" / "python"),
        str(WORKER),
        str(folder / "asked.json"),
        str(folder / "answers.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MINUTES * 60, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((folder / "answers.json").read_text())
    return Counts(found["ids"], found["num_drafts"], found["accepted_at"])


@pytest.mark.skipif(not (VLLM / ".installed").exists(), reason="not installed; `make peers/vllm` does it")
@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize(
    ("kind", "form", "method", "num_drafted"),
    [("eagle", "vllm", "eagle3", 3), ("eagle", "speculators", "eagle3", 3), ("eagle", "eagle", "eagle3", 3)],
)
def test_vllm_accepts_what_we_accept(
    kind: str, form: str, method: str, num_drafted: int, target: str, tmp_path: Path
) -> None:
    exported = CliRunner().invoke(
        app, ["export", str(HEADS / kind), "--format", form, "-o", str(tmp_path / "head")]
    )
    assert exported.exit_code == 0, exported.output
    there = theirs(
        target,
        {"method": method, "model": str(tmp_path / "head"), "num_speculative_tokens": num_drafted},
        tmp_path,
    )
    here = ours(target, kind, num_drafted)
    print(
        f"\n{kind} as {form}: tau {here.tau:.3f}, vLLM {there.tau:.3f}; "
        f"by place {here.shares}, vLLM {there.shares}"
    )
    assert here.tau > 1.2, "too little is accepted to compare anything"
    assert there.tau == pytest.approx(here.tau, rel=TOLERANCE)
    assert there.shares == pytest.approx(here.shares, rel=TOLERANCE, abs=RARE)
