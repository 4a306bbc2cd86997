"""A public line budget: the cheapest known defence against growth. Raise a number only with a reason in the commit; lower it
whenever a folder has become smaller.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "paceline"
LINES = {
    "api": 1_366, "core": 1_938, "engine": 2_063, "runtime": 1_962, "models": 1_525, "heads": 1_020, "drafters": 2_592,
    "cpu": 7_086, "cuda": 5_414, "loaders": 4_871, "train": 1_816, "measure": 6_319, "server": 4_580, "scale": 978, "cli": 2_566,
}  # fmt: skip
ENGINE = (
    "api",
    "core",
    "engine",
    "runtime",
    "models",
    "heads",
    "drafters",
)  # all behind LLM but kernels and files
MOST_LINES, MOST_ENGINE, MOST_POLICY = 46_175, 12_465, 710
LONGEST = 60  # lines of a function, outside Triton's kernels
MOST_PARAMETERS, MOST_EXCEPTIONS = (
    8,
    10,
)  # of a function, outside Triton's kernels and the entry points of verbs


@pytest.mark.parametrize("folder", sorted(path.name for path in ROOT.iterdir() if path.is_dir()))
def test_a_folder_keeps_its_budget(folder: str) -> None:
    num_lines = lines_of(ROOT / folder)
    assert num_lines <= LINES.get(folder, 0), f"{folder} has {num_lines} lines"


def lines_of(folder: Path) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in folder.rglob("*.py"))


def test_the_whole_keeps_its_budget() -> None:
    assert lines_of(ROOT) <= MOST_LINES


def test_the_engine_and_its_policy_keep_theirs() -> None:
    assert sum(lines_of(ROOT / folder) for folder in ENGINE) <= MOST_ENGINE
    assert lines_of(ROOT / "engine" / "policy") <= MOST_POLICY


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function but Triton's kernels, with where it stands."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and not any("triton" in ast.unparse(each) for each in node.decorator_list):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_functions_are_short() -> None:
    lengths = {where: (node.end_lineno or 0) - node.lineno + 1 for where, node in functions()}
    assert {where: length for where, length in lengths.items() if length > LONGEST} == {}


def test_functions_take_few_parameters() -> None:
    counts = {}
    for where, node in functions():
        if not where.startswith("cli/"):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            counts[where] = len([name for name in names if name not in ("self", "cls")])
    many = {where: count for where, count in counts.items() if count > MOST_PARAMETERS}
    assert len(many) <= MOST_EXCEPTIONS, many
