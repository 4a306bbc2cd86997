"""vLLM as a worker: for `paceline bench` its engine is in this process and stepped by hand, so that first
tokens can be timed; for `bench batch --cold` ("more" options) it is as its users have it. Runs in the peer's
environment: no import of Paceline. Counts of drafts are differences of its own metrics around each call.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

MATCH, LONGEST, DRAFTED = 2, 4, 3  # shortest and longest match of its prompt lookup, and tokens drafted
KV_GIGABYTES = 1
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}
COUNTED = {  # its counters
    "vllm:spec_decode_num_draft_tokens": "num_drafted",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted",
}


def load(options: dict[str, Any]) -> dict[str, Callable[..., dict[str, Any]]]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int("more" in options))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_GIGABYTES)
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"  # it would keep a core for its server
    from vllm import LLM, SamplingParams

    usual = {"dtype": "float32", "max_model_len": options.get("context"), "disable_log_stats": False}
    more: dict[str, Any] = options.get("more", usual)
    if options["method"] == "ngram":
        lookup = {"method": "ngram", "prompt_lookup_max": LONGEST, "prompt_lookup_min": MATCH}
        more["speculative_config"] = {**lookup, "num_speculative_tokens": DRAFTED}
    llm = LLM(
        options["model"],
        max_num_seqs=options["in_flight"],
        enable_prefix_caching=False,  # every repeat reads its prompt anew
        skip_tokenizer_init=True,
        **more,
    )
    names = map(str, itertools.count())

    def generate(prompts: list[dict[str, Any]], in_flight: int) -> dict[str, Any]:
        before, started = _metrics(llm), time.perf_counter()
        answers = _run(llm.llm_engine, prompts, in_flight, names)
        wall, after = time.perf_counter() - started, _metrics(llm)
        # Counted for all requests together: the first answer carries them, so that sums are right.
        for i, answer in enumerate(answers):
            counts = {name: (after[name] - before[name]) * (i == 0) for name in COUNTED.values()}
            answer |= {**counts, "num_steps": answer["num_tokens"] - counts["num_accepted"]}
        return {"wall_s": wall, "answers": answers}

    def wave(prompts: list[dict[str, Any]]) -> dict[str, Any]:
        """Requests as a user gives them, all at once: seconds until the last has ended."""
        params, started = SamplingParams(max_tokens=prompts[0]["num_tokens"], **GREEDY), time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": p["ids"]} for p in prompts], params, use_tqdm=False)
        wall, ids = time.perf_counter() - started, [list(each.outputs[0].token_ids) for each in outputs]
        return {"wall_s": wall, "ids": ids}

    return {"generate": generate, "wave": wave}


def _run(engine: Any, prompts: list[dict[str, Any]], in_flight: int, names: Any) -> list[dict[str, Any]]:
    """All prompts, `in_flight` of them at any time. Times are in seconds from each request's start."""
    from vllm import SamplingParams

    answers: list[dict[str, Any]] = [{} for _ in prompts]
    waiting = list(zip(prompts, answers, strict=True))
    running: dict[str, tuple[float, dict[str, Any]]] = {}  # by name: when it started, and its answer
    while waiting or running:
        while waiting and len(running) < in_flight:
            (prompt, answer), name = waiting.pop(0), next(names)
            params = SamplingParams(max_tokens=prompt["num_tokens"], **GREEDY)
            running[name] = time.perf_counter(), answer
            engine.add_request(name, {"prompt_token_ids": prompt["ids"]}, params)
        for output in engine.step():
            started, answer = running[output.request_id]
            elapsed = time.perf_counter() - started
            answer.setdefault("first_s", elapsed)
            if output.finished:
                ids = list(output.outputs[0].token_ids)
                answer |= {"ids": ids, "num_tokens": len(ids), "total_s": elapsed}
                del running[output.request_id]
    return answers


def _metrics(llm: Any) -> Counter[str]:
    found = Counter[str]()
    for metric in llm.get_metrics():
        if metric.name in COUNTED:
            found[COUNTED[metric.name]] += int(metric.value)
    return found
