"""Paged tree attention against plain torch, and the bits of a row, which do not depend on the others of its launch."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from paceline.core.types import ColumnsOf
from paceline.cuda import attention
from paceline.cuda.attention import LOG2_E, Attending, Tiling, attend, launch_for, paths_of
from paceline.cuda.batch import Bucket, DeviceBatch, ancestor_words, target_buffer
from paceline.models.attention import Masking, TorchAttention

pytestmark = pytest.mark.slow  # interpreted where there is no GPU

BLOCK = 16
POOL = 160  # blocks of the cache, the last of them trash


class Asked(NamedTuple):
    """One request: its cached tokens and the parent of each of its rows, -1 for one that follows the
    prefix.
    """

    prefix: int
    parents: tuple[int, ...]


class Shape(NamedTuple):
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    dtype: torch.dtype = torch.float32
    window: int | None = None


class Case(NamedTuple):
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    batch: DeviceBatch
    parents: torch.Tensor
    shape: Shape
    max_rows: int
    is_exact: bool = False
    counters: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def launch(self) -> Tiling:
        return launch_for(self.q, self.keys, self.batch, self.how)

    @property
    def how(self) -> Attending:
        paths = paths_of(self.batch) if self.is_exact and self.max_rows > 1 else None
        return Attending(
            self.shape.dim**-0.5, self.max_rows, self.shape.window, is_exact=self.is_exact, paths=paths,
            counters=self.counters, sinks=None if self.sinks is None else self.sinks.to(self.q.device) * LOG2_E,
        )  # fmt: skip

    def attend(self) -> torch.Tensor:
        out = torch.full_like(self.q, float("nan"))
        attend(self.q, (self.keys, self.values), self.batch, self.how, out)
        return out

    def oracle(self) -> torch.Tensor:
        """In float32, from the same numbers."""
        columns = [column.cpu().long() for column in self.batch]
        names = dict(zip(DeviceBatch._fields, columns, strict=True))
        names.pop("masks")
        names["block_tables"] = names["block_tables"].T
        masking = Masking(self.shape.dim**-0.5, self.shape.window, sinks=self.sinks)
        names["parents"] = self.parents
        names["request_of"] = torch.arange(len(names["prefix_lens"])).repeat_interleave(
            names["starts"].diff()
        )
        plain = TorchAttention(
            ColumnsOf(**names, rows=torch.empty(0), states_in=torch.empty(0), states_out=torch.empty(0))
        )
        q, keys, values = self.q.cpu().float(), self.keys.cpu().float(), self.values.cpu().float()
        return torch.cat([plain._attend(q, keys, values, span, masking) for span in plain.spans])


def chain(num_rows: int) -> tuple[int, ...]:
    return tuple(range(-1, num_rows - 1))


def random_tree(num_rows: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return (-1, *(rng.randrange(row) for row in range(1, num_rows)))


def depths(parents: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def noise(tag: str, count: int, shape: Shape, heads: int) -> torch.Tensor:
    """[count, heads, dim], the same for the same tag: a row keeps its numbers wherever it is put."""
    generator = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(tag)))
    return torch.randn(count, heads, shape.dim, generator=generator).to(shape.dtype)


def make(
    requests: list[Asked],
    shape: Shape,
    device: torch.device,
    *,
    padding: int = 0,
    empty: int = 0,
    max_context: int = 64,
    max_rows: int = 0,
) -> Case:
    """Requests in scattered blocks, then `empty` requests without rows, then one of `padding` rows that see
    themselves.
    """
    free = list(range(POOL - 1))
    random.Random(len(requests)).shuffle(free)
    trash = POOL * BLOCK - 1
    keys = torch.full(
        (POOL * BLOCK, shape.kv_heads, shape.dim), 1e4, dtype=shape.dtype
    )  # what no row should see would be noticed
    values, queries = keys.clone(), []
    columns: dict[str, list[int]] = {name: [] for name in ("positions", "slots", "parents", "prefix_lens")}
    starts, tables = [0], []
    for index, (prefix, parents) in enumerate(requests):
        table = [free.pop() for _ in range(-(-(prefix + len(parents)) // BLOCK))]
        slots = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(prefix + len(parents))]
        for name, cache in (("k", keys), ("v", values)):
            cache[slots] = noise(f"{name}{index}", 2000, shape, shape.kv_heads)[: len(slots)]
        queries.append(noise(f"q{index}", 200, shape, shape.heads)[: len(parents)])
        columns["positions"] += [prefix + depth for depth in depths(parents)]
        columns["slots"] += slots[prefix:]
        columns["parents"] += [-1 if p < 0 else starts[-1] + p for p in parents]
        columns["prefix_lens"].append(prefix)
        starts.append(starts[-1] + len(parents))
        tables.append(table)
    starts += [starts[-1]] * empty
    columns["prefix_lens"] += [0] * empty
    tables += [[]] * empty
    if padding:
        keys[trash] = values[trash] = 1.0
        queries.append(noise("padding", padding, shape, shape.heads))
        for name, number in (("positions", 0), ("slots", trash), ("parents", -1)):
            columns[name] += [number] * padding
        columns["prefix_lens"].append(0)
        starts.append(starts[-1] + padding)
        tables.append([])
    longest = max(max_rows, padding, *(len(r.parents) for r in requests))
    context = max(max_context, *(r.prefix for r in requests))
    width = context // BLOCK + 1
    flat = {
        name: torch.tensor(columns[name], dtype=torch.int32, device=device)
        for name in ("positions", "slots", "prefix_lens")
    }
    batch = DeviceBatch(
        **flat,
        input_ids=torch.zeros(starts[-1], dtype=torch.int32, device=device),
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        block_tables=torch.tensor(
            [(table + [0] * width)[:width] for table in tables], dtype=torch.int32, device=device
        ).T.contiguous(),
        masks=torch.from_numpy(ancestor_words(columns["parents"], starts, -(-longest // 64)).copy()).to(
            device
        ),
    )
    q, above = torch.cat(queries).to(device), torch.tensor(columns["parents"])
    return Case(q, keys.to(device), values.to(device), batch, above, shape, longest)


def check(case: Case) -> None:
    """float32: scores of `dim` products of size 1 and sums of at most 1000 terms, each rounded at 2^-24: 1e-5
    is ten times that. Narrow types: the weights, which sum to 1, are rounded once and so is the result (the
    interpreter cuts off), each by at most eps of the largest value.
    """
    expected, out = case.oracle(), case.attend().cpu().float()
    eps = 0.0 if case.shape.dtype == torch.float32 else torch.finfo(case.shape.dtype).eps
    largest = expected.abs().max().item()
    torch.testing.assert_close(out, expected, atol=1e-5 + 2 * eps * largest, rtol=0.0)


RAGGED = [
    Asked(prefix, random_tree(rows, prefix))
    for prefix, rows in ((0, 5), (1, 1), (15, 7), (16, 3), (17, 12), (130, 2))
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_ragged_trees(dtype: torch.dtype, window: int | None, device: torch.device) -> None:
    check(make(RAGGED, Shape(dtype=dtype, window=window), device, padding=3, empty=2))


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (9, 3), (8, 2), (8, 1), (20, 1)])
@pytest.mark.parametrize("dim", [16, 80, 96])
def test_groups_and_widths(heads: int, kv_heads: int, dim: int, device: torch.device) -> None:
    check(make(RAGGED[1:4], Shape(heads, kv_heads, dim), device, padding=1))


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("most", [4, 16])
def test_long_context_in_splits(
    window: int | None, most: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More or fewer splits than the context has tiles."""
    monkeypatch.setattr(attention, "MOST_SPLITS", most)
    case = make([Asked(700, random_tree(6, 1)), Asked(3, (-1,))], Shape(window=window), device, padding=1)
    assert case.launch.num_splits == most
    check(case)


def test_more_splits_than_are_added_at_a_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST_SPLITS", 16)
    monkeypatch.setattr(attention, "ALONE", attention.FEW_ROWS._replace(together=4))
    case = make([Asked(700, (-1,))], Shape(2, 1, 16), device)
    assert case.launch.num_splits == 16 > 2 * case.launch.together
    check(case)


@pytest.mark.parametrize("parents", [chain(150), random_tree(150, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("prefix", [0, 63, 77])
@pytest.mark.parametrize("window", [None, 33])
def test_rows_of_several_mask_words(
    parents: tuple[int, ...], prefix: int, window: int | None, device: torch.device
) -> None:
    check(make([Asked(prefix, parents)], Shape(2, 1, 16, window=window), device))


def test_prompt_of_more_rows_than_are_split(device: torch.device) -> None:
    case = make([Asked(40, chain(190)), Asked(0, chain(90))], Shape(2, 1, 16), device)
    assert case.launch.num_splits == 1
    check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_whoever_shares_the_launch(dtype: torch.dtype, device: torch.device) -> None:
    """In one bucket of 24 rows, at most 16 of a request: alone, among others, before further rows of its own
    request.
    """
    shape, tree = Shape(2, 1, dtype=dtype), random_tree(9, 5)
    alone = make([Asked(300, tree)], shape, device, padding=15, max_rows=16).attend()[:9]
    others = [Asked(300, tree), Asked(17, chain(7)), Asked(0, chain(4))]
    grown = [Asked(300, (*tree, *[8] * 7)), Asked(90, chain(8))]
    assert torch.equal(make(others, shape, device, padding=4, empty=2, max_rows=16).attend()[:9], alone)
    assert torch.equal(make(grown, shape, device, max_rows=16).attend()[:9], alone)


@pytest.mark.parametrize("prefix", [315, 1090])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_chain_however_it_is_cut(dtype: torch.dtype, prefix: int, device: torch.device) -> None:
    """In exact mode the last 8 tokens in one pass have the bits of 8 passes of one row, in any bucket."""
    shape = Shape(2, 1, dtype=dtype)
    together = make([Asked(prefix, chain(8))], shape, device)._replace(is_exact=True)
    out = together.attend()
    for row, padding, max_context in ((0, 0, 512), (5, 3, 1024), (7, 0, 2048)):
        single = make([Asked(prefix + row, (-1,))], shape, device, padding=padding, max_context=max_context)
        query = torch.cat([together.q[row : row + 1], single.q[1:]])
        assert torch.equal(single._replace(q=query, is_exact=True).attend()[0], out[row])


@pytest.mark.parametrize(
    ("dtype", "prefix", "window"),
    [
        (torch.float32, 125, None),
        (torch.bfloat16, 380, None),
        (torch.bfloat16, 125, 40),
        (torch.float32, 0, 40),
    ],
)
def test_bits_of_a_node_wherever_in_a_tree(
    dtype: torch.dtype, prefix: int, window: int | None, device: torch.device
) -> None:
    """In exact mode every node has the bits of a plain step after its own path, whatever else is in the tree
    and in the pass. A border between splits is within the trees at 125 and 380."""
    shape, tree = Shape(4, 2, 16, dtype=dtype, window=window), random_tree(9, 5)
    asked = [Asked(prefix, tree), Asked(7, chain(5)), Asked(130, random_tree(6, 1))]
    together = make(asked, shape, device, padding=3, max_context=512)._replace(is_exact=True)
    out, table = together.attend(), together.batch.slots.tolist()
    torch.testing.assert_close(out.cpu().float(), together.oracle(), atol=2e-2, rtol=2e-2)
    for row in range(len(tree)):
        path = [row]
        while tree[path[0]] >= 0:
            path.insert(0, tree[path[0]])
        single = make([Asked(prefix + len(path) - 1, (-1,))], shape, device, max_context=512)
        for place, node in enumerate(path, prefix):
            at = int(single.batch.block_tables[place // BLOCK, 0]) * BLOCK + place % BLOCK
            single.keys[at], single.values[at] = together.keys[table[node]], together.values[table[node]]
        single = single._replace(q=together.q[row : row + 1], is_exact=True)
        assert torch.equal(single.attend()[0], out[row]), row


def test_a_path_is_its_slots_in_order(device: torch.device) -> None:
    tree = random_tree(150, 3)  # three words of a mask
    case = make([Asked(4, chain(3)), Asked(9, tree)], Shape(), device, padding=2)
    paths, slots = paths_of(case.batch).tolist(), case.batch.slots.tolist()
    for row, parent in enumerate(tree):
        before = [] if parent < 0 else paths[3 + parent][: depths(tree)[parent] + 1]
        assert paths[3 + row][: len(before) + 1] == [*before, slots[3 + row]]


def test_paths_of_padding_rows_lead_to_the_trash(device: torch.device) -> None:
    """More of them than a tree may have: none reads a path that was never written."""
    bucket = Bucket(5 * 64, 1, 5 * 64, 1)
    buffer = target_buffer(bucket, 1, 999, device)
    assert paths_of(DeviceBatch.of(buffer.on_device))[:, 0].unique().tolist() == [999]


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_sinks_weigh_once(window: int | None, is_exact: bool, device: torch.device) -> None:
    """Rows of a pass on both sides of a border between splits, which is at 384 in exact mode."""
    shape, sinks = Shape(4, 2, 16, window=window), torch.tensor([3.0, -2.0, 0.0, 5.0])
    case = make([Asked(380, chain(8)), Asked(3, chain(2))], shape, device, max_context=512)
    case = case._replace(is_exact=is_exact, sinks=sinks)
    found = case.attend()
    torch.testing.assert_close(found.cpu(), case.oracle(), atol=2e-5, rtol=2e-5)
    single = make([Asked(382, (-1,))], shape, device, max_context=512)._replace(q=case.q[2:3], sinks=sinks)
    assert not is_exact or torch.equal(single._replace(is_exact=True).attend()[0], found[2])


def test_bits_of_a_row_in_any_bucket_of_contexts(device: torch.device) -> None:
    """Splits of a bucket of short contexts are added all at once, those of a long one in turns, most of them
    empty.
    """
    tree, shape = random_tree(6, 2), Shape(2, 1, 16, dtype=torch.bfloat16)
    short, long = (
        make([Asked(500, tree)], shape, device, max_rows=8, max_context=size)._replace(is_exact=True)
        for size in (512, 4096)
    )
    assert short.launch.num_splits <= short.launch.together == long.launch.together < long.launch.num_splits
    assert torch.equal(short.attend(), long.attend())


@pytest.mark.parametrize("num_loops", [1, 2])
@pytest.mark.parametrize(("near", "far"), [(0, 0), (64, 64), (64, 192), (128, 256)])
def test_every_tiling_has_the_same_sums(
    near: int, far: int, num_loops: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "ALONE", Tiling(32, 4, 3, 768, num_loops, 8, near, far))
    check(make([Asked(1200, random_tree(4, 1)), Asked(3, (-1,))], Shape(6, 2), device, padding=2))


@pytest.mark.parametrize("rows", [3, 6])
@pytest.mark.parametrize("window", [None, 40, 100, 300])
def test_a_tile_at_once_has_the_bits_of_a_loop(
    rows: int, window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also such as a window begins within; the other request ends within its first."""
    case = make(
        [Asked(330, random_tree(rows, 4)), Asked(3, (-1,))],
        Shape(4, 2, dtype=torch.bfloat16, window=window),
        device,
        padding=1,
    )
    monkeypatch.setattr(attention, "MOST_SPLITS", 8)
    assert case.launch.has_short
    check(case)
    at_once = case.attend()
    monkeypatch.setattr(attention, "SHORT_BYTES", 0)
    assert not case.launch.has_short
    assert torch.equal(case.attend(), at_once)


@pytest.mark.parametrize("sizes", [(0, 0), (64, 128)])
@pytest.mark.parametrize(("window", "together", "by_last"), [(None, 4, 2), (100, 32, 16)])
def test_the_last_program_adds_splits_with_the_same_bits(
    window: int | None, together: int, by_last: int, sizes: tuple[int, int], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of requests with near and far splits, with one, and with rows for several tiles; splits in several
    chunks and in one.
    """
    case = make(
        [Asked(1200, (-1,)), Asked(3, (-1, 0)), Asked(77, chain(11))],
        Shape(3, 1, 16, torch.bfloat16, window),
        device,
        padding=2,
    )
    counters, tiling = (
        torch.zeros(len(case.q) + 4, dtype=torch.int32, device=device),
        Tiling(16, 4, 3, 768, 1, together, *sizes),
    )
    monkeypatch.setattr(attention, "MOST_SPLITS", 16)
    monkeypatch.setattr(attention, "FEW_ROWS", tiling)
    apart = case.attend()
    monkeypatch.setattr(attention, "FEW_ROWS", tiling._replace(by_last=by_last))
    monkeypatch.setattr(attention, "add_splits", None)  # nothing else adds them
    assert torch.equal(case._replace(counters=counters).attend(), apart)
    assert not counters.any(), "ready for the next launch"


def test_fixed_splits_are_whole_tiles() -> None:
    assert attention.EXACT.near_size % attention.PLACES.value == 0
    assert attention.EXACT.far_size % attention.PLACES.value == 0


@pytest.mark.parametrize("dim", [32, 48])
def test_keys_and_values_of_integers(dim: int, device: torch.device) -> None:
    """Rounded by `keep`, which is what cuda/rows.py does: the oracle gets what the integers stand for."""
    case = make([Asked(200, random_tree(6, 1)), Asked(5, chain(3))], Shape(4, 2, dim, torch.float16), device)

    def keep(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = cache.float().abs().amax(-1, keepdim=True) / 127
        integers = (cache.float() / scales + 0.5).floor().to(torch.int8)
        tail = torch.nn.functional.pad(scales.contiguous().view(torch.int8), (0, 12))
        return torch.cat([integers, tail], -1).contiguous(), (integers * scales).half()

    (keys, whole_keys), (values, whole_values) = keep(case.keys), keep(case.values)
    wanted = case._replace(keys=whole_keys, values=whole_values).oracle()
    torch.testing.assert_close(
        case._replace(keys=keys, values=values).attend().float().cpu(), wanted, atol=4e-3, rtol=4e-3
    )
