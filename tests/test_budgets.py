"""A public line budget: the cheapest known defence against growth. Raise a number only with a reason in the commit; lower it
whenever a folder has become smaller.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "paceline"
LINES = {
    "api": 660, "core": 1_550, "engine": 2_010, "runtime": 980, "models": 830, "heads": 935, "drafters": 2_190,
    "cpu": 6_080, "cuda": 3_790, "loaders": 3_450, "train": 2_280, "measure": 4_540, "server": 3_410, "cli": 2_890,
}  # fmt: skip
LONGEST = 60  # lines of a function, outside Triton's kernels and the entry points of verbs


@pytest.mark.parametrize("folder", sorted(path.name for path in ROOT.iterdir() if path.is_dir()))
def test_a_folder_keeps_its_budget(folder: str) -> None:
    sources = list((ROOT / folder).rglob("*.py"))
    if not sources:
        return  # data
    num_lines = sum(path.read_text(encoding="utf-8").count("\n") for path in sources)
    assert num_lines <= LINES[folder], f"{folder} has {num_lines} lines"


def test_functions_are_short() -> None:
    for path in ROOT.rglob("*.py"):
        if path.parent.name in ("cuda", "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= LONGEST, (
                    f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines"
                )
