"""On a GPU: two engines write from one GGUF file, a head learns from their text, and drafts change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.api.llm import LLM
from paceline.core.params import SamplingParams
from tests.train.test_from_gguf import gguf, train

__all__ = ["gguf"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_head_is_written_for_trained_and_used_on_a_gpu(gguf: Path, tmp_path: Path) -> None:
    for _ in range(2):  # the second call finds everything done, and measures again
        train(gguf, tmp_path, "--device", "cuda", "--processes", "2", "--resume")
    notes = json.loads((tmp_path / "provenance.json").read_text())
    assert {path.name[:7] for path in (tmp_path / "text").glob("*.npz")} == {"text-00", "text-01"}
    assert notes["device"] == torch.cuda.get_device_name()
    greedy, prompts = SamplingParams(temperature=0, max_tokens=24), ["def add(a, b):", "The wind turns"]
    found = []
    for drafting in (None, {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 3}):
        options: dict[str, Any] = {"device": "cuda", "exact": True, "progress": False}
        with LLM(str(gguf), speculative_config=drafting, **options) as llm:
            results = llm.generate(prompts, greedy)
        found.append([list(result.outputs[0].token_ids) for result in results])
    assert found[0] == found[1]
    assert sum(result.stats.num_drafted for result in results) > 0
