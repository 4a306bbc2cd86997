"""Imports: quick, and downward only. The order of the layers is the architecture; a module that is in none of
them fails here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "paceline"
LAYERS: list[set[str]] = [
    {"core"},
    {"models", "heads"},
    {"loaders"},
    {"cpu", "cuda"},
    {"runtime"},
    {"drafters"},
    {"engine"},
    {"api"},
    {"measure"},
    {"server", "train", "scale", "cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HEAVY = (
    "torch",
    "numba",
    "numpy",
    "transformers",
    "gguf",
    "llguidance",
    "huggingface_hub",
    "tokenizers",
    "safetensors",
    "jinja2",
    "rich",
    "typer",
)
WEB = {"fastapi", "uvicorn", "pydantic", "starlette", "prometheus_client"}
FILES = sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    """The folder or top-level module a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names that the file imports when it runs, inside functions too; type-checking blocks do not
    run.
    """
    stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        stack += ast.iter_child_nodes(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return  # the front door: it names everything, lazily
    assert part in LEVEL, f"{part} is in no layer; add it to LAYERS where it belongs"
    is_worker = path.parent == ROOT / "measure" / "workers"  # runs in a peer's own environment
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        assert top != "transformers" or is_worker, f"{path}: transformers is a test oracle"
        assert top not in WEB or part in ("server", "scale"), (
            f"{path} imports {name}: web names belong to server and scale"
        )
        if top == "paceline" and (target := rest.split(".")[0]) in LEVEL:
            assert target == part or LEVEL[target] <= LEVEL[part], (
                f"{path} imports {name}, which lies above it"
            )


def test_the_engine_sees_only_the_base_of_the_drafters() -> None:
    for path in (ROOT / "engine").rglob("*.py"):
        seen = {name.split(".")[2] for name in imports_of(path) if name.startswith("paceline.drafters.")}
        assert seen <= {"base"}, path


def test_device_names_stay_where_device_memory_is_owned() -> None:
    for path in FILES:
        if part_of(path) not in ("cuda", "runtime"):
            assert "torch.cuda" not in path.read_text(encoding="utf-8"), path


def test_the_walk_sees_lazy_imports_and_skips_type_checking(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text("if TYPE_CHECKING:\n    import hidden\ndef f():\n    from deep.inside import thing\n")
    assert list(imports_of(sample)) == ["deep.inside.thing"]


def test_import_is_quick_and_loads_nothing_heavy() -> None:
    timing = (
        "import sys, time; t = time.process_time(); import paceline; print(time.process_time() - t, end=' ')"
    )
    code = f"{timing}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(3)
    ]
    assert runs[0][1:] == []
    assert min(float(run[0]) for run in runs) < 0.3


def test_help_needs_no_engine() -> None:
    code = "import sys; from paceline.cli.main import app; print(*[m for m in ('torch', 'numba', 'numpy') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        == []
    )


def test_the_process_that_answers_http_needs_no_engine() -> None:
    """Engines have processes of their own; torch alone would be 200 MB of memory and two seconds."""
    code = "import sys, paceline.server.run; print(*[m for m in ('torch', 'numba', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()
