"""What is installed by others: the wheels are small, whole and enough by themselves; images are built from
files that are there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from paceline import __version__ as VERSION
from tests.test_imports import imports_of

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# imported, and by whom installed
BROUGHT = {"llvmlite": "numba", "starlette": "fastapi", "triton": "torch", "PIL": "matplotlib"}
BROUGHT |= {"pydantic_core": "pydantic", "yarl": "aiohttp"}
MOST_BYTES = 20 * 2**20
STEPS = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE"}
STEPS |= {"HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT"}
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile*"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By project, built from a copy: setuptools leaves files beside the sources, and finds old ones there."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in ("paceline", "deploy/heads"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "build", "*-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(made)]
    build = [sys.executable, "-m", "pip", "wheel", *options, ".", "./deploy/heads"]
    subprocess.run(build, cwd=source, check=True, timeout=300)
    sdist = "from setuptools.build_meta import build_sdist as build; build('.')"
    subprocess.run([sys.executable, "-c", sdist], cwd=source, check=True, timeout=300, capture_output=True)
    (archive,) = source.glob("paceline-*.tar.gz")
    return {"sdist": archive} | {path.name.partition("-")[0]: path for path in made.glob("*.whl")}


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow
def test_wheels_are_small_and_whole(wheels: dict[str, Path]) -> None:
    ours, heads = names_in(wheels["paceline"]), names_in(wheels["paceline_heads"])
    assert wheels["paceline"].stat().st_size < MOST_BYTES
    assert wheels["sdist"].stat().st_size < MOST_BYTES
    tree = [
        path for path in (ROOT / "paceline").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    missing = {str(path.relative_to(ROOT)) for path in tree} - ours - heads
    assert missing == set()
    assert {name.split("/")[0] for name in ours} == {"paceline", f"paceline-{VERSION}.dist-info"}
    assert f"paceline-{VERSION}.dist-info/licenses/LICENSE" in ours
    assert ours & heads == set()  # two wheels, one folder: neither may write the other's files
    with zipfile.ZipFile(wheels["paceline_heads"]) as archive:  # heads of this very version
        (name,) = [name for name in heads if name.endswith("/METADATA")]
        assert f"Requires-Dist: paceline=={VERSION}\n" in archive.read(name).decode()


def test_all_that_is_imported_is_asked_for() -> None:
    asked = {normal(re.split(r"[^\w.-]", each)[0]) for each in PROJECT["dependencies"]}
    known = {name: {normal(each) for each in owners} for name, owners in packages_distributions().items()}
    unasked = set()
    for path in sorted((ROOT / "paceline").rglob("*.py")):
        if "workers" not in path.parts:  # those run in other engines' environments
            names = {each.split(".")[0] for each in imports_of(path)} - sys.stdlib_module_names - {"paceline"}
            found = {BROUGHT.get(name, name) for name in names}
            unasked |= {(path.parts[-2], name) for name in found if not known.get(name, {name}) & asked}
    extras = {"server": ("server", "scale"), "scale": ("scale",), "bench": ("measure", "train", "cli")}
    for extra, folders in extras.items():
        more = {normal(re.split(r"[^\w.-]", each)[0]) for each in PROJECT["optional-dependencies"][extra]}
        unasked -= {(folder, name) for folder, name in unasked if folder in folders and known[name] & more}
    assert unasked == set()


@pytest.mark.slow
def test_the_wheel_runs_in_an_environment_of_its_own(wheels: dict[str, Path], tmp_path: Path) -> None:
    """The dependencies are those of the tests, by a path; Paceline itself is the wheel alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "env"], cwd=tmp_path, check=True)
    programs, (site,) = tmp_path / "env/bin", (tmp_path / "env/lib").glob("python*/site-packages")
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def install(wheel: Path) -> None:
        options = ["--python", str(programs / "python"), "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([sys.executable, "-m", "pip", *options, str(wheel)], check=True)

    def output(*command: str, status: int = 0) -> str:
        words = [str(programs / command[0]), *command[1:]]
        done = subprocess.run(words, cwd=empty, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == status, done.stderr[-2000:]
        return done.stderr if status else done.stdout

    install(wheels["paceline"])
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    take_kernels(ROOT / "paceline", site / "paceline")
    where = output("python", "-c", "import paceline; print(paceline.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    assert output("paceline", "--version") == f"paceline {VERSION}\n"
    said = json.loads(output("paceline", "demo", "--json", "--max-tokens", "16"))
    assert said["plain"]["text"] == said["drafted"]["text"] != ""
    medusa = ("paceline", "generate", "hi", "--method", "medusa", "--max-tokens", "2")
    assert "in the package paceline-heads" in output(*medusa, status=2)
    install(wheels["paceline_heads"])
    assert output(*medusa).strip()


def take_kernels(source: Path, installed: Path) -> None:
    """What was compiled for the sources is good for the same files elsewhere, and saves two minutes."""
    for path in [*(source / "cpu").glob("*.py"), source / "core/weigh.py"]:
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        os.utime(installed / path.relative_to(source), ns=times)
    for path in source.rglob("__pycache__/*.nb?"):
        place = installed / path.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        shutil.copy2(path, place)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_can_be_built(path: Path) -> None:
    """As far as can be told without Docker."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    by_kind = {kind: [rest for name, rest in steps if name == kind] for kind, _ in steps}
    assert set(by_kind) <= STEPS
    stages = [re.fullmatch(r"\S+:(?!latest)[\w.-]+(?: AS (\w+))?", each) for each in by_kind["FROM"]]
    assert len(stages) == 2
    assert all(stages), by_kind["FROM"]  # a tag, and a fixed one
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for copied in by_kind["COPY"]:
        *sources, _ = copied.split()
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") == stages[0][1]  # type: ignore[index]
            continue
        assert all((ROOT / source).exists() and f"!{source}" in allowed for source in sources), copied
    last = text[text.rindex("FROM") :]
    assert re.search(r"^USER (?!root)\w", last, re.MULTILINE)
    assert last.index("useradd") < last.index("USER") < last.index("ENTRYPOINT")
    for kind in ("VOLUME", "HEALTHCHECK", "EXPOSE", "STOPSIGNAL"):
        assert f"\n{kind} " in last, kind
    for command in by_kind["RUN"]:
        assert "apt-get install" not in command or "rm -rf /var/lib/apt/lists" in command, command
    assert json.loads(by_kind["ENTRYPOINT"][0])[:2] == ["paceline", "serve"]
