"""The trainer: the target reads a batch, heads of all kinds guess, their disagreement with it is the loss.

All that decides the next step (weights, moments, place in the data) is in the checkpoint; batches and draws
depend on seed and place alone. Invariant: with a limit in tokens, an interrupted run ends as any other.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from paceline.core.errors import ConfigError, ModelFileError
from paceline.core.options import require
from paceline.heads.config import HeadConfig
from paceline.loaders.head_files import write_tensors
from paceline.train.lessons import Lessons, Seen, Teacher, agreement
from paceline.train.recipes import WIDTH, Recipe, head_config
from paceline.train.students import Acceptance, build_student, measure
from paceline.train.texts import Batch, Texts, batches, prefetched

STATE = "state.safetensors"  # weights, moments and the place in the data


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

    tokens: int | None = None  # how much is read; or for how many seconds, one of them
    seconds: float | None = None
    device: torch.device
    seed: int = 0
    bits: int = 16  # of a weight in the file
    is_resumed: bool = False
    start: Path | None = None  # a head whose weights are the first ones, or a folder of one for each kind
    others: Mapping[str, Texts] = field(default_factory=dict)  # texts to measure acceptance on at the end
    num_measures: int = 20  # on the way
    command: Sequence[str] = ()  # for the provenance
    is_over: Callable[[], bool] = lambda: False  # asked after every step: whether to stop before the limit
    # is told what was "begun", of each "step", of what was "measured" and of what was "saved", with numbers
    report: Callable[[str, dict[str, Any]], None] = lambda what, numbers: None


class Trainer:
    """One head that learns."""

    def __init__(self, lessons: Lessons, recipe: Recipe, asked: TrainConfig) -> None:
        limit = asked.tokens or asked.seconds or 0
        require(limit > 0, "limit", limit, "train for some tokens or seconds")
        recipe = replace(recipe, draft_vocab_size=len(lessons.draft_ids))
        self.lessons, self.recipe, self.asked, self.seed = lessons, recipe, asked, asked.seed
        target, name, weight = lessons.target.config, lessons.name, lessons.target.lm_head.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.config: HeadConfig = head_config(recipe, target, name, lessons.target_hash, lessons.blank)
        torch.manual_seed(self.seed)
        ids = torch.from_numpy(lessons.draft_ids)
        self.head = build_student(self.config, lessons.target, ids, recipe.max_length)
        self.weights: dict[str, torch.nn.Parameter] = dict(self.head.module.named_parameters())
        fixed: dict[str, Any] = {"betas": (0.9, 0.95), "fused": self.device.type == "cuda"}
        fixed |= {"lr": recipe.rate, "weight_decay": recipe.weight_decay}
        self.optimizer = torch.optim.AdamW(self.weights.values(), **fixed)
        self.place, self.last_loss, self.is_fresh = Place(), torch.zeros(()), True

    @property
    def share(self) -> float:
        """How much of the training is done, 0 to 1."""
        tokens, seconds = self.asked.tokens, self.asked.seconds
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
            loss, guessed = agreement(guess, teacher, scale, recipe.mix, self.dtype)
            total, weight = total + loss, weight + scale.sum()
            right.append((is_taught & (guessed == best)).sum() / (guess.rows >= 0).sum().clamp(min=1))
        loss = total / weight.clamp(min=1)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), recipe.clip)
        self.optimizer.step()
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
        return measure(self.head, made, self.recipe.num_steps, self.dtype)

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
        moments = {str(number): each for number, each in self.optimizer.state_dict()["state"].items()}
        parts = {"weights": self.head.module.state_dict(), **moments}
        named = {f"{part}/{name}": tensor for part in parts for name, tensor in parts[part].items()}
        tensors = {name: tensor.contiguous().cpu() for name, tensor in named.items()}
        numbers = json.dumps({"identity": self._identity(), "place": asdict(self.place)})
        write_tensors(folder / STATE, tensors, {"numbers": numbers})

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        path, parts = folder / STATE, defaultdict[str, dict[str, torch.Tensor]](dict)
        if not path.is_file():
            raise ConfigError(f"{folder} holds no checkpoint of a training ({STATE}); start without resuming")
        try:
            with safe_open(path, framework="pt", device=str(self.device)) as opened:
                numbers = json.loads(opened.metadata()["numbers"])
                for part, name in (key.split("/", 1) for key in opened.offset_keys()):
                    parts[part][name] = opened.get_tensor(f"{part}/{name}")
            theirs = numbers["identity"]
        except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
            raise ModelFileError(f"{path} is not a whole checkpoint ({error}); start anew") from error
        for name, value in self._identity().items():
            if theirs.get(name) != value:
                what = f"{folder} was trained with {name} {theirs.get(name)!r:.90}, not {value!r:.90}"
                raise ConfigError(f"{what}; resume with the same, or start anew")
        self.place = Place(**numbers["place"])
        self.head.module.load_state_dict(parts.pop("weights"))
        moments, groups = {int(n): parts[n] for n in parts}, self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
