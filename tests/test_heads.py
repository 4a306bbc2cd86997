"""Learned heads: what the kernels compute, and what the drafters read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.options import EngineConfig
from paceline.core.params import SamplingParams
from paceline.core.tree import Tree
from paceline.core.types import Cached, Draft, Request, Segment
from paceline.cpu.block_head import BlockHead
from paceline.cpu.chain_head import ChainHead
from paceline.cpu.medusa import MedusaHead
from paceline.drafters import registry
from paceline.drafters.base import Drafter, DrafterContext
from paceline.drafters.reading import likeliest
from paceline.engine.engine import Engine
from paceline.engine.policy.base import FixedPolicy
from paceline.heads.attending import TorchBlockHead, TorchChainHead
from paceline.heads.rows import Feed, Node, Row, Sampler
from paceline.heads.torch_heads import TorchMedusaHead
from paceline.models.decoder import Decoder
from paceline.models.layer import Linear, rms_norm
from paceline.runtime.backend import TorchBackend
from paceline.runtime.executor import KvMemory, LocalExecutor
from paceline.train.lessons import Target
from paceline.train.students import build_student
from paceline.train.texts import Batch
from tests.heads import Oracle, Tensors, config_of, eagle_1, random_head, random_tensors, trunk_of
from tests.laws.harness import (
    CONFIG,
    RandomCheckpoint,
    decoder,
    engine_with,
    executor,
    prompts,
    request_of,
    run,
)

TARGET = RandomCheckpoint()
NORM = TARGET.tensor("norm.weight")
N = 37
CPU = torch.device("cpu")
GREEDY = Sampler(0.0, 0, 0)


@pytest.fixture(scope="module")
def hidden() -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        layer: torch.randn(N, CONFIG.hidden_size, generator=generator)
        for layer in range(CONFIG.num_layers + 1)
    }


@pytest.fixture(scope="module")
def rows(hidden: dict[int, torch.Tensor]) -> list[Row]:
    return [Row(i, hidden, i) for i in range(N)]


TOKENS = torch.randint(0, CONFIG.vocab_size, (N,), generator=torch.Generator().manual_seed(4)).tolist()


def embedding(bits: int) -> torch.Tensor:
    return Linear(TARGET.tensor("embed_tokens.weight"), bits=bits).weight


def features(hidden: dict[int, torch.Tensor], layers: Sequence[int]) -> torch.Tensor:
    return torch.cat([hidden[layer] for layer in layers], 1)


def oracle(config: Any, tensors: Tensors, bits: int) -> Oracle:
    return Oracle(config, tensors, embedding(bits), bits)


def spread(logits: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    full = torch.full((CONFIG.vocab_size,), -torch.inf)
    full[tensors["draft_ids"].long()] = logits
    return full


@pytest.fixture(scope="module")
def torch_target() -> Decoder:
    return Decoder.load(TARGET)


CHAINS = {
    "eagle": ({}, 8),
    "eagle normed": ({"norm_before_residual": True, "norm_output": True}, 8),
    "eagle in torch": ({}, 32),
}


@pytest.mark.parametrize(("fields", "bits"), CHAINS.values(), ids=CHAINS)
def test_eagle_computes_what_the_oracle_does(
    fields: dict[str, Any], bits: int, hidden: dict[int, torch.Tensor], rows: list[Row], torch_target: Decoder
) -> None:
    """Rows in two pieces, a chain guessed from them, and a tree's nodes: siblings, and a child of the
    second.
    """
    config = config_of("eagle", CONFIG, draft_vocab=40, **fields)
    tensors = random_tensors(config)
    head: Any = (
        ChainHead(config, tensors, decoder(dtype="int8"))
        if bits == 8
        else TorchChainHead(config, tensors, torch_target, None, CPU)
    )
    true, shown, place = oracle(config, tensors, bits), features(hidden, config.taps), head.place()
    head.read(Feed(place, 0, TOKENS[:20], rows[:20]))
    said = head.begin([Feed(place, 20, TOKENS[20:], rows[20:])])
    assert torch.allclose(said.logits[0], true.eagle(shown, TOKENS)[0], atol=1e-4)
    outputs = list(said.outputs)
    level = head.level(
        [Node(place, N + i, N, token, outputs[0], N, [N + i]) for i, token in enumerate((3, 9))]
    )
    for i, token in enumerate((3, 9)):
        assert torch.allclose(level.logits[i], true.eagle(shown, [*TOKENS, token])[0], atol=1e-4)
    deeper = head.level([Node(place, N + 2, N + 1, 5, level.outputs[1], N, [N + 1, N + 2])])
    assert torch.allclose(deeper.logits[0], true.eagle(shown, [*TOKENS, 9, 5])[0], atol=1e-4)
    tokens, chances = head.guess([Feed(place, 36, TOKENS[36:], rows[36:])], [Sampler(0.0, 0, N + 1)], 4, 0.0)
    path, chance = list(TOKENS), 1.0
    for (token,), (reached,) in zip(tokens, chances, strict=True):
        logits = spread(true.eagle(shown, path)[0], tensors)
        assert token == int(logits.argmax())
        chance *= float(logits.softmax(0).max())
        assert reached == pytest.approx(chance, rel=1e-4)
        path.append(token)


def test_a_seeded_guess_knows_the_targets_noise(hidden: dict[int, torch.Tensor], rows: list[Row]) -> None:
    config = config_of("eagle", CONFIG, draft_vocab=40)
    tensors = random_tensors(config)
    head, true = ChainHead(config, tensors, decoder(dtype="int8")), oracle(config, tensors, 8)
    for seed in range(6):
        request = request_of([1, *TOKENS], SamplingParams(temperature=0.8, seed=seed))
        tokens, chances = head.guess(
            [Feed(head.place(), 0, TOKENS, rows)], [Sampler(0.8, request.seed, N + 1)], 3, 0.0
        )
        path: list[int] = []
        for (token,), (chance,) in zip(tokens, chances, strict=True):
            best = likeliest(
                request,
                path,
                spread(true.eagle(features(hidden, config.taps), [*TOKENS, *path])[0], tensors),
                1,
            )[0]
            assert token == best.token
            assert 0 < chance <= 1
            path.append(token)


def test_guessing_stops_where_nothing_is_likely(rows: list[Row]) -> None:
    config = config_of("eagle", CONFIG)
    head = ChainHead(config, random_tensors(config), decoder(dtype="int8"))
    feed = [Feed(head.place(), 0, TOKENS, rows)]
    _, chances = head.guess(feed, [GREEDY], 5, 0.0)
    stopped = head.guess(feed, [GREEDY], 5, chances[1][0] + 1e-9)
    assert len(stopped.tokens) == 2 < len(chances)


def test_requests_in_one_call_are_drafted_as_alone(rows: list[Row]) -> None:
    config = config_of("eagle", CONFIG, draft_vocab=40)
    head = ChainHead(config, random_tensors(config), decoder(dtype="int8"))
    parts = [slice(0, 5), slice(3, 30), slice(10, 11)]
    feeds = [Feed(head.place(), 0, TOKENS[part], rows[part]) for part in parts]
    together = head.guess(feeds, [GREEDY] * 3, 4, 0.0)
    for i, part in enumerate(parts):
        alone = head.guess([Feed(head.place(), 0, TOKENS[part], rows[part])], [GREEDY], 4, 0.0)
        assert [row[i] for row in together.tokens] == [row[0] for row in alone.tokens]
        assert [row[i] for row in together.chances] == [row[0] for row in alone.chances]


@pytest.mark.parametrize("bits", [8, 32])
def test_a_distilled_model_reads_tokens_alone(bits: int, rows: list[Row], torch_target: Decoder) -> None:
    config = config_of("draft", CONFIG, draft_vocab=40)
    tensors = random_tensors(config)
    head: Any = (
        ChainHead(config, tensors, decoder(dtype="int8"))
        if bits == 8
        else TorchChainHead(config, tensors, torch_target, None, CPU)
    )
    said = head.begin([Feed(head.place(), 0, TOKENS, rows)])
    assert torch.allclose(said.logits[0], oracle(config, tensors, bits).draft(TOKENS), atol=1e-4)


@pytest.mark.parametrize("bits", [8, 32])
def test_eagle_1_fuses_the_token_with_the_last_hidden_state(
    bits: int, hidden: dict[int, torch.Tensor], rows: list[Row], torch_target: Decoder
) -> None:
    config = eagle_1(CONFIG)
    tensors = {**random_tensors(config), "lm_head.weight": TARGET.tensor("embed_tokens.weight")}
    if bits == 8:
        head: Any = ChainHead(config, tensors, decoder(dtype="int8"), NORM)
    else:
        head = TorchChainHead(config, tensors, torch_target, NORM, CPU)
    true, normed = oracle(config, tensors, bits), rms_norm(hidden[CONFIG.num_layers], NORM, config.rms_eps)
    place = head.place()
    said = head.begin([Feed(place, 0, TOKENS, rows)])
    assert torch.allclose(said.logits[0], true.eagle_1(normed, TOKENS), atol=1e-4)
    level = head.level([Node(place, N, N, 3, said.outputs[0], N, [N])])
    assert torch.allclose(level.logits[0], true.eagle_1(normed, [*TOKENS, 3]), atol=1e-4)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("bits", [8, 32])
def test_medusa_computes_what_the_oracle_does(
    bits: int, blocks: int, hidden: dict[int, torch.Tensor], rows: list[Row]
) -> None:
    config: Any = config_of("medusa", CONFIG, draft_vocab=40, num_blocks=blocks)
    tensors, picked = random_tensors(config), [5, 9]
    head: Any = (
        MedusaHead(config, tensors, NORM) if bits == 8 else TorchMedusaHead(config, tensors, NORM, CPU)
    )
    said, last = oracle(config, tensors, bits), hidden[CONFIG.num_layers]
    true = torch.stack([said.medusa(last[i], NORM) for i in picked], 1)
    assert torch.allclose(head.logits([rows[i] for i in picked]), true, atol=1e-4)
    tokens, chances = head.guess([rows[i] for i in picked], [GREEDY] * 2)
    assert tokens == tensors["draft_ids"][true.argmax(-1)].tolist()
    assert torch.allclose(
        torch.tensor(chances, dtype=torch.float32), true.softmax(-1).amax(-1).cumprod(0), atol=1e-4
    )


@pytest.mark.parametrize("bits", [8, 32])
def test_a_trunk_puts_out_what_the_oracle_does(
    bits: int, hidden: dict[int, torch.Tensor], rows: list[Row], torch_target: Decoder
) -> None:
    """One text or two at once, read whole or in parts: no text is written, and the output layer is not asked."""
    medusa: Any = config_of("medusa", CONFIG, draft_vocab=40, has_trunk=True)
    config, tensors = trunk_of(medusa, random_tensors(medusa))
    head: Any = (
        ChainHead(config, tensors, decoder(dtype="int8"))
        if bits == 8
        else TorchChainHead(config, tensors, torch_target, None, CPU)
    )
    true = oracle(config, tensors, bits).eagle(features(hidden, config.taps), TOKENS)[1]
    alone = head.place()
    head.read(Feed(alone, 0, TOKENS[:-3], rows[:-3]))
    assert torch.allclose(head.outputs([Feed(alone, N - 3, TOKENS[-3:], rows[-3:])])[0], true, atol=1e-4)
    both = head.outputs([Feed(head.place(), 0, TOKENS[:5], rows[:5]), Feed(head.place(), 0, TOKENS, rows)])
    assert torch.allclose(both[1], true, atol=1e-4)
    logits = head.begin([Feed(head.place(), 0, TOKENS, rows)]).logits
    assert torch.allclose(
        logits[0], oracle(config, tensors, bits).eagle(features(hidden, config.taps), TOKENS)[0], atol=1e-4
    )


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("bits", [8, 32])
def test_dflash_computes_what_the_oracle_does(
    bits: int, from_anchor: bool, hidden: dict[int, torch.Tensor], rows: list[Row], torch_target: Decoder
) -> None:
    config: Any = config_of(
        "dflash", CONFIG, draft_vocab=40, markov_rank=16, sample_from_anchor=from_anchor, block_size=4
    )
    tensors, steps, root = random_tensors(config, seed=1), config.num_drafts, 11
    head: Any = (
        BlockHead(config, tensors, decoder(dtype="int8"))
        if bits == 8
        else TorchBlockHead(config, tensors, torch_target, CPU)
    )
    true, place = oracle(config, tensors, bits), head.place()
    head.read(Feed(place, 0, [root], rows[:20]))
    expected = true.dflash(features(hidden, config.taps), root)[config.block_size - steps :]
    assert torch.allclose(head.logits([Feed(place, 20, [root], rows[20:])], steps)[:, 0], expected, atol=1e-3)
    tokens, _ = head.guess([Feed(place, 36, [root], rows[36:])], [GREEDY], steps)
    ids = tensors["draft_ids"].tolist()
    word = ids.index(root) if root in ids else len(ids)
    for (token,), logits in zip(tokens, expected, strict=True):
        word = int((logits + true.markov(word)).argmax())
        assert token == ids[word]


class Recorder(Drafter):
    """Remembers what a drafter proposed for which text, and proposes the truth instead, now and then with a
    wrong end: untrained heads are hardly ever right, and what they read after a draft was accepted is to be
    tested."""

    def __init__(self, inner: Any, truth: dict[tuple[int, ...], list[int]]) -> None:
        self.inner, self.truth = inner, truth  # truth: prompt -> the target's whole text
        self.said: list[tuple[list[int], Draft]] = []
        self.name, self.needs, self.is_free = inner.name, inner.needs, inner.is_free

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        drafts: list[Draft] = self.inner.propose(requests, budgets)
        self.said += [(list(r.tokens), draft) for r, draft in zip(requests, drafts, strict=True)]
        return [self._better(r, budget) for r, budget in zip(requests, budgets, strict=True)]

    def _better(self, request: Request, budget: int) -> Draft:
        known = self.truth[tuple(request.tokens[: request.num_prompt])]
        tokens = known[request.num_tokens : request.num_tokens + budget]
        if len(tokens) > 1 and request.num_tokens % 3 == 0:
            tokens[-1] = (tokens[-1] + 1) % CONFIG.vocab_size
        return Draft(Tree.chain(request.tokens[-1], tokens), self.name)

    def observe(self, seen: Any) -> None:
        self.inner.observe(seen)

    def release(self, request: Request) -> None:
        self.inner.release(request)


def hidden_of(tokens: Sequence[int]) -> dict[int, torch.Tensor]:
    """What the target computes on a text in one pass from nothing."""
    fresh, cached = executor(len(tokens) // 16 + 1, dtype="int8"), Cached()
    assert fresh.kv.reserve(cached, len(tokens))
    return fresh.forward([Segment(tokens, cached)], hidden_layers=range(CONFIG.num_layers + 1)).hidden


def recorded(
    kind: str, fields: dict[str, Any], requests: Sequence[Request], **limits: Any
) -> tuple[Recorder, Any]:
    model = random_head(kind, TARGET, draft_vocab=40, **fields)
    drafter = registry.create(
        *registry.parse({"method": kind, "model": model, "num_speculative_tokens": 3}), _context()
    )
    plain = [request_of(r.tokens, r.params) for r in requests]
    run(engine_with(None, target_dtype="int8"), plain)
    recorder = Recorder(drafter, {tuple(r.tokens[: r.num_prompt]): r.tokens for r in plain})
    engine = engine_with(recorder, target_dtype="int8", num_speculative_tokens=3, **limits)
    run(engine, requests)
    return recorder, engine


def _context() -> DrafterContext:
    return DrafterContext(executor(dtype="int8"), TARGET, None, lambda *_: None)


READERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "medusa": ("medusa", {}),
    "medusa with a trunk": ("medusa", {"has_trunk": True}),
    "dflash": ("dflash", {}),
}


@pytest.mark.parametrize(("kind", "fields"), READERS.values(), ids=READERS)
def test_a_drafter_reads_every_text_as_the_oracle_does(kind: str, fields: dict[str, Any]) -> None:
    """In a batch, with chunked prompts, accepted tokens and preemption: each draft is the one that the text
    alone leads to.
    """
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    requests = [request_of(p, params) for p in prompts(6, low=10, high=40, seed=21)]
    recorder, engine = recorded(
        kind, fields, requests, num_blocks=14, max_num_batched_tokens=23, max_model_len=120
    )
    assert engine.scheduler.num_preemptions > 0
    config, tensors = recorder.inner.head.config, recorder.inner.head.tensors
    true, ids, right = oracle(config, tensors, 8), tensors["draft_ids"].tolist(), 0
    said = [(tokens, draft) for tokens, draft in recorder.said if draft.num_drafted]
    assert len(said) > 60
    for tokens, draft in said[:: len(said) // 60]:
        hidden = hidden_of(tokens[:-1])
        if kind == "medusa" and config.trunk is not None:
            trunk = oracle(*trunk_of(config, tensors), 8)
            logits = true.medusa(
                trunk.eagle(features(hidden, config.trunk.taps), tokens[1:])[1], trunk.tensors["norm.weight"]
            )[0]
        elif kind == "medusa":
            logits = true.medusa(hidden[CONFIG.num_layers][-1], NORM)[0]
        elif kind == "eagle":
            logits = true.eagle(features(hidden, config.taps), tokens[1:])[0]
        else:
            logits = true.dflash(features(hidden, config.taps), tokens[-1])[0]
        right += ids[int(logits.argmax())] == draft.tree.tokens[1]
    assert right >= 58, "kernel and oracle may differ where two logits are nearly equal, no more"
    assert engine.totals.num_accepted > 0


@pytest.mark.parametrize("kind", ["eagle", "dflash", "medusa"])
def test_a_text_found_in_the_cache_starts_with_what_was_read_of_another(kind: str) -> None:
    """The target computes only the tail of a known prompt, so the head sees no features of the rest: it takes
    over the first text's.
    """
    shared, params = (
        prompts(1, low=60, high=60, seed=9)[0],
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    )
    first, second = (
        request_of([*shared, 1, 2], params),
        request_of([*shared, 3], replace(params, max_tokens=40)),
    )
    fields = {"has_trunk": True} if kind == "medusa" else {}
    head = random_head(kind, TARGET, draft_vocab=40, **fields)
    drafter: Any = registry.create(*registry.parse({"method": kind, "model": head}), _context())
    engine = engine_with(drafter, target_dtype="int8", num_speculative_tokens=3)
    run(engine, [first])
    engine.add(second)
    for _ in range(2):
        engine.step()
    assert engine.scheduler.num_prefix_hits >= 48
    assert drafter.texts.live[second.id].count >= second.num_tokens - 3


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
def test_two_texts_that_are_first_asked_about_together_may_begin_with_each_others_rows(kind: str) -> None:
    """The second's prompt is in the cache, and nothing has been read of the first yet when both are asked
    about in one call.
    """
    shared, params = (
        prompts(1, low=60, high=60, seed=9)[0],
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    )
    options = {
        "method": kind,
        "model": random_head(kind, TARGET, draft_vocab=40),
        "num_speculative_tokens": 3,
    }

    def first_draft(is_asked_at_once: bool) -> Any:
        drafter = registry.create(*registry.parse(options), _context())
        engine = engine_with(drafter, target_dtype="int8", num_speculative_tokens=3)
        first, second = request_of([*shared, 1, 2], params), request_of([*shared, 3], params)
        engine.add(first)
        engine.policy = FixedPolicy(drafter, 3 if is_asked_at_once else 0)
        engine.step()
        engine.add(second)
        engine.step()
        assert engine.scheduler.num_prefix_hits >= 48
        return drafter.propose([first, second], [3, 3])[1]

    assert first_draft(False) == first_draft(True)


def test_heads_run_beside_a_target_in_torch(torch_target: Decoder) -> None:
    """Chains and trees of every kind over torch's kernels: the text of the same target without drafts."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

    def text_with(options: dict[str, Any] | None) -> tuple[list[list[int]], int]:
        target = LocalExecutor(TorchBackend(CPU), torch_target, KvMemory(CONFIG, 64))
        around = DrafterContext(target, TARGET, None, lambda *_: None)
        drafter = (
            registry.create(*registry.parse({"num_speculative_tokens": 3, **options}), around)
            if options
            else None
        )
        engine = Engine(
            target, drafter, EngineConfig(max_model_len=200, num_speculative_tokens=3 if drafter else 0)
        )
        requests = [request_of(p, params) for p in prompts(3, seed=2)]
        run(engine, requests)
        return [r.output for r in requests], engine.totals.num_drafted

    plain, _ = text_with(None)
    for kind, fields in READERS.values():
        for width in (1, 2):
            model = random_head(kind, TARGET, draft_vocab=40, **fields)
            found, num_drafted = text_with({"method": kind, "model": model, "tree_width": width})
            assert found == plain, kind
            assert num_drafted > 50


@pytest.mark.parametrize(("kind", "fields"), [*READERS.values(), ("draft", {})], ids=[*READERS, "draft"])
def test_what_is_trained_is_what_drafts(kind: str, fields: dict[str, Any]) -> None:
    """The modules that are trained and the oracle of the drafters compute the same, three steps ahead."""
    config: Any = config_of(
        kind, CONFIG, draft_vocab=40, **({"markov_rank": 16} if kind == "dflash" else fields)
    )
    tensors, target = random_tensors(config), Target.load(TARGET, context=64)
    student = build_student(config, target, tensors["draft_ids"].long(), 64)
    student.module.load_state_dict(
        {name: tensor for name, tensor in tensors.items() if name != "draft_ids"}, strict=True
    )
    batch = Batch(
        torch.tensor([TOKENS]),
        torch.arange(20, 30),
        torch.zeros(10, dtype=torch.int64),
        torch.tensor([0]),
        torch.tensor([10]),
        N,
    )
    seen, true, row = target.read(batch.ids, config.hidden_layers), oracle(config, tensors, 32), 21
    ids = tensors["draft_ids"].tolist()
    shown: Any = seen.features(config.hidden_layers)[0, : row + 1] if config.hidden_layers else None
    with torch.no_grad():
        guesses = student.guesses(batch, seen, 3)
    for step, guess in enumerate(guesses):
        said, before = guess.hidden[1] @ guess.weight.T, TOKENS[: row + 2 + step]
        if kind == "eagle":
            expected = true.eagle(shown, before[1:])[0]
        elif kind == "medusa" and config.trunk is not None:
            trunk = oracle(*trunk_of(config, tensors), 32)
            expected = true.medusa(trunk.eagle(shown, TOKENS[1 : row + 2])[1], trunk.tensors["norm.weight"])[
                step
            ]
        elif kind == "medusa":
            expected = true.medusa(seen.last[0, row], NORM)[step]
        elif kind == "dflash":
            word = ids.index(before[-1]) if before[-1] in ids else len(ids)
            expected = true.dflash(shown, TOKENS[row + 1])[step] + true.markov(word)
        else:
            expected = true.draft(before)
        assert torch.allclose(said, expected, atol=1e-3), step
