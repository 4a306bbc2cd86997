"""Every drafter, alone and in a batch, says the golden streams: token for token, whatever was rebuilt since."""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest
import torch

from paceline import LLM
from tests.golden import families
from tests.golden.streams import CPU, CUDA, PARAMS, PATH, streams_of

GOLDEN: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
DRAFTERS: dict[str, Any] = {
    "plain": None,
    "auto": "auto",
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 6},
    "recycle": {"method": "recycle", "num_speculative_tokens": 4},
    "lookahead": {"method": "lookahead"},
    "early_exit": {"method": "early_exit", "num_speculative_tokens": 3},
    "quantized": {"method": "quantized", "num_speculative_tokens": 3},
    "staged": {"method": "staged", "num_speculative_tokens": 4},
    "hybrid": {"method": ["suffix", "eagle"], "num_speculative_tokens": 5},
    "eagle": {"method": "eagle", "num_speculative_tokens": 5},
    "eagle tree": {"method": "eagle", "num_speculative_tokens": 8, "tree_width": 3},
    "medusa": {"method": "medusa", "num_speculative_tokens": 4},
    "dflash": {"method": "dflash", "num_speculative_tokens": 5},
}
QUICK = {("int8", "auto")}
on_this_machine = pytest.mark.skipif(
    platform.machine() != GOLDEN["machine"],
    reason=f"the streams were written on {GOLDEN['machine']}; write them anew here",
)


def cases() -> list[Any]:
    found = []
    for dtype in CPU:
        for drafter in DRAFTERS if dtype != "torch" else ("plain", "ngram", "eagle"):
            marks = () if (dtype, drafter) in QUICK else pytest.mark.slow
            found.append(pytest.param(dtype, drafter, id=f"{dtype}-{drafter}", marks=marks))
    return found


@on_this_machine
@pytest.mark.parametrize(("dtype", "drafter"), cases())
def test_streams_are_golden(dtype: str, drafter: str) -> None:
    with LLM(speculative_config=DRAFTERS[drafter], progress=False, **CPU[dtype]) as llm:
        for way in PARAMS:
            assert streams_of(llm, way, is_batched=True) == GOLDEN[dtype][way], f"{way}, in a batch"
        if drafter != "plain":
            assert streams_of(llm, "greedy", is_batched=False) == GOLDEN[dtype]["greedy"], "greedy, alone"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", CUDA)
@pytest.mark.parametrize("drafter", ["plain", "auto", "suffix", "eagle", "medusa", "dflash", "ngram"])
def test_streams_are_golden_on_a_gpu(dtype: str, drafter: str) -> None:
    path = PATH.with_name("streams_cuda.json")
    golden = json.loads(path.read_text(encoding="utf-8"))
    with LLM(speculative_config=DRAFTERS[drafter], progress=False, **CUDA[dtype]) as llm:
        for way in PARAMS:
            assert streams_of(llm, way, is_batched=True) == golden[dtype][way], f"{way}, in a batch"
        assert streams_of(llm, "greedy", is_batched=False) == golden[dtype]["greedy"], "greedy, alone"


OTHERS: dict[str, Any] = json.loads(families.PATH.read_text(encoding="utf-8"))


@on_this_machine
@pytest.mark.parametrize("drafter", ["plain", "ngram", "suffix", "mtp"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_other_architectures_are_golden(family: str, drafter: str) -> None:
    if drafter == "mtp" and family != "qwen3_5":
        pytest.skip("its files hold no such module")
    options = {"method": "mtp", "num_speculative_tokens": 3} if drafter == "mtp" else DRAFTERS[drafter]
    for dtype in families.DTYPES:
        assert families.streams_of(family, dtype, options) == OTHERS[family][dtype], dtype
