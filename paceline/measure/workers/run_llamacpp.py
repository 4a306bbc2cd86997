"""llama.cpp as a worker, through the xllamacpp wheel. Runs in the peer's environment: no import of Paceline.

Answers carry text instead of token ids: the streaming interface names no ids. The end token is never chosen
(its logit is minus infinity), which is llama.cpp's way of ignoring it. Steps follow from the counts: every
step yields one token of the model's own.
"""

from __future__ import annotations

import time
from typing import Any

import xllamacpp

# The best of six settings tried on three of the shipped prompts (the other engines were not tuned). Its
# defaults, a match of 12 and 48 drafted, were slower on all three.
MATCH, DRAFTED = 3, 3
GREEDY = {"temperature": 0, "ignore_eos": True, "stream": True}


def load(options: dict[str, Any]) -> dict[str, Any]:
    if options["is_raw"]:
        from raw_llamacpp import RawLoop  # type: ignore[import-not-found]  # beside this file, where it runs

        loop = RawLoop(options["model"], options["context"], options["threads"])
        return {"answer": loop.answer, "note": note()}
    server = xllamacpp.Server(parameters(options))
    return {
        "answer": lambda prompt: answer(server, prompt),
        "read_prompt": lambda ids, num_cached: {"seconds": reading_seconds(server, ids, num_cached)},
        "address": lambda: {"url": server.listening_address},
        "note": note(),
    }


def note() -> str | None:
    """Wheels are built for the oldest processors; figures of one that leaves the integer dot products idle
    must say so."""
    try:
        with open("/proc/cpuinfo") as file:
            has_dot_products = " asimddp" in file.read()
    except OSError:
        has_dot_products = False
    if has_dot_products and "DOTPROD" not in xllamacpp.get_system_info():
        return "this build does not use the processor's dot products; `make peers` builds one that does"
    return None


def parameters(options: dict[str, Any]) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.n_parallel = options["in_flight"]
    params.n_ctx = options["context"] * options["in_flight"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    params.cache_prompt, params.cache_ram_mib = False, 0  # every repeat reads its prompt anew
    params.ui = False
    if options["method"] == "ngram":
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n = MATCH
        params.speculative.ngram_simple.size_m = DRAFTED
    return params


def reading_seconds(server: Any, ids: list[int], num_cached: int) -> float:
    """One pass over ids[num_cached:], by llama.cpp's own clock, the rest being in its cache. It computes the
    last token's logits only."""
    last: dict[str, Any] = {}
    wanted = {**GREEDY, "n_predict": 1, "cache_prompt": num_cached > 0}
    for tokens in (ids[:num_cached], ids):
        if tokens:
            server.handle_completions({"prompt": tokens, **wanted}, last.update)
    if "timings" not in last or last["timings"]["prompt_n"] != len(ids) - num_cached:
        raise RuntimeError(f"llama.cpp was to read {len(ids) - num_cached} tokens and says {last}")
    return float(last["timings"]["prompt_ms"]) / 1000


def answer(server: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """One request. Times are in seconds from its start."""
    times: list[float] = []
    pieces: list[str] = []
    last: dict[str, Any] = {}
    started = time.perf_counter()

    def hear(chunk: dict[str, Any]) -> None:
        times.append(time.perf_counter() - started)
        if "choices" not in chunk:
            raise RuntimeError(f"llama.cpp says {chunk}")
        pieces.append(chunk["choices"][0]["text"])
        last.update(chunk)

    wanted = {**GREEDY, "n_predict": prompt["num_tokens"], "cache_prompt": False}
    server.handle_completions({"prompt": prompt["ids"], **wanted}, hear)
    timings, num_tokens = last["timings"], last["usage"]["completion_tokens"]
    accepted, drafted = timings.get("draft_n_accepted", 0), timings.get("draft_n", 0)
    counts = {"num_steps": num_tokens - accepted, "num_drafted": drafted, "num_accepted": accepted}
    said = {"text": "".join(pieces), "num_tokens": num_tokens}
    return {**said, "first_s": times[0], "total_s": times[-1], **counts}
