"""Files of learned heads: ours and other projects', what is exported, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import ConfigError, ModelFileError
from paceline.cpu.medusa import MedusaHead
from paceline.drafters import registry
from paceline.drafters.base import DrafterContext
from paceline.heads.config import write_head_config
from paceline.heads.rows import Feed, Row, Sampler
from paceline.heads.torch_heads import TorchMedusaHead, TorchMlpHead
from paceline.loaders.heads import export_head, open_head, target_hash
from paceline.models.layer import Linear, rms_norm
from paceline.models.quantize import STORED, quantize
from paceline.train.session import save_head
from tests.heads import Oracle, Tensors, config_of, eagle_1, mlp_speculator, random_tensors, write_head
from tests.laws.harness import CONFIG, RandomCheckpoint, executor

TARGET = RandomCheckpoint()
NORM = TARGET.tensor("norm.weight")
CPU = torch.device("cpu")
LAST = {
    CONFIG.num_layers: torch.randn(9, CONFIG.hidden_size, generator=torch.Generator().manual_seed(3))
}  # hidden states
ROW = Row(8, LAST, 8)


def save(folder: Path, kind: str, seed: int = 0, **fields: Any) -> tuple[Path, Any, Tensors]:
    config = config_of(kind, CONFIG, target_hash(TARGET), 40, **fields)
    tensors = random_tensors(config, seed)
    return write_head(folder, write_head_config(config), tensors), config, tensors


def test_int8_and_half_precision_files_are_read_as_written(tmp_path: Path) -> None:
    _, config, tensors = save(tmp_path / "plain", "eagle")
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name != "fc.weight":
            values, scales, _ = quantize(tensor, 8)
            stored |= {name: values, name.removesuffix(".weight") + ".scales": (scales * STORED).half()}
        else:
            stored[name] = tensor if name == "draft_ids" else tensor.half()
    head = open_head(
        str(write_head(tmp_path / "small", write_head_config(config), stored)), TARGET, ("eagle",)
    )
    for name, tensor in tensors.items():
        assert head.tensors[name].shape == tensor.shape
        assert torch.allclose(head.tensors[name].float(), tensor.float(), atol=0.02)
    again = quantize(head.tensors["lm_head.weight"], 8)
    assert torch.equal(again.values, stored["lm_head.weight"])


def test_a_medusa_head_may_have_a_trunk(tmp_path: Path) -> None:
    folder, config, tensors = save(tmp_path / "head", "medusa", has_trunk=True)
    head = open_head(str(folder), TARGET, ("medusa",))
    assert head.config == config
    assert torch.equal(head.tensors["trunk.fc.weight"], tensors["trunk.fc.weight"])
    with pytest.raises(ConfigError, match="train without a trunk"):
        export_head(head, TARGET, "vllm", tmp_path / "theirs", "org/model")
    assert not (tmp_path / "theirs").exists()
    save_head(tmp_path / "small", config, tensors, {}, bits=8)
    again = open_head(str(tmp_path / "small"), TARGET, ("medusa",)).tensors["trunk.fc.weight"]
    assert torch.allclose(again, tensors["trunk.fc.weight"], atol=0.02)
    write_head(
        folder,
        write_head_config(config),
        {name: t for name, t in tensors.items() if name != "trunk.norm.weight"},
    )
    with pytest.raises(ModelFileError, match=r"missing tensor trunk\.norm\.weight"):
        open_head(str(folder), TARGET, ("medusa",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("yes", "trunk is 'yes'; it is a config of its own"),
        ({"hidden_size": 32}, "the trunk's hidden_size is 32, the head's 64"),
        ({"has_lm_head": True}, "a trunk's has_lm_head and norm_output are false"),
        ({"taps": [0, 1, 99]}, "the head reads layer 99"),
        ({"depth": 2}, "depth"),
    ],
)
def test_a_damaged_trunk_is_one_clear_error(change: Any, message: str, tmp_path: Path) -> None:
    folder, config, tensors = save(tmp_path / "head", "medusa", has_trunk=True)
    values = write_head_config(config)
    write_head(
        folder,
        {**values, "trunk": change if isinstance(change, str) else {**values["trunk"], **change}},
        tensors,
    )
    with pytest.raises(ModelFileError, match=message):
        open_head(str(folder), TARGET, ("medusa",))


def damage(folder: Path, how: str) -> None:
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "garbage":
        weights.write_bytes(b"\xff" * 1000)
    elif how == "missing tensor":
        save_file({n: t for n, t in tensors.items() if n != "fc.weight"}, weights)
    elif how == "wrong shape":
        save_file({**tensors, "fc.weight": tensors["fc.weight"][:, :-1].contiguous()}, weights)
    elif how == "not finite":
        save_file({**tensors, "norm.weight": tensors["norm.weight"] * torch.nan}, weights)
    elif how == "ids":
        save_file({**tensors, "draft_ids": tensors["draft_ids"].flip(0).contiguous()}, weights)
    elif how == "pickled":
        weights.rename(folder / "model.pt")
    elif how == "no config":
        (folder / "config.json").unlink()
    else:
        config.update(json.loads(how))
        (folder / "config.json").write_text(json.dumps(config))


DAMAGES = {
    "truncated": "not a whole safetensors file",
    "garbage": "not a whole safetensors file",
    "missing tensor": "missing tensor fc.weight",
    "wrong shape": "fc.weight has shape",
    "not finite": "norm.weight holds numbers that are not finite",
    "ids": "not an ascending list",
    "pickled": "only model.pt",
    "no config": "no config.json",
    '{"hidden_size": 100000000}': "hidden_size",
    '{"taps": [0, 1, 99]}': "layer 99",
    '{"flavour": 1}': "no option 'flavour'",
    '{"paceline_head": 7}': "format 1",
    '{"kind": "eagel"}': "did you mean 'eagle'",
    '{"target_hash": "abc", "target_name": "somebody"}': "trained for somebody",
}


@pytest.mark.parametrize(("how", "message"), DAMAGES.items(), ids=DAMAGES)
def test_a_damaged_head_is_one_clear_error(how: str, message: str, tmp_path: Path) -> None:
    folder, _, _ = save(tmp_path / "head", "eagle")
    open_head(str(folder), TARGET, ("eagle",))
    damage(folder, how)
    with pytest.raises(ModelFileError, match=message) as caught:
        open_head(str(folder), TARGET, ("eagle",))
    assert str(folder) in str(caught.value)


def test_a_head_of_another_kind_or_target_is_refused(tmp_path: Path) -> None:
    folder, _, _ = save(tmp_path / "head", "medusa")
    context = DrafterContext(executor(), TARGET, None, lambda *_: None)
    with pytest.raises(ModelFileError, match="kind 'medusa', not 'eagle'"):
        registry.create(*registry.parse({"method": "eagle", "model": str(folder)}), context)
    with pytest.raises(ModelFileError, match=r"trained for random .* not for random"):
        open_head(str(folder), RandomCheckpoint(seed=1), ("medusa",))
    with pytest.raises(ConfigError, match="name the folder of a head"):
        registry.create(*registry.parse({"method": "eagle"}), context)


FORMATS = [
    ("eagle", "speculators"),
    ("eagle", "vllm"),
    ("eagle", "eagle"),
    ("medusa", "vllm"),
    ("dflash", "speculators"),
    ("dflash", "vllm"),
]


@pytest.mark.parametrize(("kind", "form"), FORMATS, ids=map(" as ".join, FORMATS))
def test_what_is_exported_is_read_back_the_same(kind: str, form: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = (
        {"has_lm_head": False, "sample_from_anchor": False} if (kind, form) == ("dflash", "vllm") else {}
    )
    config = config_of(
        kind, CONFIG, target_hash(TARGET), None if fields or kind == "medusa" else 40, **fields
    )
    tensors = {
        name: t if name == "draft_ids" else t.half().float() for name, t in random_tensors(config).items()
    }
    head = open_head(str(write_head(tmp_path / "ours", write_head_config(config), tensors)), TARGET, (kind,))
    export_head(head, TARGET, form, tmp_path / "theirs", "org/model")
    again = open_head(str(tmp_path / "theirs"), TARGET, (kind,))
    assert again.config.hidden_layers == config.hidden_layers
    assert {n: t.shape for n, t in again.tensors.items()} == {n: t.shape for n, t in head.tensors.items()}
    assert all(
        torch.equal(again.tensors[name], tensor)
        for name, tensor in head.tensors.items()
        if name != "lm_head.weight"
    )
    assert torch.allclose(again.tensors["lm_head.weight"], head.tensors["lm_head.weight"], atol=1e-3)


def test_an_exported_medusa_head_never_prefers_what_it_cannot_draft(tmp_path: Path) -> None:
    folder, _, tensors = save(tmp_path / "ours", "medusa")
    head = open_head(str(folder), TARGET, ("medusa",))
    export_head(head, TARGET, "vllm", tmp_path / "theirs", "org/model")
    again = open_head(str(tmp_path / "theirs"), TARGET, ("medusa",))
    assert again.config.draft_vocab_size == CONFIG.vocab_size
    states = torch.randn(500, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    best = (states @ tensors["lm_head.weight"].half().float().T).argmax(1)
    assert torch.equal(
        (states @ again.tensors["lm_head.weight"].T).argmax(1), tensors["draft_ids"].long()[best]
    )


def test_a_markov_head_is_exported_as_dspark(tmp_path: Path) -> None:
    folder, config, _ = save(tmp_path / "ours", "dflash", markov_rank=8)
    head = open_head(str(folder), TARGET, ("dflash",))
    export_head(head, TARGET, "speculators", tmp_path / "theirs", "org/model")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["speculators_model_type"] == "dspark"
    again = open_head(str(tmp_path / "theirs"), TARGET, ("dflash",))
    read: Any = again.config
    assert (read.markov_rank, read.sample_from_anchor, read.taps) == (8, True, config.taps)
    assert again.tensors.keys() == head.tensors.keys()
    assert all(
        torch.equal(tensor, head.tensors[name].half().float())
        for name, tensor in again.tensors.items()
        if name != "draft_ids"
    )
    with pytest.raises(ConfigError, match="use format speculators"):
        export_head(head, TARGET, "vllm", tmp_path / "plain", "org/model")


def test_a_format_that_cannot_hold_a_head_says_so(tmp_path: Path) -> None:
    folder, _, _ = save(tmp_path / "head", "medusa")
    head = open_head(str(folder), TARGET, ("medusa",))
    with pytest.raises(ConfigError, match="which has no medusa heads; use one of vllm"):
        export_head(head, TARGET, "speculators", tmp_path / "out", "org/model")


LAYER_IDS = {
    "speculators": (
        {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
        (0, 1, 3),
    ),
    "specforge": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        },
        (1, 2, 3),
    ),
    "vllm": (
        {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        },
        (0, 1, 2),
    ),
    "published": ({"architectures": ["LlamaForCausalLM"]}, (0, 2, 3)),
}


@pytest.mark.parametrize(("keys", "taps"), LAYER_IDS.values(), ids=LAYER_IDS)
def test_layer_numbers_mean_what_their_format_says(
    keys: dict[str, Any], taps: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _, _ = save(tmp_path / "ours", "eagle")
    export_head(open_head(str(folder), TARGET, ("eagle",)), TARGET, "vllm", tmp_path / "theirs", "org/model")
    values = json.loads((tmp_path / "theirs" / "config.json").read_text())
    del values["eagle_aux_hidden_state_layer_ids"], values["architectures"]
    if "speculators_model_type" in keys:
        values = {"transformer_layer_config": values, "draft_vocab_size": values["draft_vocab_size"]}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**values, **keys}))
    with caplog.at_level(logging.INFO, "paceline"):
        head = open_head(str(tmp_path / "theirs"), TARGET, ("eagle",))
    assert head.config.hidden_layers == taps
    assert any(str(taps) in record.getMessage() for record in caplog.records)


def test_lossy_proposals_and_unknown_variants_are_refused(tmp_path: Path) -> None:
    folder, _, _ = save(tmp_path / "ours", "eagle")
    export_head(
        open_head(str(folder), TARGET, ("eagle",)), TARGET, "speculators", tmp_path / "theirs", "org/model"
    )
    path = tmp_path / "theirs" / "config.json"
    good = json.loads(path.read_text())
    bad = json.loads(path.read_text())
    bad["speculators_config"]["proposal_methods"][0]["accept_tolerance"] = 0.1
    for values, message in (
        (bad, "accepts what the target would not say"),
        ({**good, "norm_before_fc": True}, "norm_before_fc"),
    ):
        path.write_text(json.dumps(values))
        with pytest.raises(ModelFileError, match=message):
            open_head(str(tmp_path / "theirs"), TARGET, ("eagle",))
    write_head(tmp_path / "theirs", {"architectures": ["Mystery"]}, {"x": torch.zeros(2)})
    with pytest.raises(ModelFileError, match="not a head that is known"):
        open_head(str(tmp_path / "theirs"), TARGET, ("eagle",))


def test_eagle_1_files_are_read(tmp_path: Path) -> None:
    config = eagle_1(CONFIG, has_fc_bias=True)
    tensors = random_tensors(config)
    values = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "bias": True,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
        "vocab_size": CONFIG.vocab_size, "num_hidden_layers": 1,
    }  # fmt: skip
    folder = write_head(
        tmp_path, values, {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    )
    head = open_head(str(folder), TARGET, ("eagle",))
    assert head.config == eagle_1(CONFIG, has_fc_bias=True, target_name=head.config.target_name)
    assert torch.equal(head.tensors["lm_head.weight"], TARGET.tensor("embed_tokens.weight"))


def test_published_medusa_files_are_read(tmp_path: Path) -> None:
    """Every head has an output layer of its own, and the config may name more heads than there are."""
    tensors = {}
    for i in range(3):
        generator = torch.Generator().manual_seed(i)
        tensors[f"medusa_head.{i}.0.linear.weight"] = torch.randn(64, 64, generator=generator) / 8
        tensors[f"medusa_head.{i}.0.linear.bias"] = torch.randn(64, generator=generator)
        tensors[f"medusa_head.{i}.1.weight"] = torch.randn(CONFIG.vocab_size, 64, generator=generator) / 4
    values = {"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "org/model"}
    head = open_head(str(write_head(tmp_path, values, tensors)), TARGET, ("medusa",))
    config: Any = head.config
    assert config.num_heads_ahead == 3
    for bits in (8, 32):
        if bits == 8:
            run_by: Any = MedusaHead(config, head.tensors, NORM)
        else:
            run_by = TorchMedusaHead(config, head.tensors, NORM, CPU)
        table = Linear(TARGET.tensor("embed_tokens.weight"), bits=bits).weight
        true = Oracle(config, head.tensors, table, bits).medusa(LAST[CONFIG.num_layers][8], NORM)
        assert torch.allclose(run_by.logits([ROW])[:, 0], true, atol=1e-4)


@pytest.mark.parametrize("is_tied", [False, True])
def test_mlp_speculators_are_read_and_run(is_tied: bool, tmp_path: Path) -> None:
    config = mlp_speculator(CONFIG, is_tied=is_tied)
    tensors = random_tensors(config)
    values = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": 64,
        "vocab_size": CONFIG.vocab_size, "inner_dim": 32, "n_predict": 3, "tie_weights": is_tied,
        "scale_input": True,
    }  # fmt: skip
    head = open_head(
        str(write_head(tmp_path, values, {f"speculator.{n}": t for n, t in tensors.items()})),
        TARGET,
        ("mlp_speculator",),
    )
    run_by = TorchMlpHead(config, head.tensors, NORM, CPU)
    tokens, _ = run_by.guess([Feed(None, 0, [21], [ROW])], [Sampler(0.0, 0, 0)], 5, 0.0)
    # type: torch.Tensor, int, list[int]
    state, token, steps = rms_norm(LAST[CONFIG.num_layers][8], NORM, config.rms_eps), 21, []
    state = state / state.square().mean().sqrt() / 2**0.5
    for step in range(3):
        emb, proj, out = 0 if is_tied else step, min(step, 1) if is_tied else step, 0 if is_tied else step
        keep = 0.5 ** (0.5 / 3)
        x = (
            tensors[f"proj.{proj}.weight"] @ state * keep
            + tensors[f"emb.{emb}.weight"][token] * ((1 - keep**2) * 32 / 2) ** 0.5
        )
        x = (
            x / (x.square().mean() + config.rms_eps).sqrt() * tensors[f"ln.{out}.weight"]
            + tensors[f"ln.{out}.bias"]
        )
        state = torch.nn.functional.gelu(x)
        token = int((tensors[f"head.{out}.weight"] @ state).argmax())
        steps.append(token)
    assert [row[0] for row in tokens] == steps
