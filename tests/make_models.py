"""Real tiny models on disk, for every test that needs one: written by transformers and by gguf's own writer,
never by Paceline.

`tiny_hf` writes a Hugging Face folder, `tiny_tokenizer` trains a tokenizer into it, `tiny_gguf` writes the
same weights as GGUF. Widths are multiples of 32 so that block quantizations fit. The first three token ids
are <|endoftext|>, <|im_start|>, <|im_end|>.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3")
GGUF_FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3")
EXPERT_FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "granitemoe", "glm4_moe")
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 384
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRAINING_TEXT = """In a paceline, cyclists ride one behind the other. The rider in front breaks the wind, and the whole line goes faster.
After a while the leader swings off, drifts to the back of the line and rests, and the next rider takes the pull.
def ride(line, distance): return sum(pull(rider) for rider in line) / len(line)  # the same distance for less work
Naïve riders brake; café stops help. 12 riders, 3 bikes, 2026 kilometres: "faster together", she said. 你好 – привет – ¡hola!
"""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 24, "head_dim": 32},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "gemma3": {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "query_pre_attn_scalar": 32,
        "sliding_window_pattern": 3,
    },
    "mixtral": {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 192,
    },
    "qwen3_moe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 32,
        "norm_topk_prob": True,
    },
    "granitemoe": {
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 1.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_hidden_layers": 3,
    },
}


def tiny_hf(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    is_sharded: bool = False,
    dtype: str = "float32",
    **overrides: Any,
) -> Path:
    """Write config.json and safetensors of a random model; `overrides` are keys of its config.json."""
    import torch

    model = _tiny_model(family, overrides)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_random_weight(name, weight, family, generator))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="64KB" if is_sharded else "5GB")
    return folder


def _tiny_model(family: str, overrides: dict[str, Any]) -> Any:
    import transformers as tf

    kinds = {
        "llama": (tf.LlamaConfig, tf.LlamaForCausalLM),
        "llama3": (tf.LlamaConfig, tf.LlamaForCausalLM),
        "mistral": (tf.MistralConfig, tf.MistralForCausalLM),
        "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM),
        "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM),
        "gemma3": (tf.Gemma3TextConfig, tf.Gemma3ForCausalLM),
        "mixtral": (tf.MixtralConfig, tf.MixtralForCausalLM),
        "olmoe": (tf.OlmoeConfig, tf.OlmoeForCausalLM),
        "qwen2_moe": (tf.Qwen2MoeConfig, tf.Qwen2MoeForCausalLM),
        "qwen3_moe": (tf.Qwen3MoeConfig, tf.Qwen3MoeForCausalLM),
        "granitemoe": (tf.GraniteMoeConfig, tf.GraniteMoeForCausalLM),
        "glm4_moe": (tf.Glm4MoeConfig, tf.Glm4MoeForCausalLM),
    }
    config, model = kinds[family]
    return model(config(**{**SIZES, **FAMILY_SIZES[family], **overrides}))


def _random_weight(name: str, weight: Any, family: str, generator: Any) -> Any:
    """Scaled so that activations keep their size and logits spread over a few units: a next token is clear
    but not certain.
    """
    import torch

    noise = torch.randn(weight.shape, generator=generator)
    if name.endswith("norm.weight"):
        return 0.1 * noise + (0 if family == "gemma3" else 1)
    if weight.ndim == 1:
        return 0.1 * noise
    return noise * (2.0 if "embed_tokens" in name or "lm_head" in name else 1.0) / math.sqrt(weight.shape[-1])


def tiny_tokenizer(folder: Path, vocab_size: int = VOCAB) -> Path:
    """Train a byte-level BPE on a few lines and write tokenizer.json and tokenizer_config.json; at most
    `vocab_size` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.splitlines(), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(i): {"content": text, "special": True} for i, text in enumerate(SPECIALS)
        },
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tiny_gguf(path: Path, from_folder: Path, quant: str = "F32") -> Path:
    """The model of a folder as GGUF. Vectors stay F32. Types gguf cannot quantize to (the K-quants) get
    random blocks instead.
    """
    import gguf

    config = json.loads((from_folder / "config.json").read_text())
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    _add_config(writer, config, arch)
    _add_tokenizer(writer, from_folder, config)
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), config["num_hidden_layers"]
    )
    for name, values in stacked(folder_weights(from_folder)).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        kind = gguf.GGMLQuantizationType[quant] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, encode(_as_stored(name, values, config, arch), kind), raw_dtype=kind)
    _add_rope_divisors(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def folder_weights(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder as float32, under its stored name."""
    import torch
    from safetensors.torch import load_file

    weights: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= {name: tensor.to(torch.float32).numpy() for name, tensor in load_file(file).items()}
    return weights


def stacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with each layer's experts in one tensor for gate, up and down, as GGUF's writers name them."""
    made: dict[str, np.ndarray] = {}
    found: dict[str, dict[int, np.ndarray]] = {}
    for name, values in weights.items():
        before, _, after = name.partition(".experts.")
        if after:
            number, _, part = after.partition(".")
            found.setdefault(f"{before}.experts.{part}", {})[int(number)] = values
        elif name.endswith("input_linear.weight"):
            for part, half in zip(("gate", "up"), np.split(values, 2, 1), strict=True):
                made[name.replace("block_sparse_moe.input_linear", f"mlp.experts.{part}_proj")] = half
        elif name.endswith("shared_expert_gate.weight"):
            made[name] = values[0]
        else:
            made[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
    return made | {name: np.stack([parts[i] for i in sorted(parts)]) for name, parts in found.items()}


def encode(values: np.ndarray, kind: Any) -> np.ndarray:
    import gguf

    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        width = gguf.quant_shape_to_byte_shape(values.shape, kind)
        return np.random.default_rng(values.size).integers(0, 256, width, dtype=np.uint8)


def _as_stored(name: str, values: np.ndarray, config: dict[str, Any], arch: str) -> np.ndarray:
    if arch == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if arch not in ("llama", "granitemoe") or part not in heads:
        return values
    halves = values.reshape(heads[part], 2, -1, *values.shape[1:])  # [heads, 2, d/2, in]
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _add_config(writer: Any, config: dict[str, Any], arch: str) -> None:
    rope = config["rope_parameters"]
    writer.add_name(f"tiny {config['model_type']}")
    drafting = config.get(
        "num_nextn_predict_layers", 0
    )  # layers behind the others, whose tensors may be there
    writer.add_block_count(config["num_hidden_layers"] + drafting)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if "num_experts_per_tok" in config:
        _add_experts(writer, config)
    if config.get("sliding_window") and config["model_type"] in ("mistral", "gemma3_text"):
        writer.add_sliding_window(config["sliding_window"])


def _add_experts(writer: Any, config: dict[str, Any]) -> None:
    import gguf

    names = ("num_local_experts", "num_experts", "n_routed_experts")
    writer.add_expert_count(next(config[name] for name in names if name in config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] == "granitemoe":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_attention_scale(config["attention_multiplier"])
    if config["model_type"] == "glm4_moe":
        writer.add_rope_dimension_count(config["head_dim"] // 2)
        writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
        writer.add_tensor(f"blk.{config['num_hidden_layers']}.nextn.enorm.weight", np.ones(64, np.float32))
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if not (folder / "tokenizer.json").exists():
        return
    import gguf

    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    by_id = {index: token for token, index in model["vocab"].items()}
    size = config["vocab_size"]
    types = gguf.TokenType
    kinds = [
        types.UNUSED if i not in by_id else types.CONTROL if by_id[i] in SPECIALS else types.NORMAL
        for i in range(size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    )
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_rope_divisors(writer: Any, config: dict[str, Any]) -> None:
    """llama 3 scaling as GGUF has it: one divisor a frequency."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") != "llama3":
        return
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor, low, high, context = (
        rope[k] for k in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = min(max((context / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
