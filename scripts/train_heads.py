"""Trains drafters of the default model from written text, within a time: what the shipped heads were made
with.

    python scripts/train_heads.py eagle,dflash,medusa,draft --text text --out heads --state state --seconds
    560 python scripts/train_heads.py eagle --text text --out heads --state state --seconds 560
    --schedule-seconds 1120 --resume

Several kinds learn from the same passes of the target, which are half of the work. Options of the recipe hold
for all of them.

The text comes from scripts/write_text.py. `--evaluate a.npz b.npz` also measures acceptance on those, each by
its name. Prints losses and held-out tokens a step as it goes; writes the head with 8 bits a weight (or 16),
its provenance and curves.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline.loaders.checkpoint import open_checkpoint
from paceline.runtime.device import resolve
from paceline.train.losses import Mix
from paceline.train.recipes import RECIPES, recipe_for
from paceline.train.session import train
from paceline.train.shards import joined, load_shard, load_shards
from paceline.train.trainer import Limit

CHANGES = {  # option -> its type: parts of the recipe that can be changed
    "num_steps": int, "rate": float, "batch_tokens": int, "max_length": int, "draft_vocab_size": int, "num_layers": int, "decay": float,
    "intermediate_size": int, "num_taps": int, "num_blocks": int, "markov_rank": int, "average": float, "num_held_out": int, "clip": float,
    "weight_decay": float, "warm_up": float,
}  # fmt: skip
EVERY = 10.0  # seconds between lines


class Lines:
    """Prints what a training reports, not too often."""

    def __init__(self) -> None:
        self.started = time.time()
        self.last: dict[
            str, tuple[float, int]
        ] = {}  # of each kind: when it was last printed, and its tokens then

    def __call__(self, what: str, numbers: dict[str, Any]) -> None:
        now, kind = time.time(), numbers["kind"]
        label = f"{now - self.started:6.0f} s  {kind:6}"
        if what == "step":
            before, tokens = self.last.setdefault(kind, (now, numbers["tokens"]))
            if now - before > EVERY:
                self.last[kind] = now, numbers["tokens"]
                speed = (numbers["tokens"] - tokens) / (now - before) / 1e3
                place = f"step {numbers['step']} round {numbers['round']}  {numbers['tokens'] / 1e6:.1f} M tokens ({speed:.0f} k/s)"
                values = f"loss {float(numbers['loss']):.3f} right {float(numbers['right']):.3f} rate {numbers['rate']:.1e}"
                print(label, place, values, flush=True)
        elif what == "measured":
            print(
                label,
                f"held out: tau {numbers['tau']:.3f}  [{_chances(numbers)}]  share {numbers['share']:.2f}",
                flush=True,
            )
        elif what == "saved":
            for name, found in numbers["acceptance"].items():
                print(f"{kind:6} tau {found['tau']:.3f}  {name}  [{_chances(found)}]", flush=True)


def _chances(numbers: dict[str, Any]) -> str:
    return " ".join(f"{chance:.3f}" for chance in numbers["by_position"])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", help=f"one or several of {', '.join(sorted(RECIPES))}, separated by commas")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="folders or files of shards")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="where checkpoints lie (default: OUT/KIND/state)")
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=560, help="of this call")
    parser.add_argument(
        "--schedule-seconds",
        type=float,
        help="of the whole training, where it is resumed (default: --seconds)",
    )
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--start", type=Path, help="a head to start from, or a folder with one for each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bits", type=int, default=8, choices=(8, 16))
    parser.add_argument(
        "--evaluate",
        type=Path,
        nargs="*",
        default=[],
        help="shards that acceptance is measured on at the end",
    )
    parser.add_argument("--pack", action="store_true", help="leave one KIND.tar in OUT instead of a folder")
    parser.add_argument("--mix", help="soft,hard,variation: weights of the losses")
    parser.add_argument("--no-lm-head", action="store_true", help="use the target's output layer")
    parser.add_argument("--own-lm-head", action="store_true", help="train an output layer")
    parser.add_argument(
        "--trunk",
        action="store_true",
        help="Medusa's heads read the output of a layer that reads the text first",
    )
    for name, kind in CHANGES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    asked = parser.parse_args()
    if asked.pack and asked.state is None:
        parser.error("--pack needs --state: a checkpoint does not belong into the archive")
    return asked


def main() -> None:
    started, asked = time.time(), options()
    changes: dict[str, Any] = {name: value for name in CHANGES if (value := getattr(asked, name)) is not None}
    if asked.mix:
        changes["mix"] = Mix(*(float(part) for part in asked.mix.split(",")))
    if asked.no_lm_head or asked.own_lm_head:
        changes["has_lm_head"] = asked.own_lm_head
    if asked.trunk:
        changes["has_trunk"] = True
    kinds, device = asked.kinds.split(","), resolve(asked.device)
    recipes = [recipe_for(kind, **changes) for kind in kinds]
    texts = joined([load_shards(path) for path in asked.text])
    print(
        f"{len(texts):,} sequences, {int(texts.starts[-1]):,} tokens, {texts.num_answer_tokens:,} of answers",
        *recipes,
        sep="\n",
        flush=True,
    )
    torch.set_float32_matmul_precision("high")
    folders = [asked.out / kind for kind in kinds]
    states = [asked.state / kind for kind in kinds] if asked.state else None
    train(
        open_checkpoint(asked.model, progress=False), texts, recipes, Limit(seconds=asked.schedule_seconds or asked.seconds), folders,
        device=device, seed=asked.seed, command=sys.argv, report=Lines(), states=states,
        is_resumed=asked.resume, start=asked.start, others={path.stem: load_shard(path) for path in asked.evaluate}, bits=asked.bits,
        is_over=lambda: time.time() - started > asked.seconds,
    )  # fmt: skip
    for folder in folders:
        print(
            f"{folder}: {(folder / 'model.safetensors').stat().st_size / 1e6:.1f} MB, {time.time() - started:.0f} s",
            flush=True,
        )
        if asked.pack:
            shutil.make_archive(str(folder), "tar", folder.parent, folder.name)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
