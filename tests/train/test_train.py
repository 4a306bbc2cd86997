"""Training: the text, the batches, and whole trainings of every kind on a tiny target."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.api.llm import LLM
from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads.config import read_head_config, write_head_config
from paceline.heads.modules import tensor_shapes
from paceline.loaders.checkpoint import Checkpoint, open_checkpoint
from paceline.loaders.heads import check_target, target_hash
from paceline.train.data import WriteConfig, Writer, write_texts
from paceline.train.lessons import Target, answer_counts, draft_vocabulary, prepare
from paceline.train.recipes import Recipe, recipe_for
from paceline.train.session import read_head, save_head, train
from paceline.train.talk import Style, conversations, questions_in, varied
from paceline.train.texts import (
    Texts,
    Written,
    batches,
    from_written,
    joined,
    load_shard,
    load_shards,
    save_shard,
    split,
)
from paceline.train.trainer import TrainConfig, Trainer
from tests.make_models import VOCAB, tiny_hf
from tests.train.small import CPU, VARIANTS, head_of, piece, small, some_batch

# The data


def test_shards_come_back_as_they_were_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    written = [Written([1, 2, 3], [4, 5], 0.0), Written([7], [8, 9, 10, 11], 0.8), Written([3, 3], [1], 0.0)]
    whole = from_written(written, VOCAB)
    assert whole.tokens.dtype == np.uint16
    assert whole.num_answer_tokens == 7
    paths = [tmp_path / "text-00.npz", tmp_path / "text-01.npz"]
    for path, part in zip(paths, (piece(whole, 0, 1), piece(whole, 1, 3)), strict=True):
        save_shard(path, part)
    again = load_shards(tmp_path)
    assert all(np.array_equal(a, b) for a, b in zip(whole, again, strict=True))
    assert again.digest() == whole.digest()
    assert joined([piece(whole, 0, 1), piece(whole, 1, 3)]).digest() == whole.digest()
    assert piece(whole, 1, 2).digest() != whole.digest()
    paths[0].write_bytes(paths[0].read_bytes()[:-20])
    with pytest.raises(ModelFileError, match=paths[0].name):
        load_shard(paths[0])
    np.savez(
        tmp_path / "bad.npz",
        tokens=whole.tokens,
        starts=whole.starts[:-1],
        num_prompt=whole.num_prompt,
        temperature=whole.temperature,
    )
    with pytest.raises(ModelFileError, match="index does not fit"):
        load_shard(tmp_path / "bad.npz")
    with pytest.raises(ConfigError, match="holds no written text"):
        load_shards(tmp_path / "nothing")


def test_a_batch_has_the_rows_that_drafts_start_from() -> None:
    batch = some_batch()
    assert batch.ids.shape == (3, 32)
    assert batch.size.tolist() == [15, 19, 8]  # from the prompt's last token to the text's last but one
    assert batch.position[:3].tolist() == [4, 5, 6]
    assert batch.token_after(1)[0] == batch.ids[0, 5]
    after = batch.row_after(2)
    assert after[0] == 2
    assert after[13] == after[14] == -1  # the first sequence ends there
    assert after[15] == 17


def test_batches_hold_every_sequence_once_and_follow_the_seed(texts: Texts) -> None:
    learned, held = split(texts, 8)
    assert not set(learned) & set(held)
    assert (texts.temperature[held] == 0).all()

    def tokens(seed: int) -> list[list[int]]:
        return [
            batch.ids.flatten().tolist()
            for batch in batches(texts, learned, 2048, 448, np.random.default_rng(seed))
        ]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    count = sum(len(batch.ids) for batch in batches(texts, learned, 2048, 448, np.random.default_rng(1)))
    assert count == len(learned[texts.num_prompt[learned] < 447])
    assert count > len(learned) / 2


def test_the_target_writes_greedy_and_sampled_answers_of_its_own(texts: Texts, tiny_folder: Path) -> None:
    assert len(texts) > 20
    assert 0.2 < float((texts.temperature == 0).mean()) < 0.8
    index = int(np.flatnonzero(texts.temperature == 0)[0])
    sequence = texts.tokens[texts.starts[index] : texts.starts[index + 1]].tolist()
    prompt, answer = sequence[: texts.num_prompt[index]], sequence[texts.num_prompt[index] :]
    with LLM(str(tiny_folder), speculative_config=None, device="cpu", progress=False) as llm:
        from paceline.core.params import SamplingParams

        (result,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=len(answer)))
    assert list(result.outputs[0].token_ids) == answer


def test_given_prompts_are_asked_and_questions_are_found(tiny: LLM) -> None:
    writer = Writer(tiny, batch=4)
    talks = conversations(tiny.tokenizer, [("Tell me about the wind.",)], seed=1)
    written = list(writer.write((next(talks) for _ in range(3)), lambda: False))
    assert any("Tell me about the wind." in tiny.tokenizer.decode(w.prompt) for w in written)
    assert questions_in(['Text. Who rides in front? "What is a paceline?" Nothing.']) == [
        "Who rides in front?",
        "What is a paceline?",
    ]
    assert {Style(tiny.tokenizer, random.Random(i)).temperature() == 0 for i in range(20)} == {True, False}


def test_the_draft_vocabulary_is_what_answers_are_made_of(texts: Texts) -> None:
    frequency = answer_counts(texts, np.arange(len(texts)), VOCAB)
    assert frequency.sum() == texts.num_answer_tokens
    assert answer_counts(texts, np.arange(3), VOCAB).sum() == texts.starts[3] - texts.num_prompt[:3].sum()
    ids, blank = draft_vocabulary(frequency, 50, (2,))
    assert 2 in ids
    assert (np.diff(ids) > 0).all()
    assert frequency[ids].sum() > frequency.sum() * 50 / VOCAB
    assert frequency[blank] == frequency.min()


# Whole trainings


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_training_raises_held_out_acceptance(
    kind: str, changes: dict[str, Any], checkpoint: Checkpoint, texts: Texts, tmp_path: Path
) -> None:
    recipe = small(kind, **changes)
    config = TrainConfig(tokens=60_000, device=CPU, seed=1, command=["test"], num_measures=3)
    (found,) = train(checkpoint, texts, {tmp_path: recipe}, config)
    notes = json.loads((tmp_path / "provenance.json").read_text())
    first, last = notes["curve"][0], notes["curve"][-1]
    assert last["tau"] == found.tau
    assert last["tau"] > first["tau"] + 0.04
    assert last["by_position"][0] > first["by_position"][0] + 0.04
    assert notes["target"]["hash"] == target_hash(checkpoint)
    assert notes["text"]["sha256"] == texts.digest()
    head, tensors = read_head(tmp_path)
    assert head.kind == kind
    assert {name: tuple(t.shape) for name, t in tensors.items()} == tensor_shapes(head)
    assert all(float(t.float().abs().max()) > 0 for t in tensors.values()), "what begins as zero learns, too"
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.mark.parametrize("kind", ["eagle", pytest.param("dflash", marks=pytest.mark.slow)])
def test_a_resumed_training_ends_as_one_that_was_not_interrupted(
    kind: str, checkpoint: Checkpoint, texts: Texts, tmp_path: Path
) -> None:
    recipe = small(kind)

    def run(folder: Path, is_resumed: bool = False, most_steps: int = 1 << 30) -> dict[str, torch.Tensor]:
        steps = 0

        def count(what: str, numbers: dict[str, Any]) -> None:
            nonlocal steps
            steps += what == "step"

        config = TrainConfig(
            tokens=24_000,
            device=CPU,
            seed=3,
            is_resumed=is_resumed,
            is_over=lambda: steps >= most_steps,
            num_measures=2,
            report=count,
        )
        train(checkpoint, texts, {folder: recipe}, config)
        return read_head(folder)[1]

    whole = run(tmp_path / "whole")
    half = run(tmp_path / "parts", most_steps=5)
    assert any(not torch.equal(whole[name], half[name]) for name in whole)
    with pytest.raises(ConfigError, match="resume"):
        run(tmp_path / "parts")
    parts = run(tmp_path / "parts", is_resumed=True)
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name


def test_resuming_with_another_recipe_or_text_is_an_error(
    checkpoint: Checkpoint, texts: Texts, tmp_path: Path
) -> None:
    def run(recipe: Recipe, text: Texts, is_resumed: bool) -> None:
        config = TrainConfig(tokens=3000, device=CPU, seed=1, is_resumed=is_resumed)
        train(checkpoint, text, {tmp_path: recipe}, config)

    with pytest.raises(ConfigError, match="holds no checkpoint"):
        run(small("medusa"), texts, True)
    run(small("medusa"), texts, False)
    with pytest.raises(ConfigError, match="was trained with recipe"):
        run(small("medusa", rate=1e-4), texts, True)
    with pytest.raises(ConfigError, match="was trained with text"):
        run(small("medusa"), piece(texts, 0, len(texts) - 1), True)
    state = tmp_path / "state" / "state.safetensors"
    for damaged in (state.read_bytes()[:1000], b"x", b""):
        state.write_bytes(damaged)
        with pytest.raises(ModelFileError, match="is not a whole checkpoint"):
            run(small("medusa"), texts, True)


@pytest.mark.slow
def test_heads_learn_on_from_other_text_with_their_own_tokens(
    checkpoint: Checkpoint, texts: Texts, tmp_path: Path
) -> None:
    kinds, half = ("eagle", "dflash"), len(texts) // 2

    def run(text: Texts, out: str, tokens: int, start: Path | None = None) -> list[Any]:
        recipes = {tmp_path / out / kind: small(kind) for kind in kinds}
        config = TrainConfig(tokens=tokens, device=CPU, seed=1, start=start, num_measures=1)
        train(checkpoint, text, recipes, config)
        return [read_head(folder) for folder in recipes]

    def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
        return max(
            float((a[name].float() - b[name].float()).abs().max()) for name in a if name != "draft_ids"
        )

    first = run(piece(texts, 0, half), "first", 20_000)
    for kind in kinds:  # the same target, by another name
        path = tmp_path / "first" / kind / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"target_name": "another name"}))
    rest = piece(texts, half, len(texts))
    after, fresh = run(rest, "second", 1, tmp_path / "first"), run(rest, "fresh", 1)
    for (config, tensors), (other, others), (_, strangers) in zip(first, after, fresh, strict=True):
        assert torch.equal(tensors["draft_ids"], others["draft_ids"])
        assert getattr(config, "mask_token_id", 0) == getattr(other, "mask_token_id", 0)
        assert 5 * distance(tensors, others) < distance(tensors, strangers), "one step from where it began"
    told = {
        name: json.loads((tmp_path / name / "eagle" / "provenance.json").read_text())
        for name in ("first", "second", "fresh")
    }
    assert told["second"]["before"]["text"] == told["first"]["text"] != told["second"]["text"]
    assert "before" not in told["fresh"]
    (tmp_path / "first" / "dflash").rename(tmp_path / "elsewhere")
    (_, mixed), (_, new) = run(
        rest, "mixed", 1, tmp_path / "first"
    )  # what the folder does not have begins anew
    assert distance(mixed, after[0][1]) == 0
    assert 5 * distance(first[1][1], after[1][1]) < distance(first[1][1], new)
    path = tmp_path / "first" / "eagle" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_hash": "0" * 64}))
    with pytest.raises(ConfigError, match="target_hash"):
        run(texts, "third", 1, tmp_path / "first")


def test_an_eagle_head_becomes_the_trunk_of_a_medusa_head(
    checkpoint: Checkpoint, texts: Texts, tmp_path: Path
) -> None:
    def run(kind: str, tokens: int, start: Path | None = None, **changes: Any) -> Any:
        recipe = small(kind, **changes)
        config = TrainConfig(tokens=tokens, device=CPU, seed=1, start=start, num_measures=1)
        train(checkpoint, texts, {tmp_path / kind: recipe}, config)
        return read_head(tmp_path / kind)

    _, eagle = run("eagle", 20_000)
    config, medusa = run("medusa", 1, tmp_path / "eagle", has_trunk=True)
    assert config.hidden_layers == config.trunk.taps
    for name, tensor in eagle.items():  # one step of learning away
        there = medusa[name if name in ("draft_ids", "lm_head.weight") else f"trunk.{name}"]
        assert torch.allclose(there.float(), tensor.float(), atol=2.5e-3), name
    shutil.rmtree(tmp_path / "medusa")
    with pytest.raises(ConfigError, match="has num_heads_ahead None where the recipe makes 3"):
        run("medusa", 1, tmp_path / "eagle")


def test_a_head_of_another_target_is_refused_and_both_are_named(
    checkpoint: Checkpoint, tmp_path: Path, texts: Texts
) -> None:
    lessons = prepare(checkpoint, texts, small("medusa"), CPU)
    trainer = Trainer(lessons, small("medusa"), TrainConfig(tokens=1, device=CPU))
    check_target(trainer.config, checkpoint, "head")
    other = open_checkpoint(str(tiny_hf(tmp_path / "other", "llama", seed=5)), progress=False)
    with pytest.raises(ModelFileError, match=rf"trained for {checkpoint.name} .*, not for .*other"):
        check_target(trainer.config, other, "head")
    assert target_hash(checkpoint) == target_hash(open_checkpoint(str(checkpoint.path), progress=False))


@pytest.mark.parametrize(("kind", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_heads_survive_the_disk(
    kind: str, changes: dict[str, Any], target: Target, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    head = head_of(kind, target, checkpoint, markov_rank=64, **changes)
    assert read_head_config(json.loads(json.dumps(write_head_config(head.config))), "here") == head.config
    tensors = head.tensors()
    for bits, loose in ((16, 2e-3), (8, 2e-2)):
        save_head(tmp_path / str(bits), head.config, tensors, {}, bits)
        config, again = read_head(tmp_path / str(bits))
        assert config == head.config
        for name, tensor in tensors.items():
            torch.testing.assert_close(again[name], tensor, atol=loose, rtol=loose, check_dtype=False)
    sizes = [(tmp_path / str(bits) / "model.safetensors").stat().st_size for bits in (8, 16)]
    assert sizes[0] < 0.65 * sizes[1]
    (tmp_path / "16" / "config.json").write_text(
        json.dumps(write_head_config(head.config) | {"hidden_size": 96})
    )
    with pytest.raises(ModelFileError, match=r"has shape|the trunk's hidden_size is 64, the head's 96"):
        read_head(tmp_path / "16")


def test_bad_recipes_and_texts_are_named() -> None:
    with pytest.raises(ConfigError, match="rate is 3"):
        recipe_for("eagle", rate=3)
    with pytest.raises(ConfigError, match="'hydra' cannot be trained"):
        recipe_for("hydra")
    with pytest.raises(ConfigError, match="greedy answers"):
        split(from_written([Written([1], [2, 3], 0.8)], VOCAB), 4)


@pytest.mark.slow
def test_heads_that_learn_together_are_those_that_learn_alone(
    checkpoint: Checkpoint, texts: Texts, tmp_path: Path
) -> None:
    def run(*kinds: str) -> dict[str, dict[str, torch.Tensor]]:
        recipes = {tmp_path / f"{len(kinds)}" / kind: small(kind) for kind in kinds}
        config = TrainConfig(tokens=9000, device=CPU, seed=2)
        train(checkpoint, texts, recipes, config)
        return {folder.name: read_head(folder)[1] for folder in recipes}

    together, alone = run("medusa", "dflash", "eagle"), run("dflash")
    for name, tensor in alone["dflash"].items():
        assert torch.equal(tensor, together["dflash"][name]), name


def test_prompts_are_varied_into_other_tasks(tiny: LLM) -> None:
    passage = "The wind turns along the coast road and the riders take turns in front of the group. " * 9
    prompts = ["What is 12 plus 30 minus 7?", "Who rides in front of a paceline?", f"Read this.\n{passage}"]
    talks = varied(Style(tiny.tokenizer, random.Random(0)), prompts)
    asks = [next(next(talks)) for _ in range(120)]
    texts = [tiny.tokenizer.decode(ask.prompt) for ask in asks]
    for part in ("Summarize", "Who rides in front", "Write one question that this text answers", "Translate"):
        assert any(part in text for text in texts), part
    assert any("plus" in text and "12 plus 30" not in text for text in texts), "other numbers"
    assert {ask.is_kept for ask in asks} == {True, False}
    alone = varied(
        Style(tiny.tokenizer, random.Random(0)), ["Write."]
    )  # nothing to summarize or to translate
    assert all(next(next(alone)).prompt for _ in range(40))


@pytest.mark.slow
def test_several_engines_write_into_one_folder_and_are_taken_up_again(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = WriteConfig(model=str(tiny_folder), folder=tmp_path, device="cpu", num_tokens=3000, processes=2)
    told: list[int] = []
    texts = write_texts(config, told.append)
    assert {path.name[:7] for path in tmp_path.glob("*.npz")} == {"text-00", "text-01"}
    assert texts.num_answer_tokens >= 3000
    assert told[-1] > 0
    assert write_texts(config, told.append).digest() == texts.digest(), "there is enough"


def test_a_command_that_cannot_train_says_why() -> None:
    from typer.testing import CliRunner

    from paceline.cli.main import app

    for arguments, message in (
        ([], "name one kind, or several with --kinds"),
        (["eagle", "--kinds", "eagle,draft"], "name one kind, or several with --kinds"),
        (["--kinds", "eagle,hydra"], "'hydra' cannot be trained"),
        (["eagle", "--set", "ratte=1"], "did you mean 'rate'"),
        (["eagle", "--set", "rate=fast"], "write name=value"),
        (["eagle", "--start", "nowhere"], "name the folder of a head"),
    ):
        done = CliRunner().invoke(app, ["train", *arguments])
        assert done.exit_code == 2, arguments
        assert message in " ".join(done.stderr.split()), arguments


@pytest.mark.slow
def test_the_command_trains_end_to_end(tiny_folder: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from paceline.cli.main import app

    prompts, out = tmp_path / "prompts.txt", tmp_path / "head"
    prompts.write_text("Tell me about the wind.\nWho rides in front?\nWrite a list of riders.\n")
    common = f"train eagle --target {tiny_folder} --device cpu -o {out} --draft-vocab 256".split()
    done = CliRunner().invoke(app, [*common, "--prompts", str(prompts), "--tokens", "20000"])
    assert done.exit_code == 0, done.output
    assert "tokens a step on held-out answers" in done.stdout
    notes = json.loads((out / "provenance.json").read_text())
    assert notes["text"]["answer_tokens"] >= 20_000
    assert notes["curve"][-1]["tau"] > notes["curve"][0]["tau"] + 0.05
    config, _ = read_head(out)
    check_target(config, open_checkpoint(str(tiny_folder), progress=False), str(out))
    again = CliRunner().invoke(app, [*common, "--text", str(out / "text")])
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    medusa = (
        f"train medusa --trunk --start {out} --target {tiny_folder} --device cpu --draft-vocab 256"
    ).split()
    done = CliRunner().invoke(
        app, [*medusa, "-o", str(tmp_path / "medusa"), "--text", str(out / "text"), "--rounds", "0.05"]
    )
    assert done.exit_code == 0, done.output
    started = json.loads((tmp_path / "medusa" / "provenance.json").read_text())["curve"][0]
    assert started["by_position"][0] > 0.9 * notes["curve"][-1]["by_position"][0], (
        "it begins as good as EAGLE's first step"
    )
    kinds = f"--kinds draft,dflash --text {out / 'text'} --rounds 0.05 --set num_layers=1".split()
    both = [*common[:1], *common[2:6], "-o", str(tmp_path / "heads"), "--draft-vocab", "256", *kinds]
    done = CliRunner().invoke(app, both)
    assert done.exit_code == 0, done.output
    assert [read_head(tmp_path / "heads" / kind)[0].kind for kind in ("draft", "dflash")] == [
        "draft",
        "dflash",
    ]
    wrong = CliRunner().invoke(app, [*common, "--trunk"])
    assert wrong.exit_code == 2
    assert "only medusa" in wrong.stderr
    both = CliRunner().invoke(app, [*common, "--tokens", "5000", "--hours", "1"])
    assert both.exit_code == 2
    assert "not both" in both.stderr
