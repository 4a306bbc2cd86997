"""Random models of awkward sizes, passes over them and the bits that come out, in this process or in another.

`python -m tests.odd_models int8 1 2` prints the instruction set, then one line for each number of threads:
the logits as a hash.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from functools import cache

import torch

from paceline.cpu.compile import VARIANT
from paceline.cpu.decoder import CpuDecoder
from paceline.models.config import ExpertsConfig, ModelConfig, RopeConfig
from tests.laws.harness import RandomCheckpoint
from tests.passes import Rows, batch_of, new_kv, random_parents, shuffled_blocks

DTYPES = ("float32", "int8", "int4")


def config_of(
    hidden: int,
    inner: int,
    heads: tuple[int, int, int],
    vocab: int,
    window: int | None = None,
    is_gemma: bool = False,
    tied: bool = True,
) -> ModelConfig:
    """`heads`: query heads, KV heads, their width. With a window, the first of two layers has it. gemma has
    every extra there is.
    """
    return ModelConfig(
        family="gemma3" if is_gemma else "llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=2,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        max_context=512,
        rms_eps=1e-5,
        rope=RopeConfig(),
        tie_embeddings=tied,
        qkv_bias=is_gemma,
        qk_norm=is_gemma,
        sandwich_norm=is_gemma,
        activation="gelu_tanh" if is_gemma else "silu",
        embed_scale=hidden**0.5 if is_gemma else 1.0,
        sliding_window=window,
        local_layers=(True, False) if window else (),
    )


ODD = config_of(
    80, 112, (6, 2, 16), 203, window=70, tied=False
)  # no width is a whole number of groups, the window cuts a chunk
EXTRA = replace(  # what gemma has not
    config_of(80, 112, (6, 2, 32), 97, window=21, tied=False),
    rope=RopeConfig(kind="yarn", factor=4.0, original_context=40, truncate=False, query_beta=0.2),
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm=True,
    qk_norm_over_heads=True,
    post_norm=True,
    residual_scale=0.7,
    logits_scale=0.3,
    rotary_dim=24,
    rope_layers=(True, False),
    attention_sinks=True,
)
# no width of an expert is a whole number of groups either, the shared one is wider; the first layer is dense
EXPERTS = replace(
    config_of(80, 112, (4, 2, 16), 93),
    qk_norm=True,
    qk_norm_over_heads=True,
    rotary_dim=8,
    residual_scale=0.5,
    logits_scale=0.3,
    num_layers=3,
    experts=ExpertsConfig(
        12, 3, 48, "sigmoid", scale=1.5, groups=4, top_groups=2, shared_inner=112, has_shared_gate=True,
        dense_layers=(0,),
    ),
)  # fmt: skip
# two kinds of layers by their heads, and experts beside a wider MLP, all with norms
HEADS = replace(
    config_of(80, 112, (4, 2, 64), 93, window=21, is_gemma=True),
    qkv_bias=False,
    embed_scale=4.0,
    attention_scale=1.0,
    value_norm=True,
    layer_scalars=True,
    logits_cap=9.0,
    global_head_dim=512,
    global_kv_heads=1,
    rope=RopeConfig(kind="proportional", factor=0.25),
    rope_local=RopeConfig(theta=500.0),
    experts=ExpertsConfig(12, 3, 48, shared_inner=112, has_norms=True),
)
ALL = (
    ODD,
    config_of(48, 208, (7, 1, 16), 61, window=3, is_gemma=True),
    config_of(96, 64, (2, 1, 48), 17),
    EXTRA,
    EXPERTS,
    HEADS,
)


@cache
def odd_model(dtype: str, config: ModelConfig = ODD) -> CpuDecoder:
    return CpuDecoder.load(RandomCheckpoint(config), dtype=dtype, use_cache=False)


def logits_of(model: CpuDecoder) -> torch.Tensor:
    """Few rows and many, a context of several chunks, two requests, a tree: every way through the kernels."""
    kv, (blocks, others), vocab = new_kv(model), shuffled_blocks(2), model.config.vocab_size
    tokens = [(31 * i * i + 7 * i + 3) % vocab for i in range(190)]
    parts, start = [], 0
    for size in (1, 5, 16, 17, 40, 64, 1, 3):
        parts.append(model.forward(batch_of([Rows(tokens[start : start + size], blocks, start)]), kv).logits)
        start += size
    tree = Rows(tokens[start : start + 9], blocks, start, random_parents([0, 0, 1, 2, 2, 5, 0, 7]))
    parts.append(model.forward(batch_of([tree, Rows(tokens[5:11], others)]), kv).logits)
    parts.append(
        model.forward(batch_of([Rows(tokens[:2], others, 6), Rows(tokens[:1], blocks, start)]), kv).logits
    )
    return torch.cat(parts)


def digest(dtype: str) -> str:
    """A hash of the logits of all these models."""
    return hashlib.sha256(
        b"".join(logits_of(odd_model(dtype, config)).numpy().tobytes() for config in ALL)
    ).hexdigest()


def main(dtype: str, *threads: str) -> None:
    import numba

    print(VARIANT)
    for number in map(int, threads):
        numba.set_num_threads(number)
        print(digest(dtype), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
