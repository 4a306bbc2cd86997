"""How close a step on a GPU comes to its linear layers alone: `python scripts/gpu_step.py --shape llama-8b`.

Random weights of the model's shape. Timed with events on the device, whole graphs: the linear layers alone;
plain decoding; trees of drafted nodes. The wall clock of a forward call, host work included, is printed
beside. Invariant: everything compared is timed in one run, in turns, and medians are reported.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from paceline.core.types import Cached, Pick, Segment
from paceline.cuda.decoder import CudaDecoder
from paceline.cuda.graphs import CudaCapture, Recording
from paceline.cuda.linear import Matrix
from paceline.loaders.dummy import SHAPES, DummyCheckpoint
from paceline.models.config import ModelConfig
from paceline.runtime.kv_cache import BLOCK_SIZE, Kept, KvCache
from paceline.runtime.runner import Runner

UNTIMED, TIMED = 12, 6  # replays of a turn: clocks follow the load within tens of milliseconds
TREE_BRANCHES = 4  # children of the root; further nodes hang in chains below


def tree_parents(num_nodes: int) -> list[int]:
    """A root and `num_nodes` drafted nodes: a few branches, each a chain."""
    return [-1] + [0 if i < TREE_BRANCHES else i - TREE_BRANCHES + 1 for i in range(num_nodes)]


def torchs(matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, matrix.weight.packed, matrix.bias)


def linears_alone(
    decoder: CudaDecoder, rows: int, multiply: Callable[[Matrix, torch.Tensor], torch.Tensor]
) -> Recording:
    """The products of a pass and nothing else, in one graph."""
    config, weights = decoder.config, decoder.weights
    widths = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    narrow, heads, wide = (
        torch.randn((rows, width), dtype=weights.dtype, device=decoder.device) for width in widths
    )

    def run() -> torch.Tensor:
        for layer in weights.layers:
            for matrix, x in (
                (layer.qkv, narrow),
                (layer.out, heads),
                (layer.gate_up, narrow),
                (layer.down, wide),
            ):
                multiply(matrix, x)
        return multiply(weights.head, narrow)

    return CudaCapture()(run)


def in_turns(runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Median ms of each. A device that grows warm is a percent or two slower, so all are timed cold and warm
    alike; and what ran before matters as much, so each runs a few times by itself before its turn counts."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(-(-repeats // TIMED)):
        for run, its_times in zip(runs, times, strict=True):
            for i in range(UNTIMED + TIMED):
                start.record()
                run()
                end.record()
                end.synchronize()
                if i >= UNTIMED:
                    its_times.append(start.elapsed_time(end))
    return [median(each) for each in times]


class Steps:
    """Passes over a cached context of one request or several, the same again and again."""

    def __init__(
        self, config: ModelConfig, dtype: str, context: int, requests: int, exact: bool = False
    ) -> None:
        self.decoder = CudaDecoder.load(DummyCheckpoint(config, "cuda"), dtype=dtype, exact=exact)
        blocks = requests * -(-(context + 300) // BLOCK_SIZE)
        kept = Kept(self.decoder.weights.dtype, self.decoder.weights.dtype)
        self.runner = Runner(self.decoder, KvCache(config, blocks, device="cuda", kept=kept, has_spare=True))
        self.caches = [Cached() for _ in range(requests)]
        for cache in self.caches:
            assert self.runner.kv.reserve(cache, context + 280), "the caller made room"

    def set_context(self, context: int) -> None:
        for cache in self.caches:
            cache.num_cached = context

    def forward(self, nodes: int, requests: int) -> Any:
        parents = tree_parents(nodes)
        tokens = [(7 * i) % self.decoder.config.vocab_size for i in range(nodes + 1)]
        segments = [
            Segment(tokens, cache, parents, nodes + 1, Pick(0.0, 0)) for cache in self.caches[:requests]
        ]
        return self.runner.forward(segments)

    def recording(self, nodes: int, requests: int) -> Recording:
        """The graph that a forward of this shape replays."""
        self.forward(nodes, requests)
        return next(reversed(self.decoder._graphs._recordings.values()))[0]

    def wall_ms(self, nodes: int, requests: int, repeats: int) -> float:
        self.forward(nodes, requests)
        torch.cuda.synchronize()
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            self.forward(nodes, requests)
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - started))
        return median(times)


def transformers_ms(config: ModelConfig, context: int, tokens: int) -> float:
    """A token of transformers' generate with a model of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    described = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_context, tie_word_embeddings=config.tie_embeddings,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(described).to(torch.bfloat16).eval()
    ids = torch.randint(0, config.vocab_size, (1, context), device="cuda")
    times = {}
    for count in (1, 1, 1 + tokens, 1, 1 + tokens):
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(
            ids,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            attention_mask=torch.ones_like(ids),
        )
        torch.cuda.synchronize()
        times[count] = time.perf_counter() - started
    del model
    torch.cuda.empty_cache()
    return 1000 * (times[1 + tokens] - times[1]) / tokens


def alone(steps: Steps, nodes: int) -> dict[str, Recording]:
    """The linear layers by themselves: torch's where weights are whole, and ours."""
    is_whole = steps.decoder.weights.head.weight.is_whole
    ways = {"linears_ms": torchs if is_whole else Matrix.__call__, "our_linears_ms": Matrix.__call__}
    return {name: linears_alone(steps.decoder, nodes + 1, way) for name, way in ways.items()}


def report_ratios(records: Sequence[dict[str, Any]]) -> None:
    """Of one context, each to the fewest nodes of its dtype and to the first of all."""
    for record in records:
        own = next(each for each in records if each["dtype"] == record["dtype"])
        ratios = (record["step_ms"] / other["step_ms"] for other in (own, records[0]))
        print(
            "context {context} {dtype:8} {nodes:3} nodes: ".format(**record),
            *(f"{ratio:.3f}" for ratio in ratios),
            flush=True,
        )


def measure(
    shape: str,
    dtypes: Sequence[str],
    contexts: Sequence[int],
    nodes: Sequence[int],
    repeats: int,
    exact: bool,
) -> list[dict[str, Any]]:
    every = {dtype: Steps(SHAPES[shape], dtype, max(contexts), 1, exact) for dtype in dtypes}
    cases = [(dtype, n) for dtype in dtypes for n in nodes]
    linears, records = {case: alone(every[case[0]], case[1]) for case in cases}, []
    for context in contexts:
        for steps in every.values():
            steps.set_context(context)
        graphs = {
            (dtype, n): {"step_ms": every[dtype].recording(n, 1), **linears[dtype, n]} for dtype, n in cases
        }
        spent = iter(in_turns([each.replay for parts in graphs.values() for each in parts.values()], repeats))
        for (dtype, n), parts in graphs.items():
            record: dict[str, Any] = {
                "shape": shape,
                "dtype": dtype,
                "exact": exact,
                "context": context,
                "nodes": n,
            }
            record |= {name: round(next(spent), 4) for name in parts}
            record |= {
                "wall_ms": round(every[dtype].wall_ms(n, 1, repeats), 4),
                "gigabytes": round(every[dtype].decoder.num_bytes / 1e9, 3),
            }
            records.append(record)
            print(json.dumps(record), flush=True)
        report_ratios([record for record in records if record["context"] == context])
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--dtypes", default="bfloat16,int4,int8")
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--nodes", default="0,7,15,31,63", help="drafted nodes beside the root")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--exact", action="store_true", help="in exact mode")
    parser.add_argument("--transformers", action="store_true", help="time transformers' generate too")
    parser.add_argument("--json", help="also write the records to this file")
    asked = parser.parse_args()
    contexts, nodes = ([int(number) for number in text.split(",")] for text in (asked.contexts, asked.nodes))
    records = measure(asked.shape, asked.dtypes.split(","), contexts, nodes, asked.repeats, asked.exact)
    if asked.transformers:
        record = {
            "shape": asked.shape,
            "engine": "transformers",
            "wall_ms": transformers_ms(SHAPES[asked.shape], contexts[0], 64),
        }
        records.append(record)
        print(json.dumps(record), flush=True)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()
