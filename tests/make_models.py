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
# What they add to llama: layers without rotary; part of a head that turns, fused tensors, LongRoPE; norms after
# the blocks alone and over all heads; windows on some layers with another rotary; queries scaled by position;
# four multipliers; biases everywhere.
OTHER_FAMILIES = ("smollm3", "phi3", "phi3_long", "olmo2", "olmo3", "ministral3", "granite", "llama_biased")
GGUF_FAMILIES = FAMILIES + OTHER_FAMILIES
EXPERT_FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "granitemoe", "glm4_moe", "gpt_oss")
GGUF_ARCHITECTURES = {
    "gemma3_text": "gemma3", "mistral": "llama", "olmo3": "olmo2", "ministral3": "mistral3",
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
}  # fmt: skip
PERMUTED = ("llama", "smollm3", "mistral3", "granite", "granitemoe")  # as llama.cpp's conversion has it
HYBRID_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 384
# Where in a block of a GGUF type its half-precision scales lie; random bytes there may be infinite.
SCALES_AT = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
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
    "gemma4": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gemma4_moe": {
        "enable_moe_block": True,
        "intermediate_size": 96,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "qwen3_5": {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 5, 5],
        },
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    },
    "qwen3_5_moe": {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    },
    "smollm3": {"num_hidden_layers": 5, "tie_word_embeddings": False},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "phi3_long": {
        "original_max_position_embeddings": 32,
        "sliding_window": 40,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.3, 1.9, 2.5, 3.0, 3.5, 4.5],
            "long_factor": [1.2, 1.5, 2.3, 3.9, 6.5, 9.0, 13.5, 24.5],
        },
    },
    "olmo2": {},
    "olmo3": {
        "num_hidden_layers": 3,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e4,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 1.2,
            },
        },
    },
    "ministral3": {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "granite": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
    },
    "llama_biased": {"attention_bias": True, "mlp_bias": True},
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
    "gpt_oss": {
        "intermediate_size": 64,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "head_dim": 32,
        "sliding_window": 20,
        "num_hidden_layers": 3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 15_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
}


FAMILY_SIZES["gemma4_moe"] = {**FAMILY_SIZES["gemma4"], **FAMILY_SIZES["gemma4_moe"]}
for _name in HYBRID_FAMILIES[1:]:
    FAMILY_SIZES[_name] = {**FAMILY_SIZES[HYBRID_FAMILIES[0]], **FAMILY_SIZES[_name]}


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
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.2 * torch.rand(buffer.shape, generator=generator))
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
        "gemma4": (tf.Gemma4TextConfig, tf.Gemma4ForCausalLM),
        "gemma4_moe": (tf.Gemma4TextConfig, tf.Gemma4ForCausalLM),
        "qwen3_5": (tf.Qwen3_5TextConfig, tf.Qwen3_5ForCausalLM),
        "qwen3_5_moe": (tf.Qwen3_5MoeTextConfig, tf.Qwen3_5MoeForCausalLM),
        "qwen3_next": (tf.Qwen3NextConfig, tf.Qwen3NextForCausalLM),
        "smollm3": (tf.SmolLM3Config, tf.SmolLM3ForCausalLM),
        "phi3": (tf.Phi3Config, tf.Phi3ForCausalLM),
        "phi3_long": (tf.Phi3Config, tf.Phi3ForCausalLM),
        "olmo2": (tf.Olmo2Config, tf.Olmo2ForCausalLM),
        "olmo3": (tf.Olmo3Config, tf.Olmo3ForCausalLM),
        "ministral3": (tf.Ministral3Config, tf.Ministral3ForCausalLM),
        "granite": (tf.GraniteConfig, tf.GraniteForCausalLM),
        "llama_biased": (tf.LlamaConfig, tf.LlamaForCausalLM),
        "mixtral": (tf.MixtralConfig, tf.MixtralForCausalLM),
        "olmoe": (tf.OlmoeConfig, tf.OlmoeForCausalLM),
        "qwen2_moe": (tf.Qwen2MoeConfig, tf.Qwen2MoeForCausalLM),
        "qwen3_moe": (tf.Qwen3MoeConfig, tf.Qwen3MoeForCausalLM),
        "granitemoe": (tf.GraniteMoeConfig, tf.GraniteMoeForCausalLM),
        "glm4_moe": (tf.Glm4MoeConfig, tf.Glm4MoeForCausalLM),
        "gpt_oss": (tf.GptOssConfig, tf.GptOssForCausalLM),
    }
    config, model = kinds[family]
    return model(config(**{**SIZES, **FAMILY_SIZES[family], **overrides}))


def _random_weight(name: str, weight: Any, family: str, generator: Any) -> Any:
    """Scaled so that activations keep their size and logits spread over a few units: a next token is clear
    but not certain.
    """
    import torch

    noise = torch.randn(weight.shape, generator=generator)
    if "norm" in name or name.endswith("router.scale"):
        is_offset = family in ("gemma3", *HYBRID_FAMILIES) and "linear_attn" not in name
        # gemma 4's scores have no scale: its norms of queries and keys carry it
        is_scale = family in ("gemma4", "gemma4_moe") and name.endswith(("q_norm.weight", "k_norm.weight"))
        size = 8 if "router" in name else 0.4 if is_scale else 1
        return (0.1 * noise + (0 if is_offset else 1)) * size
    if "conv1d" in name:
        return noise / weight.shape[-1] ** 0.5
    if weight.ndim == 1:
        return 0.1 * noise + name.endswith("per_expert_scale")
    return noise * (2.0 if "embed_tokens" in name or "lm_head" in name else 1.0) / math.sqrt(weight.shape[-1])


def part_of(state: dict[str, Any], name: str, config: Any) -> Any:
    """The weight that Paceline calls `name` in transformers' state, where phi's q, k and v are one."""
    stored = name if name == "lm_head.weight" else f"model.{name}"
    if stored in state:
        return state[stored]
    part = name.split(".")[-2]
    sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads, config.intermediate_size]
    rows = dict(zip(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), [*sizes, sizes[-1]], strict=True))
    for fused, parts in {"qkv_proj": list(rows)[:3], "gate_up_proj": list(rows)[3:]}.items():
        if part in parts:
            scale = config.head_dim if fused == "qkv_proj" else 1
            whole = state[stored.replace(part, fused)].split([rows[each] * scale for each in parts])
            return whole[parts.index(part)]
    raise KeyError(name)


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


def tiny_gguf(
    path: Path, from_folder: Path, quant: str = "F32", tensors_a_part: int = 0, is_fused: bool = False
) -> Path:
    """The model of a folder as GGUF. Vectors stay F32. Types gguf cannot quantize to (the K-quants) get
    random blocks instead. In parts: the writer adds -00001-of-0000N to the name. is_fused: gate and up of
    experts are one tensor.
    """
    import gguf

    config = json.loads((from_folder / "config.json").read_text())
    arch = GGUF_ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_a_part)
    _add_config(writer, config, arch)
    _add_tokenizer(writer, from_folder, config)
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), config["num_hidden_layers"]
    )
    weights = folder_weights(from_folder)
    if "linear_num_key_heads" in config:
        weights = as_hybrid(weights, config)
    weights = stacked(weights)
    for name in [name for name in weights if is_fused and name.endswith("experts.gate_proj.weight")]:
        pair = [weights.pop(name), weights.pop(name.replace("gate", "up"))]
        weights[name.replace("gate", "gate_up")] = np.concatenate(pair, 1)
    for name, values in weights.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
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
        if after.startswith(
            ("gate_up_proj", "down_proj")
        ):  # gpt-oss: matrices transposed, gate and up in turn
            kind, rows = "bias" if after.endswith("bias") else "weight", np.swapaxes(values, 1, -1)
            parts = (
                {"down": rows} if after.startswith("down") else {"gate": rows[:, ::2], "up": rows[:, 1::2]}
            )
            for part, own in parts.items():
                made[f"{before}.experts.{part}_proj.{kind}"] = np.ascontiguousarray(own)
        elif after:
            number, _, part = after.partition(".")
            found.setdefault(f"{before}.experts.{part}", {})[int(number)] = values
        elif name.endswith("input_linear.weight"):
            for part, half in zip(("gate", "up"), np.split(values, 2, 1), strict=True):
                made[name.replace("block_sparse_moe.input_linear", f"mlp.experts.{part}_proj")] = half
        elif name.endswith("shared_expert_gate.weight"):
            made[name] = values[0]
        else:
            name = name + ".weight" if name.endswith("sinks") else name
            made[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
    return made | {name: np.stack([parts[i] for i in sorted(parts)]) for name, parts in found.items()}


def as_hybrid(weights: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Recurrent layers as llama.cpp's conversion has them."""
    keys, heads, width = (
        config[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "value_head_dim")
    )
    each, key_dim, made = heads // keys, config["linear_key_head_dim"], dict[str, np.ndarray]()

    def tiled(values: np.ndarray, size: int = 1) -> np.ndarray:
        """Value heads of a key head side by side -> the first of every key head first; but of Qwen3-Next."""
        if config["model_type"] == "qwen3_next":
            return values
        return values.reshape(keys, each, size, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)

    for name, values in weights.items():
        before, _, part = name.partition("linear_attn.")
        part, before = part.removesuffix(".weight"), f"{before}linear_attn."
        if part == "in_proj_qkvz":
            ends = np.cumsum([key_dim, key_dim, each * width])
            q, k, v, z = np.split(values.reshape(keys, -1, values.shape[1]), ends, 1)
            made[f"{before}in_proj_z.weight"] = z.reshape(-1, values.shape[1])
            flat = [part.reshape(-1, values.shape[1]) for part in (q, k, v)]
            made[f"{before}in_proj_qkv.weight"] = np.concatenate(flat)
        elif part in ("in_proj_qkv", "conv1d"):
            values, first = values.reshape(len(values), -1), 2 * keys * key_dim
            made[name] = np.concatenate([values[:first], tiled(values[first:], width)])
        elif part in ("in_proj_z", "in_proj_a", "in_proj_b"):
            made[name] = tiled(values, width if part == "in_proj_z" else 1)
        elif part == "out_proj":
            made[name] = np.ascontiguousarray(tiled(values.T, width).T)
        elif part == "A_log":
            made[name] = tiled(-np.exp(values))
        elif part == "dt_bias":
            made[f"{before}dt_proj.bias"] = tiled(values)
        else:
            made[name] = values
    return made


def encode(values: np.ndarray, kind: Any) -> np.ndarray:
    import gguf

    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        width, rng = gguf.quant_shape_to_byte_shape(values.shape, kind), np.random.default_rng(values.size)
        blocks = rng.integers(0, 256, width, dtype=np.uint8)
        each = blocks.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
        for at in SCALES_AT.get(kind.name, ()):
            each[:, at : at + 2] = rng.uniform(0.001, 0.01, (len(each), 1)).astype(np.float16).view(np.uint8)
        return blocks


def _as_stored(name: str, values: np.ndarray, config: dict[str, Any], arch: str) -> np.ndarray:
    is_offset = arch in ("gemma3", "qwen35", "qwen35moe", "qwen3next") and "linear_attn" not in name
    if is_offset and name.endswith("norm.weight"):
        return values + 1
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if arch not in PERMUTED or part not in heads:
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
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    _add_family_config(writer, config, full)
    if arch == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if "num_experts_per_tok" in config:
        _add_experts(writer, config)
    if config.get("sliding_window") and config["model_type"] in (
        "mistral",
        "gemma3_text",
        "phi3",
        "olmo3",
        "gpt_oss",
    ):
        writer.add_sliding_window(config["sliding_window"])


def _add_family_config(writer: Any, config: dict[str, Any], rope: dict[str, Any]) -> None:
    """What llama.cpp's conversion writes for one family or one kind of rotary scaling."""
    import gguf

    if "linear_num_key_heads" in config:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(4)
    if config["model_type"] == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config["model_type"] in ("granite", "granitemoe"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope["rope_type"] == "longrope":
        original, longest = rope["original_max_position_embeddings"], config["max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longest / original) / math.log(original)))
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def _add_experts(writer: Any, config: dict[str, Any]) -> None:
    import gguf

    names = ("num_local_experts", "num_experts", "n_routed_experts")
    writer.add_expert_count(next(config[name] for name in names if name in config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
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
