"""The model's files as the peers read them, GGUF in another quantization or a Hugging Face folder: made once
and kept in Paceline's cache folder (`bench/`). Invariant: a file has its name only when it is whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.drafters.registry import head_folder
from paceline.loaders import hub
from paceline.loaders.checkpoint import Checkpoint
from paceline.loaders.gguf_parts import main_type, read_parts
from paceline.loaders.heads import export_head, open_head
from paceline.measure.results import Tell
from paceline.measure.rows import FILE_AS_IS

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SAME_NAMES = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "sliding_window")
NAMES = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "rms_eps": "rms_norm_eps"}
NAMES |= {"num_kv_heads": "num_key_value_heads", "max_context": "max_position_embeddings"}
NAMES |= {"tie_embeddings": "tie_word_embeddings", **{name: name for name in SAME_NAMES}}  # ours -> theirs


def gguf_file(checkpoint: Checkpoint, kind: str, tell: Tell) -> Path:
    """The model as GGUF: the file itself (FILE_AS_IS), or one with its matrices in `kind`."""
    if not checkpoint.path.is_file():
        remedy = "give --model FILE.gguf, or leave the peer out"
        raise ConfigError(f"llama.cpp reads GGUF files only, not folders ({checkpoint.path}); {remedy}")
    if kind in (FILE_AS_IS, main_type(checkpoint.path)):
        return checkpoint.path
    return _made(checkpoint, f"{kind}.gguf", tell, lambda part: _requantize(checkpoint.path, part, kind))


def matrix_bytes(path: Path) -> int:
    """Bytes of a GGUF file that every pass reads: all matrices but an embedding that is not the head too."""
    import gguf

    found = read_parts(path).header.tensors
    tensors = {name: tensor for name, tensor in found.items() if len(tensor.shape) > 1}
    if "output.weight" in tensors:
        tensors.pop("token_embd.weight", None)
    kinds = {name: gguf.GGMLQuantizationType(tensor.kind) for name, tensor in tensors.items()}
    shapes = [gguf.quant_shape_to_byte_shape(tensors[name].shape, kind) for name, kind in kinds.items()]
    return sum(map(math.prod, shapes))


def _made(checkpoint: Checkpoint, ending: str, tell: Tell, write: Callable[[Path], None]) -> Path:
    """What was written from the model, now or before; until it is whole, each process has its own path."""
    folder = hub.cache_dir() / "bench"
    target = folder / f"{checkpoint.name}-{checkpoint.fingerprint[:12]}-{ending}"
    if not target.exists():
        tell(f"writing {target.name}", 0)
        folder.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        write(part)
        os.replace(part, target)
    return target


def _requantize(source: Path, target: Path, kind_name: str) -> None:
    """The same with matrices in another type; vectors stay float32, as llama.cpp wants them."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture, use_temp_file=True)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        kind = gguf.GGMLQuantizationType[kind_name if len(tensor.shape) > 1 else "F32"]
        width = int(tensor.shape[0])
        if width % gguf.GGML_QUANT_SIZES[kind][0]:
            why = f"has rows of {width} values, which {kind.name} cannot hold; leave it out"
            raise ConfigError(f"{source}: tensor {tensor.name} {why}")
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hf_folder(checkpoint: Checkpoint, tell: Tell) -> Path:
    """The model as a Hugging Face folder in float32: itself where it is one, else written from GGUF."""
    if checkpoint.path.is_dir():
        return checkpoint.path
    return _made(checkpoint, "hf", tell, lambda part: write_folder(checkpoint, part))


def vllm_head(checkpoint: Checkpoint, kind: str, tell: Tell) -> Path:
    """The shipped head of this kind as vLLM reads it; an error where none is shipped for the model."""
    head = open_head(head_folder(kind, checkpoint), checkpoint, (kind,))
    write = partial(export_head, head, checkpoint, "vllm", verifier=checkpoint.name)
    return _made(checkpoint, f"vllm-{kind}", tell, write)


def _hf_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    if config.family not in FAMILIES or config.rope.kind != "none" or config.rope.divisors is not None:
        why = f"cannot be written as a Hugging Face folder ({config.family}, rope {config.rope.kind})"
        remedy = "give --model the model's own folder, or leave transformers and vllm out"
        raise ConfigError(f"{checkpoint.path} {why}; {remedy}")
    return {
        "architectures": [f"{config.family.capitalize()}ForCausalLM"],
        "model_type": config.family,
        **{theirs: getattr(config, ours) for ours, theirs in NAMES.items()},
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "use_sliding_window": False,
        "hidden_act": "silu",
        "bos_token_id": checkpoint.bos_id,
        "eos_token_id": list(checkpoint.eos_ids),
        "torch_dtype": "float32",
    }


def write_folder(checkpoint: Checkpoint, folder: Path) -> None:
    from safetensors.torch import save_file

    from paceline.loaders.tokenizer import Tokenizer

    texts = {"config": json.dumps(_hf_config(checkpoint), indent=2)}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    names = checkpoint.config.weight_names()
    prefixed = {name: name if name == "lm_head.weight" else f"model.{name}" for name in names}
    weights = {there: checkpoint.tensor(name) for name, there in prefixed.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    texts["tokenizer"] = Tokenizer(checkpoint.tokenizer_source()).json()
    texts["tokenizer_config"] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
