"""A stand-in for the environment that `make peers` makes for llama.cpp: the calls that the benchmark's worker
makes of the xllamacpp wheel and of the library inside it, answered at once. It writes "a" for every token.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

WHEEL = """
from types import SimpleNamespace

common_speculative_type = SimpleNamespace(COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE=1)

class CommonParams:
    def __init__(self):
        self.model, self.cpuparams, self.cpuparams_batch = (SimpleNamespace() for _ in range(3))
        self.speculative = SimpleNamespace(ngram_simple=SimpleNamespace())

def get_system_info():
    return "DOTPROD = 1"

class Server:
    listening_address = "http://127.0.0.1:9"

    def __init__(self, params):
        assert params.n_ctx >= 256

    def handle_completions(self, body, hear):
        print("what a library prints is no answer")
        count = body["n_predict"]
        for _ in range(count - 1):
            hear({"choices": [{"text": "a"}]})
        timings = {"prompt_n": len(body["prompt"]), "prompt_ms": 1.0}
        hear({"choices": [{"text": "a"}], "timings": timings, "usage": {"completion_tokens": count}})
"""
LIBRARY = """
#include <stdint.h>
typedef struct { uint64_t words[9]; } model_params;
typedef struct { uint32_t context; uint64_t words[17]; } context_params;
typedef struct { int32_t count; void *fields[6]; } batch;
static uint32_t room;
static char something;
void llama_backend_init(void) {}
model_params llama_model_default_params(void) { model_params p = {{0}}; return p; }
context_params llama_context_default_params(void) { context_params p = {0}; return p; }
void *llama_model_load_from_file(const char *path, model_params p) { return &something; }
void *llama_init_from_model(void *model, context_params p) { room = p.context; return &something; }
void llama_set_n_threads(void *context, int32_t threads, int32_t batch_threads) {}
void *llama_get_memory(void *context) { return &something; }
void llama_memory_clear(void *memory, _Bool data) {}
batch llama_batch_get_one(int32_t *tokens, int32_t count) { batch b = {count, {tokens}}; return b; }
int32_t llama_decode(void *context, batch b) { return b.count >= 1 && room >= 256 ? 0 : 1; }
void llama_synchronize(void *context) {}
"""


def install(peers: Path) -> None:
    """Into a folder for PACELINE_PEERS."""
    wheel, programs = peers / "wheel" / "xllamacpp", peers / "llamacpp" / "bin"
    for folder in (wheel, programs):
        folder.mkdir(parents=True)
    (wheel / "__init__.py").write_text(WHEEL)
    (wheel / "library.c").write_text(LIBRARY)
    library = wheel / f"xllamacpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, wheel / "library.c"], check=True)
    python = programs / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={wheel.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (peers / "llamacpp" / ".installed").touch()
