"""Draft models in other forms: fewer bits, fewer layers; and `tune --fit-draft`, which chooses among them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from paceline import LLM, SamplingParams
from paceline.cli.main import app
from paceline.core.errors import ConfigError
from paceline.loaders.checkpoint import SMOLLM2_135M, open_checkpoint
from paceline.measure.fit import agreement, fit
from paceline.models.config import RecurrentConfig
from paceline.models.stage import without_layers
from tests.make_models import tiny_hf, tiny_tokenizer

PROMPTS = ["the line rides on", "who rides in front?", "a wheel, a line, a wheel"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WHOLE: dict[str, Any] = dict.fromkeys(("name", "path", "fingerprint", "eos_ids", "bos_id"), "x")
SPOILT = 2  # the layer that was put into the draft model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with three layers, and a draft model that is the same but for a layer that spoils all."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    sizes: dict[str, Any] = {"max_position_embeddings": 512}
    tiny_hf(target, "llama", num_hidden_layers=3, **sizes)
    tiny_hf(draft, "llama", num_hidden_layers=4, seed=1, **sizes)
    theirs, ours = load_file(target / "model.safetensors"), load_file(draft / "model.safetensors")
    for name in ours:
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
        if layer != SPOILT:
            place = name.replace(f"layers.{layer}.", f"layers.{layer - (layer > SPOILT)}.")
            ours[name] = theirs[place].clone()
        elif name.endswith("o_proj.weight"):
            ours[name] *= 8
    save_file(ours, draft / "model.safetensors", {"format": "pt"})
    for folder in (target, draft):
        tiny_tokenizer(folder)
    return target, draft


def said(models: tuple[Path, Path], **more: Any) -> tuple[list[Any], int, int]:
    """Texts, tokens drafted, and accepted."""
    drafts = {"method": "draft_model", "model": str(models[1]), "num_speculative_tokens": 3, **more}
    with LLM(str(models[0]), dtype="float32", speculative_config=drafts, progress=False) as llm:
        results = llm.generate(PROMPTS, GREEDY)
    drafted, accepted = (sum(getattr(r.stats, n) for r in results) for n in ("num_drafted", "num_accepted"))
    return [r.token_ids for r in results], drafted, accepted


def test_a_layer_is_left_out(models: tuple[Path, Path]) -> None:
    """Without what spoils it the draft model is the target, and always right."""
    whole, less, small = (said(models, **more) for more in ({}, {"skip_layers": [SPOILT]}, {"dtype": "int4"}))
    assert whole[0] == less[0] == small[0]
    assert less[2] == less[1] > 0
    assert whole[2] < whole[1] / 2


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_is_left_is_a_model_of_its_own(models: tuple[Path, Path], dtype: str) -> None:
    """The same bits as of the target, from packed weights that both forms share, too."""
    found = []
    for number, skipped in ((0, ()), (1, (SPOILT,))):
        with LLM(str(models[0]), dtype=dtype, speculative_config=None, progress=False) as llm:
            executor = llm.context.load_model(
                open_checkpoint(str(models[number]), False), dtype, skipped=skipped
            )[2]
            found.append(agreement(executor, [([3, 4, 5], llm.generate([[3, 4, 5]], GREEDY)[0].token_ids)]))
    assert found == [1.0, 1.0]


@pytest.mark.parametrize("skipped", [[4], [-1], [0, 1, 2, 3], 2, ["a"], [True]])
def test_layers_that_are_not_there(models: tuple[Path, Path], skipped: Any) -> None:
    with pytest.raises(ConfigError, match="skip_layers"):
        said(models, skip_layers=skipped)


def test_what_a_config_says_of_a_layer_goes_with_it() -> None:
    config = replace(
        SMOLLM2_135M,
        num_layers=4,
        rope_layers=(True, False, True, True),
        local_layers=(False, True, False, True),
    )
    kept = without_layers(SimpleNamespace(**WHOLE, config=config), (0, 2)).config
    assert (kept.num_layers, kept.rope_layers, kept.local_layers) == (2, (False, True), (True, True))
    assert without_layers(SimpleNamespace(**WHOLE, config=SMOLLM2_135M), [5]).config.rope_layers == ()


def test_recurrent_layers_are_not_left_out() -> None:
    recurrent = RecurrentConfig((True,) * 30, 1, 1, 16, 16)
    source = SimpleNamespace(**WHOLE, config=replace(SMOLLM2_135M, recurrent=recurrent))
    with pytest.raises(ConfigError, match="recurrent layers; leave it out"):
        without_layers(source, [1])


def test_the_form_that_gains_most_is_found(models: tuple[Path, Path]) -> None:
    with LLM(str(models[0]), dtype="float32", speculative_config=None, progress=False) as llm:
        prompts = [llm.tokenizer.encode(text) for text in PROMPTS]
        texts = [(ids, llm.generate([ids], GREEDY)[0].token_ids) for ids in prompts]
        told: list[str] = []
        forms = fit(
            llm.context, str(models[1]), "float32", texts, 1.0, lambda rows: 1 + rows / 100,
            lambda what, _: told.append(what),
        )  # fmt: skip
    assert forms[0].skip_layers == (SPOILT,)
    assert forms[0].agreement == 1.0
    assert forms[0].k == 8
    assert {form.dtype for form in forms} == {"float32", "int4"}
    assert {len(form.skip_layers) for form in forms} == {0, 1, 2}
    assert len(told) == 4 + len(forms)


def test_tune_fits_the_draft_model(models: tuple[Path, Path], tmp_path: Path) -> None:
    path, prompts = tmp_path / "tune.json", tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    options = ["--model", str(models[0]), "--dtype", "float32", "--draft-model", str(models[1])]
    options += ["--methods", "draft_model", "--fit-draft", "-k", "2", "--prompts", str(prompts)]
    done = CliRunner().invoke(app, ["tune", *options, "--json", str(path)])
    assert done.exit_code == 0, done.stderr
    report = json.loads(path.read_text())
    best, own = report["forms"][0], report["drafters"]["draft_model"]
    assert best["skip_layers"] == own["options"]["skip_layers"]
    assert best["dtype"] == own["options"]["dtype"]
    assert "forms of the draft model" in done.stdout


@pytest.mark.parametrize("options", [["--methods", "ngram"], ["--draft-model", "x", "--methods", "ngram"]])
def test_there_must_be_a_draft_model(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["tune", "--fit-draft", *options])
    assert done.exit_code == 2
    assert "--draft-model" in done.stderr
