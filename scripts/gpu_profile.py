"""Where the time of a step on a GPU goes, kernel by kernel: `python scripts/gpu_profile.py --nodes 0,15,63`.

Replays the graph of a pass under torch's profiler. Kernels that start early wait for the one before, and that
counts as theirs: so sums are larger than the step, and what matters is how a kernel's share changes with the
rows. Invariant: random weights, one run, all in turns.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable

import torch
from gpu_step import Steps, in_turns
from torch.profiler import ProfilerActivity, profile

from paceline.loaders.dummy import SHAPES

REPLAYS = 8


def kernel_us(replay: Callable[[], None]) -> dict[str, tuple[float, int]]:
    """By kernel: microseconds of a replay, and launches."""
    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent, count = found[event.name]
            found[event.name] = spent + event.device_time_total / REPLAYS, count + 1
    return {name: (spent, count // REPLAYS) for name, (spent, count) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--nodes", default="0,15,63")
    asked = parser.parse_args()
    steps, columns = Steps(SHAPES[asked.shape], asked.dtype, asked.context, 1), []
    steps.set_context(asked.context)
    for nodes in (int(count) for count in asked.nodes.split(",")):
        recording = steps.recording(nodes, 1)
        columns.append((nodes, 1000 * in_turns([recording.replay], 30)[0], kernel_us(recording.replay)))
    names = sorted(
        {name for _, _, found in columns for name in found},
        key=lambda name: -columns[0][2].get(name, (0.0, 0))[0],
    )
    print(f"{'us a step':40}", *(f"{nodes + 1:>6} rows" for nodes, _, _ in columns))
    print(f"{'the whole graph':40}", *(f"{whole:11.1f}" for _, whole, _ in columns))
    for name in names:
        print(
            f"{name:40.40}", *("{:7.1f} ({:3})".format(*found.get(name, (0.0, 0))) for _, _, found in columns)
        )


if __name__ == "__main__":
    main()
