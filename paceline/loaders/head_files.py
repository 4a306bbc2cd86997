"""The files of a learned head: a folder with config.json and safetensors, read tensor by tensor.

Invariant: names, types and shapes are checked against what the head's config asks for before anything is
read, every number that is read is finite, and nothing but safetensors is ever opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, ModelFileError
from paceline.heads.config import HeadConfig
from paceline.loaders.checkpoint import check_shapes
from paceline.loaders.fields import Fields, read_json
from paceline.loaders.hf_config import rope_of
from paceline.loaders.safetensors import TYPES, tensors_of, weight_files
from paceline.models.quantize import GROUP, STORED, padded

if TYPE_CHECKING:
    import torch

    from paceline.loaders.checkpoint import Checkpoint

WHOLE = ("I32", "I64")
EXPECTED = "give the folder of a head: config.json and .safetensors"


@dataclass(frozen=True, slots=True)
class Head:
    """A head as it is run: our names and shapes, whatever wrote the files."""

    config: HeadConfig
    tensors: dict[str, torch.Tensor]  # float32; `draft_ids` int64
    where: str
    dialect: str


class HeadFiles:
    """A folder that may hold a head."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.where = folder, str(folder)
        if not (folder / "config.json").is_file():
            raise ModelFileError(f"{folder} has no config.json; {EXPECTED}")
        self.values: dict[str, Any] = read_json(folder / "config.json")
        self.fields = Fields(str(folder / "config.json"), self.values)
        self.found = tensors_of(weight_files(folder))  # name -> file, type, shape

    def has(self, name: str) -> bool:
        return name in self.found

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {message}")

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.found:
            raise self.error(f"missing tensor {name}; the file is incomplete or of another kind of head")
        return self.found[name][2]

    def read(
        self, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, str] | None = None
    ) -> dict[str, torch.Tensor]:
        """The tensors of these shapes; `stored` gives the name in the file where it is another."""
        names = {name: (stored or {}).get(name, name) for name in shapes}
        scaled = {name for name, there in names.items() if self.has(scales_of(there))}
        there = [n for n in shapes if self.has(names[n])]
        found = {names[n]: self._shape_of(names[n], shapes[n], n in scaled) for n in there}
        check_shapes(self.folder, found, {names[n]: shape for n, shape in shapes.items()})
        for name in shapes:
            self._check_type(names[name], name in scaled)
        whole = {name: self._tensor(names[name]) for name in shapes if name not in scaled}
        return whole | {name: self._scaled(names[name], shapes[name]) for name in scaled}

    def _shape_of(self, name: str, wanted: tuple[int, ...], is_scaled: bool) -> tuple[int, ...]:
        """As if it were stored in floats: integers are filled up to whole groups."""
        shape = self.found[name][2]
        if not is_scaled or len(wanted) != 2:
            return shape
        width = padded(wanted[1], GROUP[8])
        scales = self.found[scales_of(name)][2]
        return wanted if (shape, scales) == ((wanted[0], width), (wanted[0], width // GROUP[8])) else shape

    def _check_type(self, name: str, is_scaled: bool) -> None:
        kind = self.found[name][1]
        is_whole = name.endswith(("draft_ids", "d2t", "token_map"))
        allowed = ("I8",) if is_scaled else WHOLE if is_whole else TYPES
        if kind not in allowed:
            known = ", ".join(allowed)
            raise self.error(f"tensor {name} has type {kind}, which is not read; use one of {known}")

    def _tensor(self, name: str) -> torch.Tensor:
        """Floats as float32, whole numbers as int64."""
        import torch

        raw = self._raw(name)
        if not raw.is_floating_point():
            return raw.to(torch.int64)
        weight = raw.to(torch.float32)
        if not bool(torch.isfinite(weight).all()):
            raise self.error(f"tensor {name} holds numbers that are not finite; the file is damaged")
        return weight

    def _scaled(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        import torch

        values, scales = self._raw(name).to(torch.float32), self._tensor(scales_of(name)) / STORED
        grouped = values.unflatten(1, (-1, GROUP[8])) * scales[:, :, None]
        return grouped.flatten(1)[:, : shape[1]].contiguous()

    def _raw(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        file = self.found[name][0]
        try:
            with safe_open(file, framework="pt") as tensors:
                weight: torch.Tensor = tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise self.error(f"tensor {name} cannot be read ({error}); fetch the file again") from error
        return weight


def scales_of(name: str) -> str:
    """Where the scales of a tensor of integers lie."""
    return f"{name.removesuffix('.weight')}.scales"


# What the readers of other projects' files share


def foreign_config(kind: Any, files: HeadFiles, target: Checkpoint, **fields: Any) -> Any:
    """The config of a head that another project made: it names its target, if at all, and has no hash."""
    named = files.fields.section("speculators_config").section("verifier").get("name_or_path")
    name = str(named or files.values.get("base_model_name_or_path") or "another project's target")
    shared = {"target_name": name, "target_hash": "", "target_layers": target.config.num_layers}
    try:
        return kind(**shared, **fields)
    except (ConfigError, TypeError, ValueError) as error:
        raise files.error(str(error)) from error


def layer_fields(keys: Fields) -> dict[str, Any]:
    """Sizes of a head's layers, as Hugging Face names them."""
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    return {
        "vocab_size": keys.count("vocab_size"),
        "hidden_size": hidden,
        "rms_eps": keys.number("rms_norm_eps", 1e-6),
        "num_heads": heads,
        "num_kv_heads": keys.count("num_key_value_heads", heads),
        "head_dim": keys.count("head_dim", hidden // heads or None),
        "intermediate_size": keys.count("intermediate_size"),
        "rope": rope_of(keys),
    }


def refuse_any(names: Sequence[str], *sections: Fields) -> None:
    """What a config asks for and no drafter does is refused by name."""
    for fields in sections:
        for name in names:
            if fields.get(name):
                raise fields.refuse(name, "is not supported; use a head without it")


def is_list_of_layers(ids: Any) -> bool:
    return isinstance(ids, list) and bool(ids) and all(type(i) is int for i in ids)
