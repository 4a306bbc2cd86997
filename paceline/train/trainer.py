"""The trainer: the target reads a batch, heads of all kinds guess, their disagreement with it is the loss.

Everything that decides the next step (weights, moments, place in the data) is in the checkpoint, and batches
and draws depend on seed and place alone. Invariant: a run that was interrupted ends as one that was not (with
a limit in tokens; seconds are never the same twice).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.errors import ConfigError, ModelFileError
from paceline.core.options import require
from paceline.heads.config import HeadConfig
from paceline.loaders.head_files import write_tensors
from paceline.train.lessons import Lessons, Seen, Teacher, agreement
from paceline.train.recipes import WIDTH, Recipe, head_config
from paceline.train.students import Acceptance, build_student, measure
from paceline.train.texts import Batch, Texts, batches, prefetched

STATE = "state.safetensors"  # weights, averages, moments and the place in the data
MOMENTS = ("exp_avg", "exp_avg_sq")


class Limit(NamedTuple):
    """How much training: tokens of text read, or seconds. One of them."""

    tokens: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Place:
    """How far a training has come."""

    step: int = 0
    round: int = 0  # times through the data
    batch: int = 0  # within the round
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)  # one record for each measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What a training is asked for, beside its text and recipes."""

    limit: Limit
    device: torch.device
    seed: int = 0
    bits: int = 16  # of a weight in the file
    is_resumed: bool = False
    start: Path | None = None  # a head whose weights are the first ones, or a folder of one for each kind
    others: Mapping[str, Texts] = field(default_factory=dict)  # texts to measure acceptance on at the end
    num_measures: int = 20  # on the way
    command: Sequence[str] = ()  # for the provenance
    is_over: Callable[[], bool] = lambda: False  # asked after every step: whether to stop before the limit
    # is told of each "step", of what was "measured" and of what was "saved", with its numbers
    report: Callable[[str, dict[str, Any]], None] = lambda what, numbers: None


class Trainer:
    """One head that learns."""

    def __init__(self, lessons: Lessons, recipe: Recipe, limit: Limit, seed: int = 0) -> None:
        is_limited = (limit.tokens or 0) > 0 or (limit.seconds or 0) > 0
        require(is_limited, "limit", tuple(limit), "train for some tokens or seconds")
        self.lessons, self.recipe, self.limit, self.seed = lessons, recipe, limit, seed
        self.device, self.dtype = lessons.target.head.device, lessons.target.head.dtype
        target, name = lessons.target.config, lessons.name
        self.config: HeadConfig = head_config(recipe, target, name, lessons.target_hash, lessons.blank)
        torch.manual_seed(seed)
        ids = torch.from_numpy(lessons.draft_ids)
        self.head = build_student(self.config, lessons.target, ids, recipe.max_length)
        self.weights: dict[str, torch.nn.Parameter] = dict(self.head.module.named_parameters())
        fixed: dict[str, Any] = {"betas": (0.9, 0.95), "fused": self.device.type == "cuda"}
        fixed |= {"lr": recipe.rate, "weight_decay": recipe.weight_decay}
        self.optimizer = torch.optim.AdamW(self.weights.values(), **fixed)
        kept = self.weights if recipe.average else {}
        self.average = {name: weight.detach().clone() for name, weight in kept.items()}
        self.place, self.last_loss, self.is_fresh = Place(), torch.zeros(()), True

    @property
    def share(self) -> float:
        """How much of the training is done, 0 to 1."""
        tokens, seconds = self.limit
        return min(self.place.tokens / tokens if tokens else self.place.seconds / (seconds or 1), 1.0)

    def rest_of_round(self) -> Iterator[Batch]:
        """What is left of this time through the data."""
        lessons, recipe = self.lessons, self.recipe
        draw = np.random.default_rng([self.seed, self.place.round])
        made = batches(lessons.texts, lessons.learned, recipe.batch_tokens, recipe.max_length, draw)
        return prefetched(islice(made, self.place.batch, None))

    def learn(self, batch: Batch, seen: Seen, teacher: Teacher) -> dict[str, Any]:
        """One step. batch, seen and teacher lie on the device."""
        recipe = self.recipe
        if self.place.step == 0 and self.is_fresh:
            self.head.start_from(seen, batch)
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + self.place.step)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            guesses = self.head.guesses(batch, seen, recipe.num_steps, draw)
        total = weight = torch.zeros((), device=self.device)
        right = []
        for guess in guesses:
            best = teacher.best[guess.rows.clamp(min=0)]
            is_taught = (guess.rows >= 0) & (best >= 0)
            scale = is_taught.float() * recipe.decay**guess.step
            hidden = guess.hidden.to(self.dtype)
            loss, guessed = agreement(hidden, guess.weight, teacher, guess.rows, scale, recipe.mix)
            total, weight = total + loss, weight + scale.sum()
            right.append((is_taught & (guessed == best)).sum() / (guess.rows >= 0).sum().clamp(min=1))
        loss = total / weight.clamp(min=1)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), recipe.clip)
        self.optimizer.step()
        keep = min(recipe.average, (1 + self.place.step) / (10 + self.place.step))
        for name, average in self.average.items():
            average.lerp_(self.weights[name].detach(), 1 - keep)
        self.last_loss = loss.detach()
        self.place.step, self.place.batch = self.place.step + 1, self.place.batch + 1
        self.place.tokens += batch.num_tokens
        return {"loss": self.last_loss, "right": torch.stack(right).mean(), **self.numbers()}

    def _rate(self) -> float:
        """Rises to the recipe's rate, then falls as a cosine; wide layers take smaller steps."""
        share, warm_up = self.share, self.recipe.warm_up
        highest = self.recipe.rate * min(max(WIDTH / self.config.hidden_size, 0.2), 4.0)
        if share < warm_up:
            return highest * max(share / warm_up, 0.01)
        after = (share - warm_up) / (1 - warm_up)
        return highest * max(0.5 + 0.5 * math.cos(math.pi * after), 0.01)

    def measure(self) -> dict[str, Any]:
        """Acceptance on what is held out, noted in the curve."""
        loss, steps = float(self.last_loss), self.place.step
        if not math.isfinite(loss):
            raise ConfigError(f"the loss is {loss} after {steps} steps; lower the learning rate")
        found = self.accept(self.lessons.texts, self.lessons.held)
        record = {**self.numbers(), "loss": loss, **found._asdict()}
        self.place.curve.append(record)
        return record

    def accept(self, texts: Texts, chosen: np.ndarray) -> Acceptance:
        """Acceptance on some sequences of a text."""
        made = batches(texts, chosen, max(self.recipe.batch_tokens // 2, 1), self.recipe.max_length, None)
        with self.averaged():
            return measure(self.head, made, self.recipe.num_steps, self.dtype)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While inside, the head has its averaged weights, if they are kept."""
        own = {name: self.weights[name].data for name in self.average}
        for name, average in self.average.items():
            self.weights[name].data = average
        try:
            yield
        finally:
            for name, data in own.items():
                self.weights[name].data = data

    def numbers(self) -> dict[str, Any]:
        place = {name: getattr(self.place, name) for name in Place.__slots__ if name != "curve"}
        return {**place, "kind": self.recipe.kind, "share": self.share, "rate": self._rate()}

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the training that goes on from it."""
        target = f"{self.config.target_name} ({self.config.target_hash[:12]})"
        recipe = json.loads(json.dumps(asdict(self.recipe)))
        return {"recipe": recipe, "target": target, "text": self.lessons.digest, "seed": self.seed}

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            tensors[f"weight:{name}"] = weight.detach()
            moments = self.optimizer.state.get(weight, {})
            tensors.update({f"{moment}:{name}": moments[moment] for moment in MOMENTS if moment in moments})
        tensors.update({f"average:{name}": weight for name, weight in self.average.items()})
        numbers = json.dumps({"identity": self._identity(), "place": asdict(self.place)})
        stored = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        write_tensors(folder / STATE, stored, {"numbers": numbers})

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        path = folder / STATE
        if not path.is_file():
            raise ConfigError(f"{folder} holds no checkpoint of a training ({STATE}); start without resuming")
        try:
            with safe_open(path, framework="pt") as opened:
                numbers = json.loads(opened.metadata()["numbers"])
            tensors = load_file(path)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"{path} is not a whole checkpoint ({error}); start anew") from error
        theirs = numbers.get("identity", {})
        for name, value in self._identity().items():
            if theirs.get(name) != value:
                what = f"{folder} was trained with {name} {theirs.get(name)!r:.90}, not {value!r:.90}"
                raise ConfigError(f"{what}; resume with the same, or start anew")
        self.place = Place(**numbers["place"])
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(tensors[f"weight:{name}"])
                if f"{MOMENTS[0]}:{name}" in tensors:
                    state = {moment: tensors[f"{moment}:{name}"].to(weight.device) for moment in MOMENTS}
                    state["step"] = torch.tensor(float(self.place.step), device=weight.device)
                    self.optimizer.state[weight] = state
            for name in self.average:
                self.average[name].copy_(tensors[f"average:{name}"])
