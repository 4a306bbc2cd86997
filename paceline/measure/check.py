"""`paceline models --check`: whether and how a model would run here, and what it would need.

Invariant: no weights are fetched (loaders/find.py), and the tables are made from the report.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from paceline.core.errors import ConfigError, PacelineError
from paceline.core.types import BLOCK_SIZE
from paceline.cpu.backend import CpuBackend
from paceline.cpu.decoder import MULTIPLE
from paceline.cpu.value_tiles import LONGEST
from paceline.drafters.registry import FOLDER, SHIPPED, head_folder, is_alike
from paceline.loaders.find import MTP_KEYS, Found, find
from paceline.loaders.packed import expected
from paceline.loaders.tokenizer import Tokenizer
from paceline.measure.results import Table, table_of
from paceline.models.attention import KvFormat, bytes_per_token
from paceline.models.config import ModelConfig
from paceline.models.quantize import BITS
from paceline.runtime.backend import free_memory, resolve, weight_bytes

LEAST = 4 * BLOCK_SIZE  # tokens of a context that is of any use
STATES = 3  # versions of recurrent states that one request needs: before a pass, after it, after a draft
COLUMNS = {"weights": "{weights:,.2f} GB", "K/V a token": "{kv_token:,.1f} kB"}
COLUMNS |= {"whole context": "{kv:,.2f} GB", "free here": "{free:,.2f} GB", "longest context": "{longest:,}"}


def report_of(model: str) -> dict[str, Any]:
    found = find(model)
    config, problems = found.config, list(found.problems)
    needs = [] if config is None else [_need(config, *form) for form in _forms(found)]
    if config is not None and resolve("auto").type == "cpu":
        wide = {"head": config.head_dim, "hidden": config.hidden_size, "MLP": config.intermediate_size}
        said = f"on a CPU it needs kernels='torch': widths must be multiples of {MULTIPLE}"
        problems += [f"the {what} size is {size}; {said}" for what, size in wide.items() if size % MULTIPLE]
    if needs and not any(need["longest"] for need in needs):
        least = min(need["weights"] for need in needs)
        problems.append(f"its smallest form takes {least:,.2f} GB, and this machine has less memory free")
    shapes = config.weight_names().values() if config is not None else ()
    tokenizer, template = _texts(found, problems)
    return {
        "model": found.name,
        "runs": not problems,
        "problems": problems,
        "kind": found.kind,
        "architecture": _architecture(found),
        "quantization": found.quantization,
        "parameters": sum(map(math.prod, shapes)) if shapes else None,
        "bytes": found.num_bytes,
        "context": config.max_context if config is not None else None,
        "memory": needs,
        "drafts": _drafts(found),
        "tokenizer": tokenizer,
        "chat_template": template,
    }


def _architecture(found: Found) -> str | None:
    name = found.values.get("model_type")
    return name if isinstance(name, str) else found.config.family if found.config is not None else None


def _forms(found: Found) -> list[tuple[str, str, KvFormat, torch.device | None]]:
    """-> device, type of the weights, K/V format, and where memory is free; None: there is no such device."""
    cpu, kept = torch.device("cpu"), torch.bfloat16
    gpu = place if (place := resolve("auto")) != cpu else None
    formats = {dtype: CpuBackend().kv_format(dtype, "auto") for dtype in ("int8", "int4", "float32")}
    forms = [("CPU", dtype, its_format, cpu) for dtype, its_format in formats.items()]
    kinds = {"MXFP4": "mxfp4", "mxfp4-pack": "mxfp4", "FP8": "fp8", "float-quantized": "fp8"}  # of folders
    stored = "" if found.kind == "gguf" else found.quantization or ""
    dtype = next((dtype for text, dtype in kinds.items() if text in stored), "bfloat16")
    return [*forms, ("GPU", dtype, KvFormat(kept, kept), gpu)]


def _need(
    config: ModelConfig, device: str, dtype: str, kept: KvFormat, place: torch.device | None
) -> dict[str, Any]:
    """Gigabytes of weights, recurrent states and K/V; `longest`: tokens that then fit, 0 for none."""
    weights = weight_bytes(config, dtype)
    if dtype in ("int8", "int4"):
        kinds = expected(config, BITS[dtype]).values()
        weights = sum(kind.itemsize * math.prod(shape) for kind, shape in kinds)
    each, free, longest = bytes_per_token(config, kept), None, None
    states = STATES * config.recurrent.num_bytes if config.recurrent is not None else 0
    if place is not None:
        # on a GPU what is free is counted beside the weights already
        free = free_memory(place, config, dtype) + (weights if place.type == "cuda" else 0)
        most = min(config.max_context, LONGEST if dtype in ("int8", "int4") else config.max_context)
        room = int((free - weights - states) // each)
        longest = min(most, room) if room >= min(LEAST, most) else 0
    sizes: dict[str, Any] = {
        "weights": weights / 1e9,
        "states": states / 1e9,
        "kv_token": each / 1e3,
        "kv": each * config.max_context / 1e9,
    }
    sizes |= {"free": None if free is None else free / 1e9, "longest": longest}
    return {"device": device, "dtype": dtype, **sizes}


def _drafts(found: Found) -> list[str]:
    """What can draft for it without training anything."""
    drafts = ["suffix and ngram: text looked up, always", "early_exit and quantized: the model itself"]
    for section in (found.values, found.values.section("text_config")):
        layers = [(key, section.get(key)) for key in MTP_KEYS]
        drafts += [f"mtp: {key} = {count}, read from safetensors" for key, count in layers if count]
    if found.checkpoint is None:
        shape = found.config
        alike = [kind for kind in SHIPPED if shape is not None and is_alike(FOLDER / kind, shape)]
        return [*drafts, *(f"{kind}: a head ships, if it was trained on these weights" for kind in alike)]
    for kind in SHIPPED:
        with contextlib.suppress(ConfigError):
            drafts.append(f"{kind}: the head in {head_folder(kind, found.checkpoint)}")
    return drafts


def _texts(found: Found, problems: list[str]) -> tuple[bool | None, bool | None]:
    """Whether there are a tokenizer and a chat template; None: not known before they are fetched."""
    if found.checkpoint is not None:
        source = found.checkpoint.tokenizer_source()
        try:
            Tokenizer(source)
        except PacelineError as error:
            problems.append(str(error))
            return False, source.chat_template is not None
        return True, source.chat_template is not None
    if found.files is None:
        return None, None
    has_tokenizer = "tokenizer.json" in found.files
    if not has_tokenizer and found.kind == "safetensors":
        problems.append("there is no tokenizer.json, and no other tokenizer file is read; convert it")
    return has_tokenizer, True if "chat_template.jinja" in found.files else None


def tables(report: dict[str, Any]) -> list[Table]:
    said = {True: "yes", False: "no", None: "known when fetched"}
    size, parameters = report["bytes"], report["parameters"]
    facts = {
        "runs here": said[report["runs"]],
        "architecture": report["architecture"] or "unknown",
        "weights": report["quantization"] or {"shape": "random"}.get(report["kind"], "plain"),
        "parameters": "unknown" if parameters is None else f"{parameters / 1e9:,.3g} billion",
        "files": "not known" if size is None else f"{size / 1e9:,.2f} GB",
        "context": "unknown" if report["context"] is None else f"{report['context']:,} tokens",
        "tokenizer": said[report["tokenizer"]],
        "chat template": said[report["chat_template"]],
    }
    rows = [*facts.items()]
    for name, lines in (("drafts", report["drafts"]), ("problems", report["problems"])):
        rows += [("" if i else name, line) for i, line in enumerate(lines)]
    needs = table_of("memory, with one request", ("device", "dtype"), COLUMNS, report["memory"])
    return [Table("", (report["model"], ""), (), rows), *([needs] if report["memory"] else [])]
