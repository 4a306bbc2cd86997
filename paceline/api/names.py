"""vLLM's names for an engine's options, beside our own.

One rule: what has a meaning here is obeyed; what only tunes vLLM's own machinery is ignored, and that is said
once; what would change the answers or where they are computed, and is not done here, is refused with the
remedy. A value that asks for nothing (None, False, 0, one device) is never refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from paceline.api.options import EngineOptions
from paceline.core.errors import ConfigError
from paceline.core.options import check_names, require, without

# Sizes and habits of vLLM's scheduler, graphs, processes and logs.
TUNING = (
    "enforce_eager", "swap_space", "cpu_offload_gb", "disable_log_stats", "disable_log_requests",
    "block_size", "max_seq_len_to_capture", "enable_chunked_prefill", "num_gpu_blocks_override",
    "compilation_config", "disable_custom_all_reduce", "disable_async_output_proc", "async_scheduling",
    "max_parallel_loading_workers", "distributed_executor_backend", "scheduling_policy", "max_logprobs",
    "max_num_partial_prefills", "served_model_name", "prefix_caching_hash_algo", "attention_backend",
)  # fmt: skip
PARALLEL = "the model runs on one device here; use 1"
OWN = "the model's own is used; leave it out"
FOLDER = "download that revision and give its folder as model"
REFUSED = {  # with the remedy, and beside None and False the value that asks for nothing
    "data_parallel_size": (PARALLEL, 1),
    "trust_remote_code": ("code of a model is never run; paceline models --check says what is known", False),
    "tokenizer_mode": (OWN, "auto"),
    "tokenizer_revision": (FOLDER, None),
    "skip_tokenizer_init": ("texts and end tokens need it; give prompt_token_ids all the same", False),
    "revision": (FOLDER, None),
    "code_revision": (FOLDER, None),
    "download_dir": ("set the variable HF_HOME, or give a folder as model", None),
    "hf_token": ("set the variable HF_TOKEN", None),
    "hf_overrides": ("edit config.json in a folder of the model", {}),
    "enable_lora": ("there are no adapters; merge it into the weights", False),
    "runner": ("models only write text", ("auto", "generate")),
    "task": ("models only write text", ("auto", "generate")),
    "logits_processors": ("give functions as SamplingParams(logits_processors=[...])", []),
    "limit_mm_per_prompt": ("prompts are text alone", {}),
}
DTYPES = {"half": "float16", "float": "float32"}
READ = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "mxfp4")  # from the files


def to_ours(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an LLM with vLLM's names translated, left out or refused."""
    secret = {"hf_token": "***"} if isinstance(options.get("hf_token"), str) else {}
    left = without(REFUSED, {**options, **secret})
    made = {name: value for name, value in left.items() if name not in TUNING}
    tokenizer, kind = made.pop("tokenizer", None), made.pop("quantization", None)
    require(tokenizer in (None, options.get("model")), "tokenizer", tokenizer, OWN)
    remedy = "a checkpoint's own format is read from its files; dtype='int8' or 'int4' quantizes here"
    require(kind is None or kind in READ, "quantization", kind, remedy)
    ignored = [name for name in TUNING if options.get(name)]
    if (share := made.pop("gpu_memory_utilization", None)) is not None:
        ignored += [] if _take_share(share, made) else ["gpu_memory_utilization"]
    if ignored:
        warnings.warn(f"{', '.join(ignored)}: tunes vLLM alone, and is ignored here", stacklevel=3)
    if "dtype" in made:  # torch's own types have such names, too
        dtype = str(made["dtype"]).removeprefix("torch.")
        made["dtype"] = DTYPES.get(dtype, dtype)
    if made.get("load_format") in ("safetensors", "gguf"):
        made["load_format"] = "auto"
    config = made.get("speculative_config")
    if isinstance(config, Mapping) and config.get("draft_tensor_parallel_size") in (None, 1):
        made["speculative_config"] = {k: v for k, v in config.items() if k != "draft_tensor_parallel_size"}
    others = (*TUNING, *REFUSED, "tokenizer", "quantization", "gpu_memory_utilization")
    check_names(EngineOptions, made, "LLM", others)
    return made


def _take_share(share: Any, options: dict[str, Any]) -> bool:
    """Of a GPU's memory, less the weights: for the KV cache. A CPU's is as large as its requests need, and
    this is False."""
    from paceline.runtime.backend import resolve

    is_usable = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
    require(is_usable, "gpu_memory_utilization", share, "use a number above 0, at most 1")
    if options.get("kv_cache_memory") is not None:
        raise ConfigError("gpu_memory_utilization and kv_cache_memory exclude each other; use one of them")
    is_gpu = resolve(str(options.get("device", "auto"))).type != "cpu"
    if is_gpu:
        options["kv_cache_memory"] = min(float(share), 0.99)
    return is_gpu
