"""The model's files as the peers read them: GGUF in another quantization, or a Hugging Face folder.

Made once from the model itself and kept in Paceline's cache folder (`bench/`). Invariant: a file has its name
only when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.loaders import hub
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.gguf_header import read_header
from paceline.measure.results import Tell
from paceline.measure.rows import FILE_AS_IS

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def gguf_file(checkpoint: Checkpoint, kind: str, tell: Tell) -> Path:
    """The model as GGUF: the file itself (FILE_AS_IS), or one with its matrices in `kind`."""
    if not checkpoint.path.is_file():
        remedy = "give --model FILE.gguf, or leave the peer out"
        raise ConfigError(f"llama.cpp reads GGUF files only, not folders ({checkpoint.path}); {remedy}")
    if kind in (FILE_AS_IS, main_type(checkpoint.path)):
        return checkpoint.path
    target = _target(checkpoint, f"{kind}.gguf")
    if not target.is_file():
        tell(f"writing {target.name}", 0)
        part = _part_of(target)
        _requantize(checkpoint.path, part, kind)
        os.replace(part, target)
    return target


def main_type(path: Path) -> str:
    """The quantization most of a GGUF file's matrices have."""
    import gguf

    kinds = Counter(tensor.kind for tensor in read_header(path).tensors.values() if len(tensor.shape) > 1)
    return str(gguf.GGMLQuantizationType(kinds.most_common(1)[0][0]).name)


def matrix_bytes(path: Path) -> int:
    """Bytes of a GGUF file that every pass reads: all matrices, without an embedding that is not the head as
    well."""
    import gguf

    tensors = {name: tensor for name, tensor in read_header(path).tensors.items() if len(tensor.shape) > 1}
    if "output.weight" in tensors:
        tensors.pop("token_embd.weight", None)
    total = 0
    for tensor in tensors.values():
        block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
        total += tensor.shape[0] * tensor.shape[1] // block * width
    return total


def _target(checkpoint: Checkpoint, ending: str, folder: Path | None = None) -> Path:
    folder = folder or hub.cache_dir() / "bench"
    return folder / f"{checkpoint.name}-{checkpoint.fingerprint[:12]}-{ending}"


def _part_of(target: Path) -> Path:
    """A name beside the target for what is not yet whole; each process has its own."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f"{target.name}.{os.getpid()}.part")


def _requantize(source: Path, target: Path, kind_name: str) -> None:
    """Same metadata, same tensors, matrices in another type; vectors stay float32, as llama.cpp wants
    them."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    names = [kind_name if len(tensor.shape) > 1 else "F32" for tensor in reader.tensors]
    kinds = [gguf.GGMLQuantizationType[name] for name in names]
    for tensor, kind in zip(reader.tensors, kinds, strict=True):
        shape = [int(size) for size in reversed(tensor.shape)]  # outermost first
        block, width = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            why = f"has rows of {shape[-1]} values, which {kind.name} cannot hold; leave it out"
            raise ConfigError(f"{source}: tensor {tensor.name} {why}")
        num_bytes = int(tensor.n_elements) // block * width
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in zip(reader.tensors, kinds, strict=True):
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.write_tensor_data(gguf.quants.quantize(values, kind))
    writer.close()


def hf_folder(checkpoint: Checkpoint, tell: Tell, folder: Path | None = None) -> Path:
    """The model as a Hugging Face folder in float32: itself where it is one, else written from the GGUF
    file."""
    if checkpoint.path.is_dir():
        return checkpoint.path
    config = _hf_config(checkpoint)
    target = _target(checkpoint, "hf", folder)
    if not target.is_dir():
        tell(f"writing {target.name}", 0)
        part = _part_of(target)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        _write_folder(checkpoint, part, config)
        os.replace(part, target)
    return target


def _hf_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    if config.family not in ARCHITECTURES or config.rope.kind != "none" or config.rope.divisors is not None:
        why = f"cannot be written as a Hugging Face folder ({config.family}, rope {config.rope.kind})"
        remedy = "give --model the model's own folder, or leave transformers and vllm out"
        raise ConfigError(f"{checkpoint.path} {why}; {remedy}")
    return {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tie_embeddings,
        "sliding_window": config.sliding_window,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "bos_token_id": checkpoint.bos_id,
        "eos_token_id": list(checkpoint.eos_ids),
        "torch_dtype": "float32",
    }


def _write_folder(checkpoint: Checkpoint, folder: Path, config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    from paceline.loaders.tokenizer import Tokenizer

    names = checkpoint.config.weight_names()
    weights = {
        ("" if name == "lm_head.weight" else "model.") + name: checkpoint.tensor(name) for name in names
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, text in (
        ("config.json", json.dumps(config, indent=2)),
        ("tokenizer.json", tokenizer.json()),
        ("tokenizer_config.json", json.dumps(settings)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
