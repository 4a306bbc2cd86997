"""Golden token streams of other architectures: tiny random models whose weights follow from a seed.

`python -m tests.golden.families PATH` writes the streams of the tree it runs in, by plain decoding alone.
"""

from __future__ import annotations

import json
import platform
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline import LLM, SamplingParams
from tests import test_mtp
from tests.make_models import tiny_hf, tiny_tokenizer
from tests.test_decoder import TOKENS

PATH = Path(__file__).parent / "families.json"
FAMILIES = ("qwen3_moe", "gpt_oss", "qwen3_5")  # the last has a module for multi-token prediction
DTYPES = ("int8", "int4", "float32")
PROMPTS = [TOKENS[:10] * 3, TOKENS[20:57], TOKENS[5:8]]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=32, ignore_eos=True),
}
PLACE = TemporaryDirectory()


@cache
def folder(family: str) -> Path:
    if family in test_mtp.FILES:
        return test_mtp.folder(family)
    return tiny_tokenizer(tiny_hf(Path(PLACE.name) / family, family))


def streams_of(family: str, dtype: str, drafter: Any) -> dict[str, list[list[int]]]:
    with LLM(str(folder(family)), dtype=dtype, speculative_config=drafter, progress=False) as llm:
        return {
            way: [result.token_ids for result in llm.generate(PROMPTS, params)]
            for way, params in PARAMS.items()
        }


if __name__ == "__main__":
    found: dict[str, Any] = {"machine": platform.machine()}
    for family in FAMILIES:
        found[family] = {dtype: streams_of(family, dtype, None) for dtype in DTYPES}
    Path(sys.argv[1]).write_text(json.dumps(found).replace("]], ", "]],\n") + "\n", encoding="utf-8")
