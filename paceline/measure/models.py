"""The model's files as the peers read them: GGUF in another quantization, or a Hugging Face folder.

Made once from the model itself and kept in Paceline's cache folder (`bench/`). Invariant: a file has its name
only when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.gguf_header import read_header

if TYPE_CHECKING:
    import numpy as np

Say = Callable[[str], None]  # tells the user what is being made
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def gguf_file(checkpoint: Checkpoint, kind: str | None, folder: Path, say: Say) -> Path:
    """The model as GGUF: the file itself (`kind` None), or one with its matrices in `kind`."""
    if not checkpoint.path.is_file():
        raise ConfigError(
            f"llama.cpp reads GGUF files only and {checkpoint.path} is a folder; give --model FILE.gguf, or leave the peer out"
        )
    if kind is None or kind == main_type(checkpoint.path):
        return checkpoint.path
    target = folder / f"{checkpoint.name}-{checkpoint.fingerprint[:12]}-{kind}.gguf"
    if not target.is_file():
        say(f"writing {target.name}")
        part = _part_of(target)
        _requantize(checkpoint.path, part, kind)
        os.replace(part, target)
    return target


def main_type(path: Path) -> str:
    """The quantization most of a GGUF file's matrices have."""
    import gguf

    kinds = Counter(tensor.kind for tensor in read_header(path).tensors.values() if len(tensor.shape) > 1)
    return str(gguf.GGMLQuantizationType(kinds.most_common(1)[0][0]).name)


def _part_of(target: Path) -> Path:
    """A name beside the target for what is not yet whole; each process has its own."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(f"{target.name}.{os.getpid()}.part")


def _requantize(source: Path, target: Path, kind_name: str) -> None:
    """Same metadata, same tensors, matrices in another type; vectors stay float32, as llama.cpp wants
    them.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(
                field.name,
                field.contents(),
                field.types[0],
                field.types[-1] if len(field.types) > 1 else None,
            )
    kinds = [
        gguf.GGMLQuantizationType[kind_name if len(tensor.shape) > 1 else "F32"] for tensor in reader.tensors
    ]
    for tensor, kind in zip(reader.tensors, kinds, strict=True):
        shape = [int(size) for size in reversed(tensor.shape)]  # outermost first
        block, width = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ConfigError(
                f"{source}: tensor {tensor.name} has rows of {shape[-1]} values, which {kind.name} cannot hold; leave it out"
            )
        num_bytes = int(tensor.n_elements) // block * width
        writer.add_tensor_info(tensor.name, shape, _float32(), num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in zip(reader.tensors, kinds, strict=True):
        writer.write_tensor_data(
            gguf.quants.quantize(gguf.quants.dequantize(tensor.data, tensor.tensor_type), kind)
        )
    writer.close()


def _float32() -> np.dtype[Any]:
    import numpy as np

    return np.dtype(np.float32)


def hf_folder(checkpoint: Checkpoint, folder: Path, say: Say) -> Path:
    """The model as a Hugging Face folder in float32: itself where it is one, else written from the GGUF
    file.
    """
    if checkpoint.path.is_dir():
        return checkpoint.path
    config = _hf_config(checkpoint)
    target = folder / f"{checkpoint.name}-{checkpoint.fingerprint[:12]}-hf"
    if not target.is_dir():
        say(f"writing {target.name}")
        part = _part_of(target)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        _write_folder(checkpoint, part, config)
        os.replace(part, target)
    return target


def _hf_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    if config.family not in ARCHITECTURES or config.rope.kind != "none" or config.rope.divisors is not None:
        raise ConfigError(
            f"{checkpoint.path} cannot be written as a Hugging Face folder ({config.family}, rope scaling {config.rope.kind}); "
            "give --model the model's own folder, or leave transformers and vllm out"
        )
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

    prefix = {"lm_head.weight": ""}
    weights = {
        prefix.get(name, "model.") + name: checkpoint.tensor(name)
        for name in checkpoint.config.weight_names()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "tokenizer.json").write_text(
        Tokenizer.from_source(checkpoint.tokenizer_source()).json(), encoding="utf-8"
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
