"""Trees in bursts of a GPU: they are those of the same rule in plain Python, the text is plain decoding's, and
the keys and values that moved are those that a plain pass writes.

Target and head are those of tests/calm.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.core.types import Cached, Request, Segment
from paceline.cuda import move as moving
from paceline.cuda.backend import CudaBackend
from paceline.cuda.batch import Bucket
from paceline.cuda.burst import CudaBurstBackend
from paceline.cuda.chain_head import CudaChainHead
from paceline.cuda.move import Caches, move
from paceline.cuda.pick import BLOCK, guess
from paceline.cuda.recorded_head import HeadShape
from paceline.cuda.top import top
from paceline.cuda.tree_head import TreeDraft
from paceline.cuda.tree_nodes import TreeNodes, choose, grow
from paceline.cuda.walk import Walked, walk
from paceline.drafters import heads, registry
from paceline.drafters.base import Drafter, DrafterContext
from paceline.engine.engine import Engine
from paceline.heads.attending import TorchChainHead
from paceline.heads.rows import Feed, Node, Sampler, TreeShape
from paceline.models.decoder import Decoder
from paceline.runtime.backend import TorchBackend
from paceline.runtime.executor import KvMemory, LocalExecutor
from tests.calm import CHANGING, STEADY, TARGET, TINY, bursts_of, config_with, head_folder
from tests.cuda.recorders import capture_on
from tests.cuda.test_cuda_heads import (
    CHAINS,
    CPU,
    NORM,
    TOKENS,
    head_of,
    shown,
    target_on,
    tensors_of,
    torch_target,
)
from tests.laws.harness import request_of, run
from tests.laws.test_ahead import ahead


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return head_folder(tmp_path_factory.mktemp("head"))


def drafter_of(executor: LocalExecutor, head: str, shape: TreeShape) -> Drafter:
    sizes = {"num_speculative_tokens": shape.nodes, "tree_width": shape.width, "tree_depth": shape.depth}
    context = DrafterContext(executor, TARGET, None, lambda *_: None)  # type: ignore[arg-type]
    return registry.create(*registry.parse({"method": "eagle", "model": head, **sizes}), context)


def engine_on(
    device: torch.device, head: str, shape: TreeShape, limit: int = 100, exact: bool = False
) -> Engine:
    backend = CudaBackend(device, exact, capture_on(device))
    executor = LocalExecutor(backend, backend.load(TARGET, "float32"), KvMemory(TINY, 16, device))
    return ahead(Engine(executor, drafter_of(executor, head, shape), config_with(shape.nodes, limit)))


def plain(requests: Sequence[Request], limit: int = 100) -> None:
    executor = LocalExecutor(TorchBackend(CPU), Decoder.load(TARGET), KvMemory(TINY, 16))
    run(Engine(executor, None, config_with(0, limit)), requests)


def best_tree(shape: TreeShape, offers: Any) -> tuple[list[int], list[int], list[float]]:
    """The rule in plain Python: tokens, rows of parents (0: the root) and logarithms of paths' probabilities,
    the best node first. offers: tokens with such logarithms, likeliest first, by nodes of a level, each a
    pair of its number (-1: the root) and the tokens of its path."""
    nodes: list[tuple[np.float32, int, tuple[int, ...]]] = []
    level: list[tuple[int, tuple[int, ...]]] = [(-1, ())]
    for _ in range(shape.depth):
        found = []
        for (parent, path), row in zip(level, offers(level), strict=True):
            above = nodes[parent][0] if parent >= 0 else np.float32(0)
            found += [(above + np.float32(chance), parent, (*path, token)) for token, chance in row]
        found = sorted(found, key=lambda one: -one[0])[: shape.width]
        level = [(len(nodes) + i, path) for i, (_, _, path) in enumerate(found)]
        nodes += found
    order = sorted(range(len(nodes)), key=lambda node: -nodes[node][0])[: shape.nodes]
    rows = {node: row for row, node in enumerate(order, start=1)} | {-1: 0}
    tokens = [nodes[node][2][-1] for node in order]
    return tokens, [rows[nodes[node][1]] for node in order], [float(nodes[node][0]) for node in order]


def column(numbers: Any, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def batch(rows: int, requests: int, tables: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Of that many requests with `rows` each, and one more without any; block 10 r + i is the i-th of r's."""
    total, starts = rows * (requests + 1), [rows * r for r in range(requests + 1)]
    columns = {name: column([0] * total, device) for name in ("input_ids", "positions", "slots", "written")}
    blocks = [[10 * r + i for i in range(tables)] for r in range(requests + 1)]
    return columns | {
        "starts": column([*starts, starts[-1], total], device),
        "prefix_lens": column([0] * (requests + 2), device),
        "block_tables": column(blocks, device).T.contiguous(),
        "masks": column([[0]] * total, device, torch.int64),
        "places": column([0] * total, device, torch.int64),
        "wanted": column([rows * r for r in range(requests + 1)], device, torch.int64),
        "limits": column([1000] * (requests + 1), device),
    }


def test_the_best_tokens_are_those_of_a_softmax(device: torch.device) -> None:
    """Of two requests with two rows each, one of them with noise; of each the first is what `guess` says."""
    logits = 3 * torch.randn(4, BLOCK + 7, generator=torch.Generator().manual_seed(5)).to(device)
    logits[0, [3, 9]] = logits[0, 5] = 20.0  # equal ones in the order of their ids
    how = {
        "temperatures": column([0.0, 0.7], device, torch.float64),
        "seeds": column([1, 2], device, torch.int64),
        "places": column([30, 40], device, torch.int64),
    }
    ids = torch.arange(BLOCK + 7, dtype=torch.int32, device=device).flip(0).contiguous()
    tokens, chances = top(logits, how, ids, 2, 3)
    best = logits.log_softmax(-1).topk(3)
    assert tokens[0].tolist() == [BLOCK + 6 - each for each in (3, 5, 9)]
    assert tokens[1].tolist() == ids[best.indices[1]].tolist()
    torch.testing.assert_close(chances[:2], best.values[:2], atol=1e-4, rtol=1e-4)
    results = torch.zeros((2, 4), dtype=torch.int32, device=device)
    by_step = logits.view(2, 2, -1).transpose(0, 1).contiguous().flatten(0, 1)  # siblings share their noise
    for step, rows in enumerate(by_step.split(2)):
        guess(rows, how, ids, 2, results[:, 2 * step : 2 * step + 2])
    assert results[0].view(2, 2).T.flatten().tolist() == tokens[:, 0].tolist()
    claimed = results[1].view(torch.float32).view(2, 2).T.flatten()
    torch.testing.assert_close(chances[:, 0].exp(), claimed, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [TreeShape(1, 3, 2), TreeShape(3, 3, 5), TreeShape(8, 8, 63)])
def test_a_tree_has_the_best_nodes_of_all_levels(shape: TreeShape, device: torch.device) -> None:
    """Two requests, and one without rows; offers are coarse, so that there are ties, and some impossible."""
    requests, generator = 2, torch.Generator().manual_seed(shape.nodes)
    nodes, target = TreeNodes.of(shape, 3, device), batch(shape.nodes + 1, requests, 2, device)
    target["prefix_lens"][:2] = column([17, 3], device)
    levels = []
    for level in range(shape.depth):
        before = shape.width if level else 1
        chances = -torch.randint(0, 4, (3 * before, shape.width), generator=generator).float()
        chances = chances.sort(1, descending=True).values
        chances[0, shape.width - 1 :] = -torch.inf if shape.width > 1 else -1.0
        words = [torch.randperm(50, generator=generator)[: shape.width] for _ in chances]
        tokens = torch.stack(words).to(torch.int32)
        levels.append((tokens.view(3, before, -1), chances.view(3, before, -1)))
        grow(nodes, (tokens.to(device), chances.to(device)), level, shape)
    drafted = torch.full((3, 3, shape.nodes), -9, dtype=torch.int32, device=device)
    choose(nodes, target, shape, drafted)
    assert (drafted[2] == -9).all(), "a request without rows is left alone"
    for request, prefix in enumerate((17, 3)):
        rows = iter([list(zip(*(each[request].tolist() for each in level), strict=True)) for level in levels])

        def offers(_: Any, rows: Any = rows) -> Any:
            return [list(zip(*row, strict=True)) for row in next(rows)]

        tokens, parents, reach = best_tree(shape, offers)
        said, first = drafted[request], request * (shape.nodes + 1)
        own = slice(first, first + shape.nodes + 1)
        assert said[2].contiguous().view(torch.float32).tolist() == reach
        possible = [token if each > -torch.inf else -1 for token, each in zip(tokens, reach, strict=True)]
        assert said[0].tolist() == possible
        assert said[1].tolist() == parents
        assert target["input_ids"][own].tolist() == [0, *tokens]
        depths, masks = [0], [1]
        for row, parent in enumerate(parents, start=1):
            depths.append(depths[parent] + 1)
            masks.append(masks[parent] | 1 << row)
        assert target["positions"][own].tolist() == [prefix + depth for depth in depths]
        assert target["places"][own].tolist() == [prefix + depth + 1 for depth in depths]
        assert [mask % 2**64 for mask in target["masks"][own, 0].tolist()] == masks


@pytest.mark.parametrize("name", ["eagle", pytest.param("mtp", marks=pytest.mark.slow)])
def test_a_head_grows_the_tree_of_torch(name: str, device: torch.device) -> None:
    """Of two texts, one read further than the other."""
    config, tensors, shape = CHAINS[name], tensors_of(CHAINS[name]), TreeShape(2, 3, 5)
    ours = CudaChainHead(head_of(config), target_on(device), num_blocks=64)
    norm = NORM if name == "mtp" else None
    theirs = TorchChainHead(config, tensors, torch_target(), norm, CPU)
    counts, found = (3, 1), list[list[Feed]]()
    for head, rows in ((ours, shown(device)), (theirs, shown(CPU))):
        feeds = []
        for start, count in zip((15, 9), counts, strict=True):
            place = head.place()
            head.read(Feed(place, 0, TOKENS[:start], rows[:start]))
            part = slice(start, start + count)
            feeds.append(Feed(place, start, TOKENS[part], rows[part]))
        found.append(feeds)
    for feed in found[0]:
        feed.place.reserve(30)
    bucket = Bucket(2 * (shape.depth + 1), 2, shape.depth + 1, ours.decoder.num_blocks)
    recorded = HeadShape(bucket, 0, is_guessed=False, wanted=2, tree=shape)
    draft = TreeDraft(ours, recorded)
    samplers = [Sampler(0.0, 0, 19), Sampler(0.0, 0, 11)]
    values = ours.values(recorded, found[0], samplers, shape.depth + 1)
    draft.buffer.fill(values | {"limits": [30, 30]})
    target = batch(shape.nodes + 1, 2, 2, device)
    drafted = torch.zeros((2, 3, shape.nodes), dtype=torch.int32, device=device)
    choose(draft(), target, shape, drafted)
    begun = theirs.begin(found[1])
    for index, feed in enumerate(found[1]):
        tokens, parents, reach = best_tree(shape, torch_offers(theirs, feed, begun, index, shape))
        assert drafted[index, 0].tolist() == tokens
        assert drafted[index, 1].tolist() == parents
        claimed = drafted[index, 2].contiguous().view(torch.float32).tolist()
        assert claimed == pytest.approx(reach, abs=1e-3)


def torch_offers(head: TorchChainHead, feed: Feed, begun: Any, index: int, shape: TreeShape) -> Any:
    end, outputs, places = feed.start + len(feed.tokens), dict[tuple[int, ...], Any](), dict[Any, int]()
    ids = tensors_of(head.config).get("draft_ids")

    def offers(level: Sequence[tuple[int, tuple[int, ...]]]) -> Any:
        logits = begun.logits[index : index + 1]
        outputs[()] = begun.outputs[index]
        if level[0][0] >= 0:
            places.update({path: end + len(places) + i for i, (_, path) in enumerate(level)})
            nodes = []
            for _, path in level:
                others = [places[path[: i + 1]] for i in range(len(path))]
                at, position, above = places[path], end + len(path) - 1, outputs[path[:-1]]
                nodes.append(Node(feed.place, at, position, path[-1], above, end, others))
            said = head.level(nodes)
            logits = said.logits
            outputs.update({path: said.outputs[i] for i, (_, path) in enumerate(level)})
        best = logits.float().log_softmax(-1).topk(shape.width)
        words = best.indices if ids is None else ids[best.indices]
        return [
            list(zip(*each, strict=True)) for each in zip(words.tolist(), best.values.tolist(), strict=True)
        ]

    return offers


def test_what_is_between_two_rounds(device: torch.device) -> None:
    """Request 0 follows 0 -> 2 -> 4; request 1 stops before a child whose own pick is none, and its slots end
    where a row to come would lie. A third has no rows."""
    shape = TreeShape(2, 2, 4)
    target, head = batch(5, 2, 3, device), batch(3, 2, 3, device)
    target["slots"][:10] = column([14, 15, 16, 17, 18, 163, 164, 165, 166, 167], device)
    target["prefix_lens"][:2], target["limits"][:2] = column([14, 19], device), column([100, 22], device)
    head["prefix_lens"][:2], head["limits"][:2] = column([13, 17], device), column([100, 20], device)
    head["wanted"][:2], head["places"][:2] = (
        column([0, 4], device, torch.int64),
        column([15, 20], device, torch.int64),
    )
    picked = column([8, 0, 9, 0, 7, 5, -1, 0, 0, 0, *[0] * 5], device, torch.int64)
    tokens = [[6, 8, 9, 9], [5, 1, 2, 3], [0] * 4]
    parents = [[0, 0, 1, 2], [0, 0, 1, 1], [0] * 4]
    drafted = torch.stack([column(each, device) for each in (tokens, parents, [[11, 12, 13, 14]] * 3)], 1)
    walked, number = Walked.of(shape, 3, device), column([0, 0, 0], device)
    walked.accepted[2] = 7
    rounds = torch.full((2, 3, 17), -9, dtype=torch.int32, device=device)
    walk(target, picked, head, (999, 888), drafted.contiguous(), walked, number, rounds)
    assert number.tolist() == [1, 1, 0]
    assert rounds[0, 0].tolist() == [*tokens[0], *parents[0], 11, 12, 13, 14, 8, 0, 9, 0, 7]
    assert walked.accepted.tolist() == [2, 0, 0]
    assert walked.rows[:2].tolist() == [[0, 2, 4], [5, 5, 5]]
    assert walked.sources[0].tolist() == [14, 16, 18]
    assert walked.targets[0].tolist() == [14, 15, 16]
    assert target["prefix_lens"].tolist()[:2] == [17, 20]
    assert target["input_ids"][[0, 5]].tolist() == [7, 5]
    assert target["slots"][:10].tolist() == [17, 18, 19, 20, 21, 180, 181, 999, 999, 999]
    assert head["prefix_lens"].tolist()[:2] == [14, 19]
    assert head["input_ids"][:3].tolist() == [8, 9, 7]
    assert head["input_ids"][3].item() == 5
    assert head["positions"][:6].tolist() == [14, 15, 16, 19, 20, 21]
    assert head["slots"][:6].tolist() == head["written"][:6].tolist() == [14, 15, 16, 179, 888, 888]
    assert head["wanted"][:2].tolist() == [2, 3]
    assert head["places"][:2].tolist() == [18, 21]


def test_lines_move_as_if_all_were_read_first(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers with lines of different widths, in more than one piece."""
    monkeypatch.setattr(moving, "BLOCK", 8)
    generator = torch.Generator().manual_seed(1)
    kv = [tuple(torch.randn(20, 2, w, generator=generator).to(device) for w in (4, 6)) for _ in range(2)]
    before = [[each.clone() for each in layer] for layer in kv]
    sources, targets = (
        column([[3, 5, 6, 9], [11, 13, 0, 0]], device),
        column([[3, 4, 5, 6], [11, 12, 0, 0]], device),
    )
    move(Caches.of(kv), column([3, 1], device), sources, targets)
    for layer, old in zip(kv, before, strict=True):
        for each, other in zip(layer, old, strict=True):
            other[[4, 5, 6, 12]] = other[[5, 6, 9, 13]]
            assert torch.equal(each, other)


GREEDY, DRAWN, UNSEEDED = {"temperature": 0.0}, {"temperature": 0.5, "seed": 4}, {"temperature": 0.5}


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        (TreeShape(2, 2, 3), [GREEDY]),
        pytest.param(TreeShape(3, 2, 5), [DRAWN, UNSEEDED], marks=pytest.mark.slow),
    ],
)
def test_texts_are_plain_decodings(
    shape: TreeShape,
    how: Sequence[dict[str, Any]],
    head: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaBurstBackend, "most_rounds", 3)
    prompts = (CHANGING, STEADY)
    ours, theirs = (
        [
            request_of(prompt, SamplingParams(**each, max_tokens=9, ignore_eos=True), seed=i)
            for i, (prompt, each) in enumerate(zip(prompts, how, strict=False))
        ]
        for _ in range(2)
    )
    engine = engine_on(device, head, shape)
    launched = bursts_of(engine)
    said = run(engine, ours)
    plain(theirs)
    assert [one.output for one in ours] == [one.output for one in theirs]
    assert {one.given.tree for one in launched} == {shape}
    assert engine.totals.num_accepted >= 2
    drafts = [one.draft for one in said if one.draft is not None and one.draft.num_drafted]
    assert {draft.num_drafted for draft in drafts} == {shape.nodes}


@pytest.mark.slow
def test_three_that_end_within_bursts(
    head: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a token, by the end of the context and by their length; recorded is for four."""
    monkeypatch.setattr(CudaBurstBackend, "most_rounds", 3)
    stop, long, short = (
        SamplingParams(temperature=0.0, max_tokens=each, stop_token_ids=(31,)) for each in (40, 40, 5)
    )
    ours, theirs = (
        [request_of(*each) for each in ((CHANGING, stop), (STEADY, long), ([7, 8, 9], short))]
        for _ in range(2)
    )
    engine = engine_on(device, head, TreeShape(2, 2, 3), limit=14)
    launched = bursts_of(engine)
    run(engine, ours)
    plain(theirs, limit=14)
    assert [one.output for one in ours] == [one.output for one in theirs]
    assert [one.finish_reason for one in ours] == [one.finish_reason for one in theirs]
    assert {len(one.given.feeds) for one in launched} >= {3}


@pytest.mark.slow
def test_accepted_rows_lie_where_a_plain_pass_puts_them(
    head: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaBurstBackend, "most_rounds", 4)
    """In exact mode with the same bits."""
    engine = engine_on(device, head, TreeShape(3, 2, 5), exact=True)
    request = request_of(CHANGING, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    engine.add(request)
    paths = list[tuple[int, ...]]()
    while request.num_output < 6:
        paths += [one.path for one in engine.step()]
    assert any(path != tuple(range(len(path))) for path in paths), "none had to move"
    count = request.cache.num_cached
    fresh = LocalExecutor(engine.executor.backend, engine.executor.decoder, KvMemory(TINY, 4, device))
    cached, kept = Cached(), list[list[torch.Tensor]]()
    fresh.kv.reserve(cached, count)
    fresh.forward([Segment(request.tokens[:count], cached)])
    for executor, one in ((engine.executor, request.cache), (fresh, cached)):
        slots = executor.kv.slots(one, 0, count)
        kept.append([each[slots] for layer in executor.memory.layers for each in layer])
    for ours, theirs in zip(*kept, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_chains_and_trees_in_turn(head: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on where another has ended, in the target's cache and in the head's."""
    monkeypatch.setattr(CudaBurstBackend, "most_rounds", 2)
    shape, turns = TreeShape(2, 2, 3), cycle((None, TreeShape(2, 2, 3)))
    monkeypatch.setattr(heads, "BURST_TREES", {3: shape})
    backend = CudaBackend(device, False, capture_on(device))
    executor = LocalExecutor(backend, backend.load(TARGET, "float32"), KvMemory(TINY, 16, device))
    options = {"method": "eagle", "model": head, "num_speculative_tokens": 1, "burst_nodes": [3]}
    context = DrafterContext(executor, TARGET, None, lambda *_: None)  # type: ignore[arg-type]
    drafter = registry.create(*registry.parse(options), context)
    engine = ahead(Engine(executor, drafter, config_with(1, 100)))
    engine.policy.tree = lambda *_: next(turns)  # type: ignore[method-assign]
    launched = bursts_of(engine)
    ours, theirs = (
        request_of(CHANGING, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        for _ in range(2)
    )
    run(engine, [ours])
    plain([theirs])
    assert ours.output == theirs.output
    assert {one.given.tree for one in launched} == {None, shape}
