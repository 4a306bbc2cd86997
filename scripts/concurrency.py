"""Tokens a second by the number of requests at once: plain decoding, `auto` with and without the shipped
head, and a fixed K = 4 of suffix matching, taking turns on the same model.

    python scripts/concurrency.py --levels 1,2,4,8,16,32 --plot docs/images/concurrency_cpu.png
    python scripts/concurrency.py --device cuda --levels 1,2,4,8,16,32,64,128 --rows 8192 --plot
    docs/images/concurrency_gpu.png

A wave is so many requests with prompts of their own, all writing as many tokens, timed while all of them are.
Every engine reads the same waves, in an order that turns round, and each level's figure is the speed over all
of them, over plain decoding's. A wave in which somebody recorded a CUDA graph or compiled a kernel counts for
nobody. Invariant: greedy texts are compared with plain decoding's, and on a CPU a single different token is
an error.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from statistics import mean
from typing import Any

from waves import Wave, wave

from paceline import LLM, SamplingParams
from paceline.drafters import registry, shipped
from paceline.engine.costs import CostModel
from paceline.engine.engine import Engine
from paceline.engine.plan import FixedPolicy
from paceline.engine.policy import AutoPolicy
from paceline.measure.prompts import load

K = 4
WARM_UPS = (
    2  # waves before any counts: in them the policy spends what it may on finding out who is worth asking
)
MOST_WAVES = 4  # times the waves asked for, where many do not count


def prompts_of(llm: LLM, path: Path | None) -> list[list[int]]:
    texts = [prompt.text for prompt in load()]
    if path is not None:
        texts = [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines()]
    return [llm.tokenizer.encode_chat([{"role": "user", "content": text}])[-1000:] for text in texts]


def engines_of(llm: LLM, costs: CostModel) -> dict[str, Engine]:
    """Each with a drafter of its own, new for each level: an answer given before would be known when the same
    prompt comes again.
    """
    runner, config = llm.engine.runner, llm.engine.config
    head = shipped.shipped_head(llm.checkpoint, True)
    fixed = registry.create(
        *registry.parse({"method": "suffix", "num_speculative_tokens": K}), llm.surroundings
    )

    def auto(*options: Any) -> Engine:
        drafters = [registry.create(*registry.parse(each), llm.surroundings) for each in options]
        return Engine(
            runner,
            drafters[0],
            config,
            AutoPolicy(drafters, costs.fresh(), has_trees=runner.decoder.checks_trees),
        )

    engines = {"plain": Engine(runner, None, config), "auto, training-free": auto(*registry.AUTO)}
    engines |= {} if head is None else {"auto": auto(*registry.AUTO, head)}
    return engines | {f"fixed K = {K}": Engine(runner, fixed, config, FixedPolicy(fixed, K))}


def measure(
    llm: LLM, engines: dict[str, Engine], prompts: list[list[int]], level: int, tokens: int, waves: int
) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    counted: list[dict[str, float]] = []  # speeds of a wave, by engine
    names, different, number = list(engines), 0, 0
    while len(counted) < waves and number <= MOST_WAVES * waves:
        chosen = [prompts[(number * level + i) % len(prompts)] for i in range(level)]
        found: dict[str, Wave] = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            # what others have left: a collection that looked at all of it would fall into somebody's wave
            gc.freeze()
            found[name] = wave(llm, engines[name], chosen, params)
        different += sum(
            a != b for name in names for a, b in zip(found[name].texts, found["plain"].texts, strict=True)
        )
        number += 1
        if number > WARM_UPS and all(each.is_clean for each in found.values()):
            counted.append({name: each.speed for name, each in found.items()})
    if not counted:
        raise SystemExit(
            f"{level} requests: something was recorded in every one of {number} waves; give more --waves"
        )
    mean_speeds = {name: mean(speeds[name] for speeds in counted) for name in names}
    ratios = {name: round(speed / mean_speeds["plain"], 3) for name, speed in mean_speeds.items()}
    return {
        "concurrency": level,
        "waves": [len(counted), number],
        "tokens_per_s": {name: round(speed, 1) for name, speed in mean_speeds.items()},
        "ratio": ratios,
        "of_waves": {
            name: [round(speeds[name] / speeds["plain"], 3) for speeds in counted] for name in names[1:]
        },
        "different": different,
        "phases_ms": {
            name: {phase: round(1e3 * s, 1) for phase, s in engine.phases.to_dict().items()}
            for name, engine in engines.items()
        },
        "steps": {name: dict(sorted(engine.totals.lengths.items())) for name, engine in engines.items()},
    }


def plot(records: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    levels = [record["concurrency"] for record in records]
    for name, colour in zip(records[0]["ratio"], ("#777777", "#5aa9e6", "#0a7d4b", "#c2571a"), strict=False):
        axes.plot(levels, [record["ratio"][name] for record in records], marker="o", label=name, color=colour)
    axes.set(
        xscale="log",
        xticks=levels,
        xticklabels=levels,
        xlabel="requests at once",
        ylabel="speed over plain decoding",
        title=title,
    )
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--levels", default="1,2,4,8,16,32")
    parser.add_argument(
        "--prompts", type=Path, help="lines of JSON with a field turns; default: those of the package"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument(
        "--rows", type=int, default=512, help="in one pass: with many, all requests of a wave begin together"
    )
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    levels = [int(level) for level in asked.levels.split(",")]
    with LLM(
        asked.model, device=asked.device, max_num_seqs=max(levels), max_num_batched_tokens=asked.rows, max_model_len=1536,
        enable_prefix_caching=False, progress=False,
    ) as llm:  # fmt: skip
        gc.collect()
        prompts, records, costs = prompts_of(llm, asked.prompts), [], llm.engine.policy.costs
        for level in levels:
            records.append(
                measure(
                    llm, engines_of(llm, costs), prompts, level, asked.tokens, max(asked.waves, 16 // level)
                )
            )
            print(json.dumps(records[-1]), flush=True)
            if llm.engine.runner.decoder.is_exact and records[-1]["different"]:
                raise SystemExit("a text differs from plain decoding's")
        title = f"{llm.checkpoint.name}, {'CPU' if llm.engine.runner.kv.device.type == 'cpu' else 'GPU'}"
    if asked.json is not None:
        asked.json.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    if asked.plot is not None:
        plot(records, title, asked.plot)


if __name__ == "__main__":
    main()
