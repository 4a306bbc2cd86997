"""Compiles the CPU's kernels before the tests, in two processes: `python -m tests.compile_kernels`.

Test workers would each compile all of them, at the same time and the same ones. What is on disk already costs
seconds."""

from __future__ import annotations

from paceline.cpu import backend, lookup, votes  # noqa: F401
from paceline.cpu.compile import BESIDE, compile_beside

# by process, about as long each
SHARES = (
    ("forward.forward_4", "forward.forward_8", "burst_kernel.run_burst", "medusa.draft_heads", "votes.draft"),
    ("block_head.draft_blocks", "forward.forward_32", "chain_head.draft_chains", "lookup.draft"),
)

if __name__ == "__main__":
    print("compiling the kernels for this machine (once, two minutes)", flush=True)
    for share in SHARES:
        compile_beside(*share)
    raise SystemExit(max((process.wait() for process in BESIDE), default=0))
