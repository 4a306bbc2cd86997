"""Stages: each says exactly what its model would, keeps to its budget, and leaves the request as it was."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose, noise_of, probabilities
from paceline.core.types import Request
from paceline.drafters import registry
from tests.laws.grammar import NoEqualRests
from tests.laws.harness import engine_with, prompts, run
from tests.laws.harness import request_of as engine_request
from tests.laws.tables import TableDecoder, ready, table_drafter, table_runner
from tests.laws.test_accept_exact import table

VOCAB, END = 5, 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=99)
SEEDED = SamplingParams(temperature=1.2, seed=4, max_tokens=99)
SAMPLED = SamplingParams(temperature=1.2, max_tokens=99)
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
EXIT = {"method": "early_exit", "num_layers": 2}
INNER: dict[str, dict[str, Any]] = {
    "ngram": NGRAM,
    "suffix": {"method": "suffix"},
    "recycle": {"method": "recycle", "min_token_prob": 0.0},
    "lookahead": {"method": "lookahead"},
    "exit": {"method": "early_exit", "num_layers": 1},
    "tree": {"method": "draft_model", "model": "small", "tree_width": 2},
    "hybrid": {"method": [NGRAM, {"method": "early_exit", "num_layers": 1}]},
    "staged": {"method": "staged", "middle": {"method": "early_exit", "num_layers": 1}, "drafter": NGRAM},
}


def staged_with(
    drafter: dict[str, Any], middle: dict[str, Any] = EXIT, middle_vocab: int = VOCAB
) -> tuple[Any, Any]:
    target = table_runner(table(1), VOCAB, {1: table(5), 2: table(3)})
    models = {
        "middle": table_runner(lambda tokens: table(3)(tokens)[:middle_vocab], middle_vocab),
        "small": table_runner(table(6), VOCAB),
    }
    return table_drafter({"method": "staged", "middle": middle, "drafter": drafter}, target, models), target


def request_of(params: SamplingParams, **fields: Any) -> Request:
    return Request("r", params, [3, 1, 2, 3, 1], 2, seed=params.seed or 11, **fields)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_the_draft_is_what_the_middle_model_would_choose(
    inner: dict[str, Any], params: SamplingParams
) -> None:
    drafter, target = staged_with(inner)
    request = request_of(params)
    for _ in range(3):  # the text goes another way than the drafts did
        ready(target, request, 6)
        (draft,) = drafter.propose([request], [6])
        expected: list[int] = []
        for _ in range(6):
            row = torch.from_numpy(table(3)([*request.tokens, *expected]))
            expected.append(choose(request, row, request.num_tokens + len(expected), noise_of(request)))
        assert list(draft.tree.tokens[1:]) == expected
        assert draft.q is None
        assert draft.chances is not None
        assert draft.chances[0] == 1.0 > draft.chances[6] > 0
        request.tokens += [*expected[:2], (expected[2] + 1) % VOCAB]


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_sampled_drafts_name_the_middle_models_distribution(inner: dict[str, Any]) -> None:
    drafter, target = staged_with(inner)
    request = request_of(SAMPLED)
    ready(target, request, 5)
    (draft,) = drafter.propose([request], [5])
    assert draft.tree.is_chain
    assert draft.num_drafted == 5
    assert draft.q is not None
    assert draft.chances is not None
    for node in range(5):
        row = torch.from_numpy(table(3)([*request.tokens[:-1], *draft.tree.tokens[: node + 1]]))
        torch.testing.assert_close(draft.q[node], probabilities(request.params, row))
        assert draft.chances[node + 1] == pytest.approx(
            draft.chances[node] * float(draft.q[node][draft.tree.tokens[node + 1]])
        )


def test_guesses_that_are_right_spare_passes_of_the_middle_model() -> None:
    """A drafter equal to the middle model: two passes for six tokens."""
    drafter, target = staged_with({"method": "draft_model", "model": "middle", "num_speculative_tokens": 2})
    request = request_of(GREEDY)
    ready(target, request, 6)
    decoder: TableDecoder = target.decoder
    decoder.num_rows.clear()
    (draft,) = drafter.propose([request], [6])
    assert draft.num_drafted == 6
    assert decoder.num_rows == [3, 3]


@pytest.mark.parametrize("params", [GREEDY, SEEDED, SAMPLED], ids=["greedy", "seeded", "sampled"])
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_the_request_is_only_read(inner: dict[str, Any], params: SamplingParams) -> None:
    drafter, target = staged_with(inner)
    grammar = NoEqualRests(VOCAB)
    request = request_of(params, constraint=grammar, stop_ids=frozenset({END}))
    ready(target, request, 4)
    before = (
        list(request.tokens),
        list(request.cache.blocks),
        request.cache.num_cached,
        request.num_rounds,
        request.seed,
    )
    (draft,) = drafter.propose([request], [4])
    assert (
        request.tokens,
        request.cache.blocks,
        request.cache.num_cached,
        request.num_rounds,
        request.seed,
    ) == before
    assert grammar.output == []
    tokens = draft.tree.tokens[1:]
    assert all(a % 3 != b % 3 for a, b in itertools.pairwise(tokens))
    assert END not in tokens[:-1]


def test_tokens_that_the_middle_model_cannot_read_are_no_harm() -> None:
    """It knows three of five tokens; its drafter knows all, and samples them."""
    drafter, _ = staged_with(
        INNER["tree"], middle={"method": "draft_model", "model": "middle"}, middle_vocab=3
    )
    for seed in range(20):
        request = Request(f"r{seed}", SAMPLED, [2, 1, 2, 0, 1], 2, seed=seed)
        (draft,) = drafter.propose([request], [4])
        assert draft.num_drafted == 4
        assert max(draft.tree.tokens) < 3
        drafter.release(request)


def test_three_stages_accept_all_when_all_are_the_same_model() -> None:
    twin = {"method": "draft_model", "model": "0"}
    options = {
        "method": "staged",
        "middle": twin,
        "drafter": {"method": "staged", "middle": twin, "drafter": NGRAM},
    }
    engine = engine_with(options)
    requests = [
        engine_request(p, SamplingParams(temperature=0.8, seed=2, max_tokens=20), seed=i)
        for i, p in enumerate(prompts(3))
    ]
    run(engine, requests)
    assert engine.totals.num_accepted == engine.totals.num_drafted > 0


def test_noise_of_a_stage_is_not_the_targets() -> None:
    """Nor that of another round: rounds may visit a position twice."""
    drafter, target = staged_with(NGRAM)
    request = request_of(SAMPLED)
    ready(target, request, 6)
    seeds = set()
    for request.num_rounds in range(4):
        (reading,) = drafter.middle.open([request], [6])
        seeds.add(drafter._begin(reading).view.seed)
    assert len(seeds | {request.seed}) == 5
    request = request_of(SEEDED)
    ready(target, request, 6)
    (reading,) = drafter.middle.open([request], [6])
    assert drafter._begin(reading).view.seed == request.seed


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"middle": "early_exit"}, "middle"),
        ({"middle": {"method": "ngram"}}, "middle"),
        ({"drafter": {"method": "nonsense"}}, "nonsense"),
        ({"drafter": {"method": "ngram", "bits": 4}}, "bits"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        registry.parse({"method": "staged", **options})
