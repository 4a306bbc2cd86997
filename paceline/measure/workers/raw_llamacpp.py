"""llama.cpp's raw loop: one token after another through llama_decode, as llama-bench times it. Nothing is
sampled and no text is made, so an answer has no words. Runs in the peer's environment.

The functions are those of the library inside the xllamacpp wheel. Invariant: parameter structs are taken as
llama.cpp fills them in; only the first field of the context's, its size, is changed. They are declared larger
than they are, which a callee that gets one as its last argument does not notice, so their layout need not be
known.
"""

from __future__ import annotations

import ctypes
import time
from importlib.util import find_spec
from typing import Any

STRIDE = 7  # between the tokens fed: what they say does not change what a pass takes
CHUNK = 512  # tokens of a prompt in one call


class Struct(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 64)]


RESULTS: dict[str, Any] = {
    "llama_model_default_params": Struct,
    "llama_context_default_params": Struct,
    "llama_model_load_from_file": ctypes.c_void_p,
    "llama_init_from_model": ctypes.c_void_p,
    "llama_get_memory": ctypes.c_void_p,
    "llama_batch_get_one": Struct,
    "llama_decode": ctypes.c_int32,
}


class RawLoop:
    def __init__(self, model: str, context: int, threads: int) -> None:
        spec = find_spec("xllamacpp.xllamacpp")
        self._library = ctypes.CDLL(spec.origin if spec is not None else None)
        for name, kind in RESULTS.items():
            getattr(self._library, name).restype = kind
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
