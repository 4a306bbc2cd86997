"""The first promise: with every drafter and every option, the engine says what the reference loop says, token
for token.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.cli.verify import NEAR_TIE
from paceline.core.noise import Purpose, gumbel
from paceline.core.params import SamplingParams
from paceline.core.sampling import logprobs_of
from paceline.drafters.registry import DRAFTERS, FOR_BENCHMARKS
from paceline.engine.engine import Engine
from tests.heads import random_head, random_mlp, with_mtp
from tests.laws.fakes import FAKES, Fives
from tests.laws.grammar import NoEqualRests, allowed_after
from tests.laws.harness import (
    DTYPE,
    END,
    EXACT,
    TARGET,
    VOCAB,
    can_draft,
    engine_with,
    model,
    prompts,
    request_of,
    run,
)  # fmt: skip
from tests.laws.reference import constrained, reference_loop

# Every drafter of the registry runs here; a new one needs a line, and the test below says so.
EVERY: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "tree": False},
    "suffix_tree": {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_min_token_prob": 0.0},
    "suffix_short": {
        "method": "suffix",
        "suffix_decoding_max_tree_depth": 3,
        "suffix_decoding_max_cached_requests": 1,
    },
    "recycle": {"method": "recycle", "tree": False, "min_token_prob": 0.0},
    "recycle_tree": {"method": "recycle", "num_speculative_tokens": 8, "min_token_prob": 0.0},
    "draft_model": {"method": "draft_model", "model": "1"},
    "draft_model_int8": {"method": "draft_model", "model": "1", "dtype": "int8"},
    "draft_model_skipping": {"method": "draft_model", "model": "1", "skip_layers": [0]},
    "draft_model_twin": {"method": "draft_model", "model": "0"},
    "universal": {"method": "universal", "model": "1"},
    "synthetic": {"method": "synthetic", "acceptance": [0.9, 0.5]},
    "early_exit": {"method": "early_exit", "num_layers": 2},
    "quantized": {"method": "quantized", "bits": 4},
    "draft_model_padded": {"method": "draft_model", "model": "2"},
    "draft_model_narrow": {"method": "draft_model", "model": "3"},
    "draft_model_short": {"method": "draft_model", "model": "4"},
    "quantized_int8": {"method": "quantized", "bits": 8},
    "draft_model_tree": {"method": "draft_model", "model": "1", "tree_width": 2},
    "draft_model_twin_tree": {"method": "draft_model", "model": "0", "tree_width": 3, "tree_depth": 2},
    "early_exit_tree": {"method": "early_exit", "num_layers": 2, "tree_width": 2},
    "early_exit_unsure": {"method": "early_exit", "num_layers": 2, "confidence_threshold": 0.2},
    "quantized_tree": {"method": "quantized", "bits": 4, "tree_width": 2, "tree_depth": 3},
    "eagle": {"method": "eagle", "model": random_head("eagle", TARGET)},
    "eagle_reduced": {
        "method": "eagle",
        "model": random_head("eagle", TARGET, draft_vocab=20),
        "confidence_threshold": 0.05,
    },
    "eagle_tree": {
        "method": "eagle",
        "model": random_head("eagle", TARGET, draft_vocab=32),
        "tree_width": 3,
        "num_speculative_tokens": 8,
    },
    "eagle3": {
        "method": "eagle3",
        "model": random_head("eagle", TARGET, norm_before_residual=True),
        "num_speculative_tokens": 2,
    },
    "mtp": with_mtp(TARGET),
    "mtp_tree": {**with_mtp(TARGET), "tree_width": 2, "num_speculative_tokens": 6},
    "mlp_speculator": {"method": "mlp_speculator", "model": random_mlp(TARGET)},
    "mlp_speculator_tree": {
        "method": "mlp_speculator",
        "model": random_mlp(TARGET),
        "tree_width": 2,
        "num_speculative_tokens": 6,
    },
    "hybrid_of_heads": {
        "method": "hybrid",
        "drafters": ["ngram", {"method": "eagle", "model": random_head("eagle", TARGET)}],
    },
    "distilled": {"method": "draft", "model": random_head("draft", TARGET, draft_vocab=40)},
    "distilled_tree": {
        "method": "draft",
        "model": random_head("draft", TARGET),
        "tree_width": 2,
        "num_speculative_tokens": 6,
    },
    "medusa": {"method": "medusa", "model": random_head("medusa", TARGET, draft_vocab=40)},
    "medusa_tree": {
        "method": "medusa",
        "model": random_head("medusa", TARGET, num_blocks=2),
        "tree_width": 3,
        "num_speculative_tokens": 8,
    },
    "medusa_trunk": {
        "method": "medusa",
        "model": random_head("medusa", TARGET, draft_vocab=40, has_trunk=True),
    },
    "dflash": {"method": "dflash", "model": random_head("dflash", TARGET, markov_rank=16)},
    "dflash_tree": {
        "method": "dflash",
        "model": random_head(
            "dflash", TARGET, draft_vocab=40, markov_rank=16, sample_from_anchor=False, block_size=5
        ),
        "tree_width": 2,
        "num_speculative_tokens": 8,
    },
    "lookahead": {"method": "lookahead"},
    "lookahead_deep": {
        "method": "lookahead",
        "max_window_size": 2,
        "max_ngram_size": 3,
        "pool_from_text": False,
    },
    "staged": {
        "method": "staged",
        "middle": {"method": "early_exit", "num_layers": 2},
        "drafter": {"method": "ngram"},
    },
    "staged_tree": {
        "method": "staged",
        "middle": {"method": "draft_model", "model": "1"},
        "drafter": {"method": "draft_model", "model": "2", "tree_width": 2},
    },
    "staged_thrice": {
        "method": "staged",
        "middle": {"method": "quantized", "bits": 4},
        "drafter": {
            "method": "staged",
            "middle": {"method": "early_exit", "num_layers": 2},
            "drafter": {"method": "lookahead"},
        },
    },
    "hybrid": {
        "method": "hybrid",
        "drafters": ["ngram", {"method": "early_exit", "num_layers": 2, "tree_width": 2}],
    },
    "hybrid_of_auto": {
        "method": "hybrid",
        "drafters": ["suffix", {"method": "recycle", "min_token_prob": 0.0}],
    },
    "hybrid_of_free": {"method": "hybrid", "drafters": ["ngram", "lookahead"]},
    "hybrid_of_models": {
        "method": "hybrid",
        "drafters": [{"method": "draft_model", "model": "1"}, {"method": "early_exit", "num_layers": 1}],
    },
}
REGISTERED = {name: options for name, options in EVERY.items() if can_draft(options)}
DEAD_END: dict[str, Any] = {"allowed_token_ids": (5,), "max_tokens": 9}
# What the policy is given here it may cut, join and leave out as it likes: always right, always wrong,
# sampled, in chains and trees.
POLICED = (
    "ngram", "early_exit", "hybrid", "hybrid_of_auto", "hybrid_of_heads", "AlwaysRight", "AlwaysWrong",
    "RandomTree", "SampledChain", "SampledTree",
)  # fmt: skip
AUTO = [f"auto {name}" for name in POLICED if name in REGISTERED or name in FAKES]
DRAFTER_NAMES = [None, *REGISTERED, *FAKES, *AUTO]


def make(drafter: str | None, **limits: Any) -> Engine:
    if drafter is None:
        return engine_with(None, **limits)
    if drafter in EVERY and drafter not in REGISTERED:
        pytest.skip(f"{drafter} cannot draft for this model")
    if drafter.startswith("auto "):
        return make(drafter.removeprefix("auto "), **limits, is_auto=True)
    return engine_with(REGISTERED[drafter] if drafter in REGISTERED else FAKES[drafter](), **limits)


def test_every_registered_drafter_is_under_the_law() -> None:
    assert {options["method"] for options in EVERY.values()} == {*DRAFTERS, *FOR_BENCHMARKS}


def halves(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Bans every other token, by the last one said, and changes the rest; in place."""
    logits[(output[-1] if output else 0) % 2 :: 2] = -torch.inf
    return logits.mul_(0.5)


def by_length(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Prefers what stands in the prompt at this place; makes new logits."""
    wanted = torch.zeros_like(logits)
    wanted[prompt[len(output) % len(prompt)]] = 3.0
    return logits + wanted


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.9},
    "bias": {"logit_bias": {3: 4.0, 9: -5.0, 12: 2.5}},
    "allowed": {"allowed_token_ids": tuple(range(4, 20))},
    "allowed_high": {"allowed_token_ids": tuple(range(40, 48))},
    "min_tokens": {"min_tokens": 12, "logit_bias": {END: 6.0}},
    "ends": {"logit_bias": {END: 3.0}},
    "stop_id": {"stop_token_ids": (11, 23), "logit_bias": {11: 3.0}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {END: 3.0}},
    "processors": {"logits_processors": (halves, by_length)},
    "all": {
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "min_tokens": 3,
        "logits_processors": (by_length,),
    },
}


def expected(request: Any, dtype: str = DTYPE) -> list[int]:
    oracle = functools.partial(model, dtype=dtype)
    return reference_loop(
        oracle,
        request.tokens[: request.num_prompt],
        request.params,
        request.seed,
        frozenset({END}),
        request.bad_sequences,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, pytest.param(1.3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
def test_same_text_in_a_batch(drafter: str | None, temperature: float) -> None:
    """Seven requests of different lengths share five places, prompts arrive in chunks, and every text is the
    reference's.
    """
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=24)
    requests = [request_of(p, params, seed=11 + i) for i, p in enumerate(prompts(7))]
    engine = make(drafter, max_num_seqs=5, max_num_batched_tokens=23)
    run(engine, requests)
    assert [r.output for r in requests] == [expected(r) for r in requests]
    if drafter in ("AlwaysRight", "draft_model_twin"):
        assert engine.totals.num_accepted == engine.totals.num_drafted > 0


@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize(
    "drafter", [None, "ngram", "draft_model", "early_exit", "quantized", "SampledTree", "AlwaysRight"]
)
def test_same_text_with_weights_of_every_type(drafter: str | None, dtype: str) -> None:
    """The laws of this file hold for the default type; here the other two, in a batch, with chunked prompts
    and preemption.
    """
    params = [SamplingParams(temperature=t, seed=5, max_tokens=30, ignore_eos=True) for t in (0.0, 0.9)]
    requests = [
        request_of(p, params[i % 2], seed=i) for i, p in enumerate(prompts(6, low=10, high=80, seed=7))
    ]
    engine = make(drafter, num_blocks=20, max_num_batched_tokens=37, max_model_len=150, target_dtype=dtype)
    run(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    for request in requests:
        wanted = expected(request, dtype)
        assert request.output == wanted or (not EXACT and parts_at_a_tie(request, wanted, dtype))


def parts_at_a_tie(request: Any, wanted: list[int], dtype: str) -> bool:
    """Does the first other token score within the margin that `paceline verify` states? All that a GPU
    promises without its exact mode.
    """
    place = next(
        i for i, (mine, theirs) in enumerate(zip(request.output, wanted, strict=True)) if mine != theirs
    )
    prompt, params = request.tokens[: request.num_prompt], request.params
    scores = constrained(
        model([*prompt, *wanted[:place]], dtype=dtype), prompt, wanted[:place], params
    ).astype(np.float64)
    if params.temperature:
        scores += params.temperature * gumbel(
            request.seed, len(prompt) + place, Purpose.TARGET, np.arange(len(scores))
        )
    return bool(scores[wanted[place]] - scores[request.output[place]] <= NEAR_TIE)


def test_a_tie_is_told_from_a_mistake() -> None:
    request = request_of(prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    wanted = expected(request)
    scores = model([*request.tokens, *wanted[:1]])
    best, worst = int(np.argmax(scores)), int(np.argmin(scores))
    assert best == wanted[1]
    request.tokens.extend([wanted[0], worst, wanted[2]])
    assert scores[best] - scores[worst] > NEAR_TIE
    assert not parts_at_a_tie(request, wanted, DTYPE)
    request.tokens[-2] = best
    wanted[1] = worst  # as if it had been preferred by less than nothing
    assert parts_at_a_tie(request, wanted, DTYPE)


# A third of all pairs in which every drafter and every option occurs, and the others.
@pytest.mark.parametrize("third", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_with_every_drafter(options: dict[str, Any], temperature: float, third: int) -> None:
    first = (third + [*OPTIONS.values()].index(options) + (temperature > 0)) % 3
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=14, **options)
    bad = ((5,), (9, 10), (4, 5, 6))
    for drafter in DRAFTER_NAMES[first::3]:
        requests = [
            request_of(p, params, seed=i, bad_sequences=bad)
            for i, p in enumerate(prompts(2, high=20, seed=2))
        ]
        run(make(drafter), requests)
        assert [r.output for r in requests] == [expected(r) for r in requests], drafter


class StopsAt:
    """A text that ends with its n-th token, as a stop string would end it."""

    has_stops = True

    def __init__(self, count: int) -> None:
        self.count = count

    def push(self, token: int) -> bool:
        self.count -= 1
        return self.count == 0


@pytest.mark.parametrize("stop", [2, 9])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0, **DEAD_END), SamplingParams(temperature=1.0, **DEAD_END)],
    ids=["greedy", "unseeded"],
)
@pytest.mark.parametrize(
    "drafter", [None, "Fives", "draft_model_twin", "SampledChain", "SampledTree", "ngram"]
)
def test_a_dead_end_inside_a_draft_ends_as_in_plain_decoding(
    drafter: str | None, params: SamplingParams, stop: int
) -> None:
    """Only 5 may follow 5, and three of them in a row may not: plain decoding emits two, then fails, or stops
    before it has to.
    """
    request = request_of([20, 21], params, bad_sequences=((5, 5, 5),), text_stop=StopsAt(stop))
    engine = engine_with(Fives()) if drafter == "Fives" else make(drafter)
    run(engine, [request])
    assert request.output == [5, 5]
    assert request.finish_reason == ("stop" if stop == 2 else "error")
    assert (request.error is None) == (stop == 2)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
def test_a_grammar_holds_on_every_path(drafter: str | None, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=16, frequency_penalty=0.5)
    requests = [
        request_of(p, params, seed=i, constraint=NoEqualRests(VOCAB))
        for i, p in enumerate(prompts(3, seed=5))
    ]
    run(make(drafter), requests)
    allowed = functools.partial(allowed_after, vocab=VOCAB)
    assert [r.output for r in requests] == [
        reference_loop(model, r.tokens[: r.num_prompt], params, r.seed, frozenset({END}), allowed=allowed)
        for r in requests
    ]


@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
def test_preemption_changes_nothing(drafter: str | None) -> None:
    """A cache of ten blocks for six growing requests: they are thrown out and computed again, and say the
    same.
    """
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=50, ignore_eos=True)
    requests = [request_of(p, params, seed=i) for i, p in enumerate(prompts(6, low=10, high=30, seed=4))]
    engine = make(drafter, num_blocks=10, max_num_batched_tokens=40, max_model_len=100)
    run(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    assert [r.output for r in requests] == [expected(r) for r in requests]


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 64])
def test_chunk_size_changes_nothing(chunk: int) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12)
    prompt = prompts(1, low=30, high=90, seed=6)[0]
    request = request_of(prompt, params)
    run(make("ngram", max_num_seqs=1, max_num_batched_tokens=chunk), [request])
    assert request.output == expected(request)


@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
def test_logprobs_are_those_of_plain_decoding(drafter: str | None) -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=16, logprobs=3)

    def logprobs(name: str | None) -> list[Any]:
        requests = [request_of(p, params, seed=i) for i, p in enumerate(prompts(3, seed=8))]
        said = run(make(name), requests)
        return [[x for e in said if e.request is r for x in e.logprobs] for r in requests]

    found, plain = logprobs(drafter), logprobs(None)
    if EXACT:
        assert found == plain
    else:  # other numbers of rows, other orders of adding up: the same numbers but for their last digits
        assert [[x.token for x in row] for row in found] == [[x.token for x in row] for row in plain]
        pairs = [
            (a, b)
            for mine, theirs in zip(found, plain, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        ]
        assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)
    assert all(x.top[0][1] >= x.logprob and len(x.top) == 3 for row in found for x in row)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", [None, "ngram", "draft_model", "staged", "auto hybrid", "SampledTree"])
def test_scores_of_prompts_are_the_targets_own(drafter: str | None, temperature: float) -> None:
    """In a batch with others, in chunks, with a prefix that is cached already, and after preemptions: the
    log-probability of each token of a prompt is that of the reference, and the text is what it is anyway.
    """
    shared = prompts(1, low=40, high=60, seed=3)[0]
    texts = [[*shared, *tail] for tail in prompts(6, low=2, high=9, seed=4)]
    plain = SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True)
    engine = make(drafter, num_blocks=22, max_num_batched_tokens=23, max_model_len=150)
    run(engine, [request_of(shared, plain)])  # leaves its blocks
    requests = [
        request_of(text, replace(plain, prompt_logprobs=3) if i % 3 else plain, seed=i)
        for i, text in enumerate(texts)
    ]
    run(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    assert [r.output for r in requests] == [expected(r) for r in requests]
    for request, text in zip(requests, texts, strict=True):
        if request.params.prompt_logprobs is None:
            assert request.scores == []
            continue
        rows = [torch.from_numpy(model(text[:i])) for i in range(1, len(text))]
        wanted = [logprobs_of(row, token, 3) for row, token in zip(rows, text[1:], strict=True)]
        assert [score.token for score in request.scores] == text[1:]
        if EXACT:
            assert request.scores == wanted
        else:
            pairs = zip(request.scores, wanted, strict=True)
            assert all(abs(mine.logprob - theirs.logprob) < 1e-4 for mine, theirs in pairs)


def fails_after_six(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output) >= 6:
        raise ValueError("no more")
    return logits


@pytest.mark.parametrize("drafter", [None, "draft_model_twin", "draft_model_twin_tree", "staged"])
def test_a_processor_that_fails_ends_its_request_as_in_plain_decoding(drafter: str | None) -> None:
    texts = prompts(2, high=20, seed=2)
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    failing = request_of(texts[0], replace(params, logits_processors=[fails_after_six]))
    other = request_of(texts[1], params)
    run(make(drafter), [failing, other])
    assert failing.output == expected(request_of(texts[0], params))[:6]
    assert "fails_after_six raised ValueError: no more" in str(failing.error)
    assert other.output == expected(other)


def test_prefix_cache_hits_change_nothing_and_do_happen() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10)
    shared = prompts(1, low=50, high=80, seed=9)[0]
    engine = make("ngram")
    for tail in ([1], [2, 3], [1]):
        request = request_of([*shared, *tail], params)
        run(engine, [request])
        assert request.output == expected(request)
    assert engine.scheduler.num_prefix_hits >= 2 * (len(shared) // 16) * 16


@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
def test_a_text_that_ends_is_found_up_to_its_end(drafter: str | None) -> None:
    """Also one that ends with its first step, or within a draft."""
    prompt = prompts(1, low=50, high=80, seed=9)[0]
    for max_tokens in (1, 19):
        engine = make(drafter)
        request = request_of(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
        run(engine, [request])
        again = request_of([*request.tokens, 1], SamplingParams(temperature=0.0, max_tokens=10))
        run(engine, [again])
        assert again.output == expected(again)
        assert engine.scheduler.num_prefix_hits >= (len(request.tokens) - 1) // 16 * 16


@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
def test_siblings_share_the_prompt_and_copy_on_write(drafter: str | None) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=20, ignore_eos=True, n=4)
    prompt = prompts(1, low=37, high=45, seed=10)[0]
    leader = request_of(prompt, params, seed=100)
    group = [leader, *(request_of(prompt, params, seed=100 + i, leader=leader) for i in range(1, 4))]
    engine = make(drafter, num_blocks=32)
    for request in group:
        engine.add(request)
    engine.step()
    engine.step()
    num_blocks = len({b for r in group for b in r.cache.blocks})
    assert num_blocks < sum(len(r.cache.blocks) for r in group), "the siblings hold no block in common"
    while engine.has_work:
        engine.step()
        engine.check()
    assert [r.output for r in group] == [expected(r) for r in group]


@pytest.mark.parametrize("drafter", DRAFTER_NAMES)
def test_a_request_can_cap_or_refuse_drafts(drafter: str | None) -> None:
    for cap in (0, 1):
        params = SamplingParams(temperature=0.0, max_tokens=12, num_speculative_tokens=cap)
        request = request_of(prompts(1, seed=3)[0], params)
        engine = make(drafter)
        run(engine, [request])
        stats = engine.stats[request.id]
        assert stats.num_drafted <= cap * stats.num_steps
        assert request.output == expected(request)


def test_abort_at_any_moment_frees_everything_and_disturbs_no_one() -> None:
    for when in range(8):
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=20, ignore_eos=True)
        requests = [request_of(p, params, seed=i) for i, p in enumerate(prompts(4, seed=12))]
        engine = make("draft_model", max_num_seqs=3, max_num_batched_tokens=16)
        for request in requests:
            engine.add(request)
        for _ in range(when):
            engine.step()
        engine.abort(requests[1])
        engine.check()
        assert not requests[1].cache.blocks
        while engine.has_work:
            engine.step()
            engine.check()
        assert engine.executor.kv.num_used == 0
        assert [r.output for r in requests if r is not requests[1]] == [
            expected(r) for r in requests if r is not requests[1]
        ]
        assert requests[1].output == expected(requests[1])[: requests[1].num_output]


def test_priorities_run_first() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    low, high = (request_of(p, params, priority=n) for p, n in zip(prompts(2, seed=1), (5, 1), strict=True))
    said = run(make(None, max_num_seqs=1), [low, high])
    assert [e.request for e in said[:6]] == [high] * 6
