"""vLLM with a head of ours, run in its own environment: `python vllm_worker.py ASKED.json ANSWERS.json`.
Imports nothing of Paceline.

Counts are vLLM's own metrics: drafts, and tokens accepted at each place of a draft.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_"


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GB
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    import vllm

    llm = vllm.LLM(
        asked["model"],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        enable_prefix_caching=False,
        enforce_eager=True,  # nothing is timed here, and compiling takes longer than the answers
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=asked["speculative"],
    )
    params = vllm.SamplingParams(
        temperature=0, max_tokens=asked["num_tokens"], stop_token_ids=asked["stop"], detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], params)
    counts = {
        metric.name.removeprefix(PREFIX): metric
        for metric in llm.get_metrics()
        if metric.name.startswith(PREFIX)
    }
    return {
        "version": vllm.__version__,
        "ids": [list(output.outputs[0].token_ids) for output in outputs],
        "num_drafts": counts["num_drafts"].value,
        "accepted_at": list(counts["num_accepted_tokens_per_pos"].values),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(answer(json.loads(Path(sys.argv[1]).read_text()))))
