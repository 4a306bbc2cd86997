"""The documents say what is there: structure.md names the tree's folders, layers, verbs and files, links lead
somewhere, the pages make a site that needs no other host, and their blocks run: `python` all of a page in one
go, `bash` line by line, `console` with what it prints, `sh` and `py` with a server (tests/server); what takes
too long is parsed.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from paceline.api.llm import LLM
from paceline.cli import bench, main
from paceline.core.errors import ModelFileError
from paceline.core.params import SamplingParams
from paceline.core.types import Cached, Segment
from paceline.drafters import registry
from paceline.loaders import hf_config
from paceline.loaders.checkpoint import open_checkpoint
from paceline.runtime.backend import backend_for
from paceline.runtime.executor import LocalExecutor
from paceline.server import metrics
from paceline.server.config import resolve
from tests.make_models import SIZES, tiny_tokenizer
from tests.test_imports import LAYERS
from tests.test_readme import run

ROOT = Path(__file__).parent.parent
DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path.name for path in sorted((ROOT / "docs").glob("*.md"))]
OWN_TESTS = ("add_a_drafter.md", "add_a_model.md", "from_vllm.md")  # run by tests of their own
STRUCTURE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
# A metaphor for a request or a burst explains nothing.
BANNED = re.compile(r"\b(somebody|nobody|whoever|so many|purse|flights?|proposers?)\b", re.IGNORECASE)
GONE = re.compile(r"scripts/|log\.md")


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def code(document: str, language: str) -> str:
    """The one block of a language in a document."""
    (body,) = blocks(document, language)
    return body


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if page not in OWN_TESTS and blocks(page, language)]


def section(title: str) -> str:
    return STRUCTURE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_structure_has_a_line_for_every_folder() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("the folders are compared where the project is a git checkout")
    folders = {str(Path(name).parent) for name in tracked.stdout.splitlines() if (ROOT / name).is_file()}
    inside = {f for f in folders if f.startswith("paceline/") and not f.startswith("paceline/data/heads/")}
    outside = {f.split("/")[0] for f in folders} - {".", "paceline"}
    listed = re.findall(r"^\| `([\w./]+)/` \|", STRUCTURE, re.MULTILINE)
    assert sorted(listed) == sorted({*inside, *outside, "paceline/data/heads"})


def test_structure_has_the_layers_that_the_imports_are_held_to() -> None:
    (block,) = re.findall(r"```text\n(.*?)```", section("Layers"), re.DOTALL)
    there = [{name for name in layer if (ROOT / "paceline" / name).is_dir()} for layer in LAYERS]
    assert [set(line.split()) for line in block.splitlines()] == there[::-1]


def test_structure_names_every_verb() -> None:
    named = " ".join(re.findall(r"`([^`]+)`", section("Verbs"))).split()
    assert {verb.__name__ for verbs in main.VERBS.values() for verb in verbs} <= set(named)
    measured = set(re.findall(r"`bench (\w+)`", section("Verbs")))
    assert measured == {command.name for command in bench.app.registered_commands}


def test_the_walk_has_ten_files() -> None:
    files = re.findall(r"^\d+\. `([\w/]+\.py)`", section("A newcomer's walk"), re.MULTILINE)
    assert len(files) == 10


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (path.parent / link).exists(), link
    made_by_example = "drafters/repeat.py"
    for name in re.findall(r"`(?:paceline/)?((?:\w+/)+\w+\.py)`", text):
        is_there = (ROOT / name).exists() or (ROOT / "paceline" / name).exists()
        assert is_there or name == made_by_example, name
    assert BANNED.findall(text) == []
    assert GONE.findall(text) == []


@pytest.mark.parametrize("page", pages_with("python"))
def test_examples_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks(page, "python")), page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands_run(page: str, tmp_path: Path) -> None:
    for command in "".join(blocks(page, "bash")).splitlines():
        done = run(command, tmp_path)
        assert done.returncode == 0, (command, done.stderr[-2000:])
        assert done.stdout.strip(), command


@pytest.mark.parametrize("page", pages_with("console"))
def test_commands_say_what_is_printed(page: str) -> None:
    for block in blocks(page, "console"):
        for command, said in re.findall(r"^\$ paceline (.*)\n((?:[^$].*\n)+)", block, re.MULTILINE):
            done = CliRunner().invoke(main.app, shlex.split(command))
            assert (done.exit_code, done.stderr) == (2, said), command


def parse(arguments: list[str]) -> None:
    """As the command line does, up to the call; an unknown verb or option raises."""
    root: Any = typer.main.get_command(main.app)
    command, rest = root.commands[arguments[0]], arguments[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(command.name, rest)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_have_the_options_that_are_shown(path: Path) -> None:
    for line in re.findall(r"^ *paceline (\w.*)", path.read_text(encoding="utf-8"), re.MULTILINE):
        parse(shlex.split(line, comments=True))


def test_the_metrics_are_those_of_the_server() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `paceline:(\w+)`", text, re.MULTILINE)
    assert listed == [*(f"{name}_total" for name in metrics.COUNTERS), *metrics.GAUGES, *metrics.HISTOGRAMS]
    for name in re.findall(r"paceline:(\w+)", text):
        assert name.removesuffix("_bucket") in listed
    (group,) = yaml.safe_load(code("metrics.md", "yaml"))["groups"]
    assert all("paceline:" in rule["expr"] for rule in group["rules"])


def test_the_settings_are_those_of_the_server(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(code("deploy.md", "toml"))
    assert resolve({}, {}, str(file)).max_queue == 128


def test_the_site_builds_and_needs_no_other_host(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert {page.replace(".md", ".html") for page in PAGES} <= set(pages)
    for name, text in pages.items():
        assert (
            re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^ >]*", text) == []
        ), name
    for style in tmp_path.rglob("*.css"):
        assert "url(http" not in style.read_text(encoding="utf-8"), style
    assert "drafters that make it faster" in pages["api.html"]  # docstrings are read


def test_the_documents_keep_their_size() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    assert len(list((ROOT / "docs" / "decisions").iterdir())) <= 19


def test_every_decision_has_a_question_and_a_decision() -> None:
    index = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "decisions").iterdir():
        text = path.read_text(encoding="utf-8")
        assert re.search(r"\*\*Questions?\.\*\*", text), path
        assert "**Decision" in text, path
        assert f"decisions/{path.name}" in index


def test_the_example_drafter_changes_no_text(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, place),) = re.findall(r'"(\w+)": "([\w.:]+)"', code("add_a_drafter.md", "text"))
    module = ModuleType(place.split(":")[0])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.DRAFTERS, name, place)
    exec(compile(code("add_a_drafter.md", "python"), module.__name__, "exec"), module.__dict__)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    seeded = SamplingParams(temperature=0.9, seed=3, max_tokens=24)
    said = []
    for options in (None, {"method": name}, {"method": name, "num_speculative_tokens": 3}):
        with LLM(str(tiny_folder), speculative_config=options, progress=False) as llm:
            prompts = ["the line rides on, on, on, on,", "café 2026"]
            results = llm.generate(prompts, greedy) + llm.generate(prompts, seeded)
        said.append([result.token_ids for result in results])
    assert said[1] == said[0]
    assert said[2] == said[0]
    assert all(result.stats.num_drafted for result in results)


def test_the_example_family_says_what_transformers_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformers

    sizes = {**SIZES, "head_dim": 32, "residual_dropout": 0.0, "attention_dropout": 0.0}
    torch.manual_seed(0)
    model = transformers.SeedOssForCausalLM(transformers.SeedOssConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path)
    tiny_tokenizer(tmp_path)
    with pytest.raises(ModelFileError, match="seed_oss"):
        open_checkpoint(str(tmp_path), progress=False)

    monkeypatch.setattr(hf_config, "FAMILIES", dict(hf_config.FAMILIES))
    monkeypatch.setattr(hf_config, "REFUSED", hf_config.REFUSED)
    exec(code("add_a_model.md", "python"), {})
    tokens = [(37 * i * i + 11 * i + 5) % sizes["vocab_size"] for i in range(40)]
    backend, cached = backend_for(torch.device("cpu"), "torch"), Cached()
    executor = LocalExecutor.load(backend, open_checkpoint(str(tmp_path), progress=False), 8, dtype="float32")
    executor.kv.reserve(cached, len(tokens))
    logits = executor.forward([Segment(tokens, cached, num_logits=len(tokens))]).logits
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-4

    said = []
    for options in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        with LLM(str(tmp_path), speculative_config=options, progress=False) as llm:
            (result,) = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=24))
        said.append(result.token_ids)
    assert said[1] == said[0]
