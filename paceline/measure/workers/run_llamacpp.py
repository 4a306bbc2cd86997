"""llama.cpp as a worker, through the xllamacpp wheel: its server's loop, and its raw loop. Runs in the peer's
environment: no import of Paceline. The server's answers carry text instead of token ids, which the streaming
interface does not name; the raw loop's have no words. The end token is never chosen (its logit is minus
infinity), which is llama.cpp's way of ignoring it.
"""

from __future__ import annotations

import ctypes
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xllamacpp

# The best of six settings tried on three of the shipped prompts (the other engines were not tuned). Its
# defaults, a match of 12 and 48 drafted, were slower on all three.
MATCH, DRAFTED = 3, 3
GREEDY = {"temperature": 0, "ignore_eos": True, "stream": True}
STRIDE = 7  # between the tokens the raw loop is fed: what they say does not change what a pass takes
CHUNK = 512  # tokens of a prompt in one call of the raw loop
# its functions that return structs, and pointers
STRUCTS = ("llama_model_default_params", "llama_context_default_params", "llama_batch_get_one")
POINTERS = ("llama_model_load_from_file", "llama_init_from_model", "llama_get_memory")


def load(options: dict[str, Any]) -> dict[str, Any]:
    if options["is_raw"]:
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
    """Wheels are built for the oldest processors; one that leaves the dot products idle must say so."""
    about = Path("/proc/cpuinfo")
    has_dot_products = about.exists() and " asimddp" in about.read_text()
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
    """One pass over ids[num_cached:], by llama.cpp's own clock, the rest being in its cache."""
    last: dict[str, Any] = {}
    wanted = {**GREEDY, "n_predict": 1, "cache_prompt": num_cached > 0}
    for tokens in (ids[:num_cached], ids):
        if tokens:
            server.handle_completions({"prompt": tokens, **wanted}, last.update)
    if "timings" not in last or last["timings"]["prompt_n"] != len(ids) - num_cached:
        raise RuntimeError(f"llama.cpp was to read {len(ids) - num_cached} tokens and says {last}")
    return float(last["timings"]["prompt_ms"]) / 1000


def answer(server: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """One request. Times are in seconds from its start. Every step yields one token of the model's own."""
    times, pieces, last, started = list[float](), list[str](), dict[str, Any](), time.perf_counter()

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


class Struct(ctypes.Structure):
    """Larger than any is, so that its layout need not be known: a callee's last argument may be longer."""

    _fields_ = [("words", ctypes.c_uint64 * 64)]


class RawLoop:
    """One token after another through llama_decode, as llama-bench times it: nothing is sampled and no text
    is made. The functions are those of the library inside the wheel. Parameter structs are taken as llama.cpp
    fills them in; only the first field of the context's, its size, is changed."""

    def __init__(self, model: str, context: int, threads: int) -> None:
        spec = find_spec("xllamacpp.xllamacpp")
        self._library = ctypes.CDLL(spec.origin if spec is not None else None)
        for name in (*STRUCTS, *POINTERS):  # what the others return is an int, as ctypes takes it to be
            getattr(self._library, name).restype = Struct if name in STRUCTS else ctypes.c_void_p
        self._library.llama_backend_init()
        params = self._library.llama_model_default_params()
        self._model = ctypes.c_void_p(self._library.llama_model_load_from_file(model.encode(), params))
        params = self._library.llama_context_default_params()
        ctypes.c_uint32.from_buffer(params).value = context
        self._context = ctypes.c_void_p(self._library.llama_init_from_model(self._model, params))
        if not self._model or not self._context:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._library.llama_set_n_threads(self._context, threads, threads)

    def answer(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """One request. Times are in seconds from its start."""
        memory = ctypes.c_void_p(self._library.llama_get_memory(self._context))
        self._library.llama_memory_clear(memory, True)
        ids, count = prompt["ids"], prompt["num_tokens"]
        started = time.perf_counter()
        for at in range(0, len(ids), CHUNK):
            self._decode(ids[at : at + CHUNK])
        first = time.perf_counter() - started
        for i in range(count - 1):
            self._decode([ids[STRIDE * i % len(ids)]])
        total = time.perf_counter() - started
        counts = {"num_steps": count, "num_drafted": 0, "num_accepted": 0}
        return {"num_tokens": count, "first_s": first, "total_s": total, **counts}

    def _decode(self, tokens: list[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = self._library.llama_batch_get_one(array, len(tokens))
        if self._library.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self._library.llama_synchronize(self._context)
