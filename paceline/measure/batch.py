"""`paceline bench batch`: tokens a second by the number of requests at once, as ratios to plain decoding.

A wave is a number of requests with prompts of their own, timed from when the last of them has its first token
to when the first of them ends: a wave that is running out of requests says nothing about that number of them.
Every row reads the same waves, in an order that turns round. Invariant: a wave in which a CUDA graph was
recorded or a kernel compiled counts for no row.
"""

from __future__ import annotations

import gc
import time
from statistics import mean
from typing import Any, NamedTuple

from paceline.api.intake import Intake
from paceline.api.llm import LLM
from paceline.core.errors import RequestError
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.engine.engine import Engine
from paceline.loaders.checkpoint import describe
from paceline.measure.engines import engine_of, ids_of, load, rotated, rows_of
from paceline.measure.options import Batch
from paceline.measure.prompts import Prompt, chosen
from paceline.measure.results import Table, Tell
from paceline.measure.rows import PLAIN, sizes_of

WARM_UPS = 2  # waves before any counts: in them the policy finds out which drafters are worth asking
MOST_WAVES = 4  # times the waves asked for, where many do not count
FEWEST_REQUESTS = 16  # of the waves of a level together
CONTEXT, PROMPT = 1536, 1000  # most tokens of a request, and of its prompt
LEGEND = "Ratios are to plain decoding in the same waves; different: texts that are not plain decoding's.\n"


class Plan(NamedTuple):
    asked: Batch
    rows: list[str]
    levels: list[int]
    prompts: list[Prompt]


class Wave(NamedTuple):
    speed: float  # tokens a second while all were running
    texts: list[list[int]]
    is_clean: bool  # nothing was recorded or compiled meanwhile


def prepare(asked: Batch) -> Plan:
    levels = sizes_of("--concurrency", asked.concurrency)
    return Plan(asked, rows_of(asked.rows), levels, chosen(asked.prompts, None))


def num_turns(plan: Plan) -> int:
    return sum((WARM_UPS + _num_waves(plan, level)) * len(plan.rows) for level in plan.levels)


def _num_waves(plan: Plan, level: int) -> int:
    return max(plan.asked.waves, FEWEST_REQUESTS // level)


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    asked = plan.asked
    tell("loading the model", 0)
    limits = {"max_num_seqs": max(plan.levels), "max_num_batched_tokens": asked.max_num_batched_tokens}
    limits["max_model_len"] = min(CONTEXT, describe(asked.model).config.max_context)
    with load(asked, **limits, enable_prefix_caching=False, progress=False) as llm:
        gc.collect()
        room = min(PROMPT, limits["max_model_len"] - asked.max_new_tokens)
        prompts = [ids_of(llm, prompt.text)[-room:] for prompt in plan.prompts]
        levels = []
        for level in plan.levels:
            # New engines for each level: an answer given before would be known when its prompt comes again.
            engines = {row: engine_of(llm, row) for row in plan.rows}
            levels.append(_level(llm, engines, prompts, level, plan, tell))
        device, is_exact = llm.engine.executor.device.type, llm.engine.executor.decoder.is_exact
    is_ok = not (is_exact and any(level["different"] for level in levels))
    return {"model": llm.checkpoint.name, "device": device, "levels": levels, "is_ok": is_ok}


def _level(
    llm: LLM, engines: dict[str, Engine], prompts: list[list[int]], level: int, plan: Plan, tell: Tell
) -> dict[str, Any]:
    intake = Intake(llm.tokenizer, llm.checkpoint.config.vocab_size, llm.engine.config.max_model_len)
    params = SamplingParams(temperature=0, max_tokens=plan.asked.max_new_tokens, ignore_eos=True)
    counted: list[dict[str, float]] = []  # speeds of a wave, by row
    names, different, number, wanted = list(engines), 0, 0, _num_waves(plan, level)
    while len(counted) < wanted and number <= MOST_WAVES * wanted:
        texts = [prompts[(number * level + i) % len(prompts)] for i in range(level)]
        found: dict[str, Wave] = {}
        for name, engine in rotated(engines, number):
            gc.freeze()  # a collection that walked through what others have left would fall into a wave
            found[name] = wave(engine, [intake.requests(ids, params)[0] for ids in texts])
            tell(f"{level} requests", 1)
        plain = found[PLAIN].texts
        different += sum(a != b for each in found.values() for a, b in zip(each.texts, plain, strict=True))
        number += 1
        if number > WARM_UPS and all(each.is_clean for each in found.values()):
            counted.append({name: each.speed for name, each in found.items()})
    if not counted:
        raise RequestError(f"{level} requests: graphs were recorded in all {number} waves; give more --waves")
    speeds = {name: mean(each[name] for each in counted) for name in names}
    return {
        "concurrency": level,
        "waves": [len(counted), number],
        "tokens_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
        "ratio": {name: round(speed / speeds[PLAIN], 3) for name, speed in speeds.items()},
        "of_waves": {name: [round(each[name] / each[PLAIN], 3) for each in counted] for name in names},
        "different": different,
    }


def wave(engine: Engine, requests: list[Request]) -> Wave:
    for request in requests:
        engine.add(request)
    while any(request.num_output == 0 for request in requests):
        engine.step()
    before, num_recorded = _written(requests), engine.executor.backend.num_recordings
    started = time.perf_counter()
    while not any(request.is_finished for request in requests):
        engine.step()
    speed = (_written(requests) - before) / (time.perf_counter() - started)
    is_clean = engine.executor.backend.num_recordings == num_recorded
    while not all(request.is_finished for request in requests):
        engine.step()
    for request in requests:
        engine.stats.pop(request.id, None)
    return Wave(speed, [request.output for request in requests], is_clean)


def _written(requests: list[Request]) -> int:
    return sum(request.num_output for request in requests)


def tables(report: dict[str, Any]) -> list[Table]:
    names = list(report["levels"][0]["ratio"])
    rows = []
    for level in report["levels"]:
        ratios = [f"{level['ratio'][name]:.2f}" for name in names[1:]]
        plain = f"{level['tokens_per_s'][PLAIN]:,.0f}"
        rows.append((str(level["concurrency"]), plain, *ratios, str(level["different"])))
    columns = ("plain, tokens/s", *names[1:], "different")
    title = f"{report['model']}: plain decoding, and ratios to it"
    return [Table(title, ("requests at once",), columns, rows)]
