"""Compiles the CPU's kernels before the tests, in two processes: `python -m tests.compile_kernels`.

Test workers would each compile all of them, at the same time and the same ones. What is in the cache already
costs seconds."""

from __future__ import annotations

import importlib
import sys
from subprocess import Popen

from paceline.cpu.compile import entry_of

# by process, about as long each; module and kernel, which take whole numbers alone
SHARES = (
    ("forward.forward_4", "forward.forward_8", "burst_kernel.run_burst", "medusa.draft_heads"),
    (
        "block_head.draft_blocks",
        "chain_head.draft_chains",
        "forward.forward_32",
        "votes.draft",
        "lookup.draft",
    ),
)


def main() -> int:
    if sys.argv[1:]:
        for name in SHARES[int(sys.argv[1])]:
            module, _, kernel = name.partition(".")
            compiled = getattr(importlib.import_module(f"paceline.cpu.{module}"), kernel)
            entry_of(compiled, compiled.py_func.__code__.co_argcount)
        return 0
    print("compiling the kernels for this machine (once, two minutes)", flush=True)
    shares = [Popen([sys.executable, "-m", "tests.compile_kernels", str(i)]) for i in range(len(SHARES))]
    return max(share.wait() for share in shares)


if __name__ == "__main__":
    raise SystemExit(main())
