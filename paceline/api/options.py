"""EngineOptions: what a user chooses about an engine, the same for LLM, the command line and the server.

Invariant: what can be checked without reading a model is checked on construction. Help texts of the command
line and the server's settings are made from the metadata here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from paceline.core.options import EngineConfig, is_whole, option, require, unboxed

ENGINE, SPECULATION, MEMORY = "Engine", "Speculation", "Memory"  # panels of --help


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    model: str = option("default", ENGINE, "default, a folder or .gguf file, or a Hugging Face name.", "-m")
    # "auto": the training-free drafters and the learned head that ships for the model or lies in the cache,
    # as much as pays at each step; {"method": "auto", "head": False}: without it; "head": "FOLDER": with that
    # one; None or "off": plain decoding;
    # {"method": "suffix" | "ngram" | "draft_model" | ..., options}: that drafter, as much as pays; with
    # "num_speculative_tokens": K: always K tokens.
    speculative_config: dict[str, Any] | str | None = option(
        "auto", SPECULATION, 'auto, off, or JSON such as {"method": "ngram", "prompt_lookup_max": 4}.', "-sc"
    )
    dtype: str = option(
        "auto",
        ENGINE,
        "Of the weights: auto (int8 on CPUs; bfloat16, fp8 or mxfp4, as files have them, on GPUs), int4, ...",
    )
    device: str = option("auto", ENGINE, "Where to run: auto (a GPU if there is one), cpu, cuda or cuda:N.")
    exact: bool = option(False, ENGINE, "On a GPU: plain decoding's own arithmetic; CPUs always have it.")
    tensor_parallel_size: int = option(
        1, ENGINE, "Processes that hold and run a part of the model each; on GPUs always exact.", "-tp", min=1
    )
    pipeline_parallel_size: int = option(
        1, ENGINE, "Stages, each with some of the layers, in processes or machines, on CPUs.", "-pp", min=1
    )
    enable_expert_parallel: bool = option(
        False, ENGINE, "With several such processes: an expert is whole in one of them."
    )
    load_format: str = option(
        "auto", ENGINE, "dummy: random weights of the model's shape, no download (model may be llama-8b)."
    )
    kv_cache_dtype: str = option(
        "auto", MEMORY, "int8, on a GPU: half the memory, rounded; a quantized model on a CPU always has it."
    )
    # Bytes or a fraction are for the target; a draft model takes as many blocks of its own.
    kv_cache_memory: int | float | None = option(None, MEMORY, "Bytes, or a share of the free memory (0.2).")
    max_model_len: int | None = option(None, MEMORY, "Longest prompt and answer together, in tokens.")
    max_num_seqs: int = option(16, MEMORY, "Answers written at the same time; more wait.")
    max_num_batched_tokens: int = option(512, MEMORY, "Tokens in one pass of the model.")
    enable_prefix_caching: bool = option(True, MEMORY, "Keep the K/V of prompts for others that begin alike.")
    # Defaults of sampling: "auto" takes those of the model's generation_config.json, "vllm" none of them, a
    # folder those of its file; the other one is put over them.
    generation_config: str = "auto"
    override_generation_config: Any = None
    seed: int | None = None  # each request that has none draws its own from it, in order
    kernels: str = "exact"  # "torch": the reference decoder that the compiled kernels are tested against
    progress: bool = True  # say on stderr what takes long while the model is read

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, value := unboxed(getattr(self, each.name)))
            if isinstance(each.default, bool):
                require(isinstance(value, bool), each.name, value, "use True or False")
        require(self.seed is None or is_whole(self.seed), "seed", self.seed, "use a whole number, or None")
        remedy = "give a path, 'default' or a Hugging Face name"
        require(isinstance(self.model, str) and bool(self.model), "model", self.model, remedy)
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            size = getattr(self, name)
            require(is_whole(size) and size >= 1, name, size, "use a whole number, 1 or more")
        if self.max_model_len is not None:
            is_usable = is_whole(self.max_model_len) and self.max_model_len >= 2
            require(is_usable, "max_model_len", self.max_model_len, "use a whole number, 2 or more")
        memory = self.kv_cache_memory
        is_usable = memory is None or ((is_whole(memory) or isinstance(memory, float)) and memory > 0)
        remedy = "give bytes as a whole number, or a fraction of the free memory between 0 and 1"
        require(is_usable, "kv_cache_memory", memory, remedy)
        remedy = "a fraction must be below 1; give bytes as a whole number"
        require(not isinstance(memory, float) or memory < 1, "kv_cache_memory", memory, remedy)
        self.engine_config(self.max_model_len or EngineConfig().max_model_len)

    def engine_config(self, max_model_len: int, num_speculative_tokens: int = 0) -> EngineConfig:
        """What the engine itself is given once the context and the longest draft are known."""
        sizes = self.max_num_seqs, self.max_num_batched_tokens, max_model_len, num_speculative_tokens
        return EngineConfig(*sizes, self.enable_prefix_caching)
