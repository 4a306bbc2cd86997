"""The default model for real: as fast as transformers, the same text with every drafter, and their τ as it
is.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.measure.prompts import load

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "early_exit": {"method": "early_exit", "num_speculative_tokens": 2},
    "quantized": {"method": "quantized", "bits": 8, "num_speculative_tokens": 4},
}


def oracle(llm: LLM) -> Any:
    """transformers' Llama with the very weights that we run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = llm.checkpoint.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_context,
            rms_norm_eps=config.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    weights = {f"model.{name}": llm.checkpoint.tensor(name) for name in config.weight_names()}
    theirs.load_state_dict(weights, strict=False)
    theirs.tie_weights()
    return theirs.eval()


@pytest.mark.serial
def test_plain_decoding_is_at_least_as_fast_as_transformers(default_model: LLM) -> None:
    """Side by side, interleaved, the median of three; the same prompt, the same number of tokens, the same
    text.
    """
    theirs, num_tokens = oracle(default_model), 48
    precise = LLM(dtype="float32", speculative_config=None, progress=False)  # the oracle's own precision
    ids = default_model.tokenizer.encode_chat(
        [{"role": "user", "content": "Explain in a few sentences why the sky is blue."}]
    )
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    def int8() -> list[int]:
        return default_model.generate([ids], params)[0].token_ids

    def float32() -> list[int]:
        return precise.generate([ids], params)[0].token_ids

    def transformers() -> list[int]:
        with torch.inference_mode():
            out = theirs.generate(
                torch.tensor([ids]),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=2,
            )
        return out[0, len(ids) :].tolist()

    seconds: dict[str, list[float]] = defaultdict(list)
    texts = {}
    for run in (int8, float32, transformers) * 4:  # the first round warms up
        start = time.perf_counter()
        texts[run.__name__] = run()
        seconds[run.__name__].append(time.perf_counter() - start)
    rates = {name: num_tokens / sorted(times[1:])[1] for name, times in seconds.items()}
    print(f"\nplain decoding, tokens/s: {', '.join(f'{name} {rate:.1f}' for name, rate in rates.items())}")
    assert texts["float32"][:20] == texts["transformers"][:20]
    assert rates["int8"] > rates["float32"] > rates["transformers"]


@pytest.mark.parametrize(
    "method", ["ngram", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m != "ngram")]
)
def test_drafters_report_their_real_tau_and_change_nothing(default_model: LLM, method: str) -> None:
    chats = [
        [{"role": "user", "content": p.turns[0]}] for p in load() if p.category in ("chat", "summarization")
    ][::4]
    params = [SamplingParams(temperature=t, seed=7, max_tokens=24) for t in (0.0, 0.7)]
    with LLM(speculative_config=METHODS[method], progress=False) as llm:
        for setting in params:
            plain, fast = default_model.chat(chats, setting), llm.chat(chats, setting)
            assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
        totals = llm.engine.totals
        print(
            f"\n{method}: τ {totals.tau:.2f}, α {totals.alpha:.2f}, {totals.num_drafted} drafted, {totals.num_accepted} accepted"
        )
        assert totals.num_accepted > 0
        assert totals.num_tokens == totals.num_accepted + totals.num_own
        assert totals.tau > 1
