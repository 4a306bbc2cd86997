"""Learned heads on a GPU say what those in plain torch say: chains, trees, blocks and side heads, alone and
together.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from paceline.core.options import EngineConfig
from paceline.core.params import SamplingParams
from paceline.core.types import Draft, Request
from paceline.cuda import chain_head, recorded_head
from paceline.cuda.chain_head import CudaChainHead
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.parallel_heads import CudaBlockHead, CudaMedusaHead
from paceline.cuda.pick import guess
from paceline.cuda.recorded_head import HeadCache, PagedPlace
from paceline.drafters import registry
from paceline.drafters.base import Drafter, DrafterContext
from paceline.drafters.reading import likeliest
from paceline.engine.engine import Engine
from paceline.heads.attending import TorchBlockHead, TorchChainHead
from paceline.heads.config import SeparateMedusaConfig
from paceline.heads.rows import Feed, Guesses, Node, Row, Sampler
from paceline.heads.torch_heads import TorchMedusaHead
from paceline.loaders.head_files import Head
from paceline.models.decoder import Decoder
from paceline.runtime.backend import TorchBackend
from paceline.runtime.executor import KvMemory, LocalExecutor
from tests.cuda.recorders import CountingCapture, capture_on, executor_of
from tests.heads import config_of, eagle_1, mtp, random_head, random_tensors
from tests.laws.harness import CONFIG, RandomCheckpoint, request_of

pytestmark = pytest.mark.slow  # interpreted where there is no GPU

TARGET = RandomCheckpoint()
NORM = TARGET.tensor("norm.weight")
N = 24
TOKENS = torch.randint(0, CONFIG.vocab_size, (N,), generator=torch.Generator().manual_seed(4)).tolist()
CPU = torch.device("cpu")
CHAINS: dict[str, Any] = {
    "eagle": config_of("eagle", CONFIG, draft_vocab=40),
    "eagle normed": config_of("eagle", CONFIG, norm_before_residual=True, norm_output=True),
    "eagle 1": eagle_1(CONFIG),
    "mtp": mtp(CONFIG),
    "gated mtp": mtp(CONFIG, is_gated=True, rotary_dim=8),
    "draft": config_of("draft", CONFIG, draft_vocab=40),
}


@cache
def torch_target() -> Decoder:
    return Decoder.load(TARGET)


def target_on(device: torch.device, capture: Any = None) -> CudaDecoder:
    return CudaDecoder.load(
        TARGET, dtype="float32", device=str(device), capture=capture or capture_on(device)
    )


def shown(device: torch.device) -> list[Row]:
    generator = torch.Generator().manual_seed(3)
    hidden = {
        n: torch.randn(N, CONFIG.hidden_size, generator=generator).to(device)
        for n in range(CONFIG.num_layers + 1)
    }
    return [Row(i, hidden, i) for i in range(N)]


def tensors_of(config: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    tensors = random_tensors(config, seed)
    if config.has_lm_head or isinstance(config, SeparateMedusaConfig):
        return tensors
    return {**tensors, "lm_head.weight": TARGET.tensor("embed_tokens.weight")}


def head_of(config: Any, seed: int = 0) -> Head:
    return Head(config, tensors_of(config, seed), "", "")


def chain_heads(name: str, device: torch.device) -> list[Any]:
    """The head under test, and the oracle."""
    config, tensors = CHAINS[name], tensors_of(CHAINS[name])
    ours = CudaChainHead(head_of(config), target_on(device), num_blocks=64)
    norm = NORM if name in ("eagle 1", "mtp", "gated mtp") else None
    return [ours, TorchChainHead(config, tensors, torch_target(), norm, CPU)]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.cpu(), theirs, atol=1e-4, rtol=1e-4)


def alike(ours: Guesses, theirs: Guesses) -> None:
    assert ours.tokens == theirs.tokens
    torch.testing.assert_close(torch.tensor(ours.chances), torch.tensor(theirs.chances), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", CHAINS)
def test_chains_and_trees_are_those_of_torch(name: str, device: torch.device) -> None:
    """A text in two pieces, a tree's nodes (siblings, and a child of the second), then a chain in their
    place.
    """
    found: list[list[Any]] = []
    for head, rows in zip(chain_heads(name, device), (shown(device), shown(CPU)), strict=True):
        place = head.place()
        head.read(Feed(place, 0, TOKENS[:15], rows[:15]))
        said = head.begin([Feed(place, 15, TOKENS[15:18], rows[15:18])])
        first = said.logits.clone()
        level = head.level(
            [Node(place, 18 + i, 18, token, said.outputs[0], 18, [18 + i]) for i, token in enumerate((3, 9))]
        )
        second = level.logits.clone()
        deeper = head.level([Node(place, 20, 19, 5, level.outputs[1], 18, [19, 20])]).logits.clone()
        chain = head.guess([Feed(place, 18, TOKENS[18:20], rows[18:20])], [Sampler(0.0, 0, 21)], 3, 0.0)
        found.append([first, second, deeper, chain])
    for ours, theirs in zip(found[0][:3], found[1][:3], strict=True):
        same(ours, theirs)
    alike(found[0][3], found[1][3])


def test_sequences_in_one_call_are_drafted_as_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of three texts, and nodes of two trees in mixed order; more rows than blocks were made for at
    first.
    """
    monkeypatch.setattr("paceline.cuda.recorded_head.MOST_BYTES", 1)
    heads, parts = chain_heads("eagle", device), [slice(0, 2), slice(3, 20), slice(10, 11)]
    (ours, theirs), generation = heads, heads[0]._cache.generation
    together = []
    for head, rows in ((ours, shown(device)), (theirs, shown(CPU))):
        feeds = [Feed(head.place(), 0, TOKENS[part], rows[part]) for part in parts]
        together.append(head.guess(feeds, [Sampler(0.0, 0, 9)] * 3, 2, 0.0))
        said = head.begin([Feed(feed.place, len(feed.tokens), TOKENS[:1], rows[:1]) for feed in feeds])
        sizes = [len(feed.tokens) + 1 for feed in feeds]
        nodes = [
            Node(feeds[i].place, sizes[i] + k, sizes[i], 7 + k, said.outputs[i], sizes[i], [sizes[i] + k])
            for k, i in ((0, 2), (0, 0), (1, 2))
        ]
        together.append(head.level(nodes).logits.clone())
    alike(together[0], together[2])
    same(together[1], together[3])
    assert ours._cache.generation > generation


def test_a_fork_has_the_same_rows_and_goes_its_own_way(device: torch.device) -> None:
    chains = []
    for head, rows in zip(chain_heads("eagle", device), (shown(device), shown(CPU)), strict=True):
        place = head.place()
        head.read(Feed(place, 0, TOKENS[:20], rows[:20]))
        fork = head.fork(place, 17)
        head.read(Feed(place, 17, TOKENS[3:6], rows[3:6]))
        chains.append(head.guess([Feed(fork, 17, TOKENS[17:19], rows[17:19])], [Sampler(0.0, 0, 20)], 2, 0.0))
    alike(*chains)


def test_blocks_of_places_that_are_gone_are_used_again(device: torch.device) -> None:
    cache_ = HeadCache((1, 1, 4), torch.float32, device, num_blocks=4)
    for _ in range(9):
        place = PagedPlace(cache_)
        place.reserve(50)
        assert len(set(place.slots(0, 50))) == 50
        assert cache_.trash_slot not in place.slots(0, 50)
        del place
    assert cache_.generation == 0
    kept = [PagedPlace(cache_) for _ in range(3)]
    for place in kept:
        place.reserve(40)
    assert cache_.generation == 2
    assert len({slot for place in kept for slot in place.slots(0, 40)}) == 120


def test_what_is_recorded_before_is_what_drafts_need(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("counts captures, which a GPU's capture does not")
    monkeypatch.setattr(chain_head, "MOST_DRAFTED", 2)
    config, capture = CHAINS["eagle"], CountingCapture()
    head, rows = CudaChainHead(head_of(config), target_on(CPU, capture), 16), shown(CPU)
    head.record(2)
    assert capture.num_recordings == 4  # chains of one and of two requests, a first level and another
    for count in (1, 2):  # as many requests
        for steps in (1, 2):
            feeds = [Feed(head.place(), 0, TOKENS[:2], rows[:2]) for _ in range(count)]
            guesses = head.guess(feeds, [Sampler(0.0, 0, 3)] * count, steps, 0.0)
            assert len(guesses.tokens) == 2
    assert len(head._graphs._recordings) == capture.num_recordings == 4


def test_a_prompt_is_read_before_and_not_recorded(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_head, "TAIL", 4)
    chains = []
    for head, rows in zip(chain_heads("eagle", device), (shown(device), shown(CPU)), strict=True):
        feeds = [Feed(head.place(), 0, TOKENS[:count], rows[:count]) for count in (9, 2)]
        chains.append(head.guess(feeds, [Sampler(0.0, 0, 9)] * 2, 2, 0.0))
    alike(*chains)


@pytest.mark.parametrize(("rank", "from_anchor"), [(16, True), (0, False)])
def test_blocks_are_those_of_torch(rank: int, from_anchor: bool, device: torch.device) -> None:
    config: Any = config_of(
        "dflash", CONFIG, draft_vocab=40, markov_rank=rank, sample_from_anchor=from_anchor, block_size=4
    )
    tensors, found = tensors_of(config, seed=1), []
    ours, theirs = (
        CudaBlockHead(head_of(config, seed=1), target_on(device), 4),
        TorchBlockHead(config, tensors, torch_target(), CPU),
    )
    for head, rows in ((ours, shown(device)), (theirs, shown(CPU))):
        places: list[Any] = [head.place(), head.place(), head.place()]
        head.read(Feed(places[0], 0, [0], rows[:17]))
        feeds = [
            Feed(places[0], 17, [11], rows[17:19]),
            Feed(places[1], 0, [2], rows[:3]),
            Feed(places[2], 0, [5], rows[:1]),
        ]
        logits = head.logits(feeds, config.num_drafts).clone()
        again = [Feed(feed.place, feed.start + len(feed.rows), feed.tokens, rows[20:21]) for feed in feeds]
        found.append([logits, head.guess(again, [Sampler(0.0, 0, 9)] * 3, config.num_drafts)])
    same(found[0][0], found[1][0])
    alike(found[0][1], found[1][1])


@pytest.mark.parametrize("kind", ["one output layer", "one a head"])
def test_side_heads_are_those_of_torch(kind: str, device: torch.device) -> None:
    config: Any = config_of("medusa", CONFIG, draft_vocab=40, num_blocks=2)
    if kind == "one a head":
        config = SeparateMedusaConfig(**{**asdict(config), "has_lm_head": False})
    ours = CudaMedusaHead(head_of(config), target_on(device))
    theirs = TorchMedusaHead(config, tensors_of(config), NORM, CPU)
    mine, other = ([rows[i] for i in (5, 9, 2)] for rows in (shown(device), shown(CPU)))
    samplers = [Sampler(0.0, 0, 0)] * 3
    same(ours.logits(mine), theirs.logits(other))
    alike(ours.guess(mine, samplers), theirs.guess(other, samplers))


class Listener(Drafter):
    """A drafter, and what it proposed."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.said = inner, []  # type: Any, list[Draft]
        self.name, self.needs, self.observe, self.release = (  # type: ignore[method-assign]
            inner.name, inner.needs, inner.observe, inner.release,
        )  # fmt: skip

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        drafts: list[Draft] = self.inner.propose(requests, budgets)
        self.said += drafts
        return drafts


DRAFTERS: list[tuple[str, int, dict[str, Any]]] = [
    ("eagle", 1, {}),
    ("eagle", 3, {}),
    ("medusa", 3, {}),
    ("medusa", 1, {"has_trunk": True}),
    ("medusa", 3, {"has_trunk": True}),
    ("dflash", 3, {"markov_rank": 16}),
]


@pytest.mark.parametrize(("kind", "width", "fields"), DRAFTERS)
def test_drafters_on_a_gpu_propose_what_they_do_in_torch(
    kind: str, width: int, fields: dict[str, Any], device: torch.device
) -> None:
    options = {
        "method": kind,
        "model": random_head(kind, TARGET, draft_vocab=40, **fields),
        "num_speculative_tokens": 4,
        "tree_width": width,
    }
    found = []
    oracle = LocalExecutor(TorchBackend(CPU), torch_target(), KvMemory(CONFIG, 8))
    for executor in (executor_of(target_on(device), 8), oracle):
        listener = Listener(
            registry.create(*registry.parse(options), DrafterContext(executor, TARGET, None, lambda *_: None))
        )
        engine = Engine(executor, listener, EngineConfig(max_model_len=100, num_speculative_tokens=4))
        request = request_of(TOKENS[:9], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        engine.add(request)
        for _ in range(3):
            engine.step()
        found.append(
            (request.output, listener.said[:2])
        )  # where a pass runs by itself, a third draft is being checked already
    (ours, drafts), (theirs, expected) = found
    assert ours == theirs
    assert [draft.tree for draft in drafts] == [draft.tree for draft in expected]
    assert sum(draft.num_drafted for draft in drafts) == 8
    for draft, other in zip(drafts, expected, strict=True):
        assert draft.chances == pytest.approx(other.chances, rel=0.02)


@pytest.mark.skipif(
    find_spec("triton.backends.nvidia") is None, reason="Triton without a compiler for NVIDIA's GPUs"
)
def test_the_kernels_compile_where_no_gpu_is() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.compile_kernels"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


def guessed(
    logits: torch.Tensor,
    samplers: Sequence[Sampler],
    ids: torch.Tensor | None,
    device: torch.device,
    step: int = 0,
) -> Any:
    def column(numbers: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    how = {
        "temperatures": column([s.temperature for s in samplers], torch.float64),
        "seeds": column([s.seed for s in samplers], torch.int64),
        "places": column([s.position for s in samplers], torch.int64),
    }
    results = torch.zeros((2, len(logits)), dtype=torch.int32, device=device)
    words = guess(logits.to(device), how, None if ids is None else ids.to(device), step, results)
    return words.tolist(), results[0].tolist(), results[1].view(torch.float32).tolist()


@pytest.mark.parametrize("words", [40, 1500])
def test_a_seeded_guess_knows_the_targets_noise(words: int, device: torch.device) -> None:
    """Two steps of two requests, one of them greedy; ids of a larger vocabulary."""
    generator = torch.Generator().manual_seed(words)
    vocab, logits = 2 * words, 3 * torch.randn(4, words, generator=generator)
    ids = torch.randperm(vocab, generator=generator)[:words].sort().values.int()
    full = torch.full((4, vocab), -torch.inf)
    full[:, ids.long()] = logits
    for seed in range(5):
        tokens = [1] * 20
        requests = [
            request_of(tokens, SamplingParams(temperature=0.8, seed=seed)),
            request_of(tokens, SamplingParams(temperature=0.0)),
        ]
        samplers = [Sampler(0.8, requests[0].seed, 17), Sampler(0.0, 0, 17)]
        drafted, chosen, chances = guessed(logits, samplers, ids, device, step=3)
        for row in range(4):
            best = likeliest(requests[row % 2], [1] * (row // 2), full[row], 1)[0]
            assert chosen[row] == ids[drafted[row]] == best.token
            assert chances[row] == pytest.approx(best.chance, rel=0.02)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_guess_from_broken_logits_is_a_token_and_unsure(bad: float, device: torch.device) -> None:
    for temperature in (0.0, 1.0):
        words, tokens, chances = guessed(
            torch.full((1, 1500), bad), [Sampler(temperature, 1, 0)], None, device
        )
        assert 0 <= tokens[0] == words[0] < 1500
        assert chances == [0.0]
