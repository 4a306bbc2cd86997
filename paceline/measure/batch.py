"""`paceline bench batch`: tokens a second by the number of requests at once, as ratios to plain decoding. A
wave of requests is timed from when the last of them has its first token to when the first of them ends. Every
row reads the same waves, in turn. Invariant: a wave in which a graph was recorded counts for no row.
"""

from __future__ import annotations

import gc
import time
from statistics import mean
from typing import Any

from paceline.api.llm import LLM
from paceline.core.errors import RequestError
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.engine.engine import Engine
from paceline.loaders.checkpoint import describe
from paceline.measure.engines import engine_of, ids_of, load_model, rows_of
from paceline.measure.options import Batch
from paceline.measure.prompts import chosen
from paceline.measure.results import Table, Tell
from paceline.measure.rows import PLAIN, in_turn, sizes_of

WARM_UPS = 2  # waves before any counts: in them the policy finds out which drafters are worth asking
MOST_WAVES = 4  # times the waves asked for, where many do not count
FEWEST_REQUESTS = 16  # of the waves of a level together
CONTEXT, PROMPT = 1536, 1000  # most tokens of a request, and of its prompt
LEGEND = "Ratios are to plain decoding in the same waves; different: texts that are not plain decoding's.\n"


class Run:
    def __init__(self, asked: Batch) -> None:
        self.asked, self.rows, self.prompts = asked, rows_of(asked.rows), chosen(asked.prompts, None)
        levels = sizes_of("--concurrency", asked.concurrency)
        self.num_waves = {level: max(asked.waves, FEWEST_REQUESTS // level) for level in levels}
        self.num_turns = sum(WARM_UPS + count for count in self.num_waves.values()) * len(self.rows)

    def report(self, tell: Tell) -> dict[str, Any]:
        tell("loading the model", 0)
        room = min(CONTEXT, describe(self.asked.model).config.max_context)
        limits = {"max_num_batched_tokens": self.asked.max_num_batched_tokens, "max_model_len": room}
        limits |= {"max_num_seqs": max(self.num_waves), "enable_prefix_caching": False, "progress": False}
        with load_model(self.asked, **limits) as llm:
            gc.collect()
            longest = min(PROMPT, room - self.asked.max_new_tokens)
            prompts = [ids_of(llm, prompt.text)[-longest:] for prompt in self.prompts]
            levels = [self._level(llm, prompts, level, tell) for level in self.num_waves]
            device, is_exact = llm.engine.executor.device.type, llm.engine.executor.decoder.is_exact
        is_ok = not (is_exact and any(level["different"] for level in levels))
        return {"model": llm.checkpoint.name, "device": device, "levels": levels, "is_ok": is_ok}

    def _level(self, llm: LLM, prompts: list[list[int]], level: int, tell: Tell) -> dict[str, Any]:
        # New engines for each level: an answer given before would be known when its prompt comes again.
        engines = {row: engine_of(llm, row) for row in self.rows}
        params = SamplingParams(temperature=0, max_tokens=self.asked.max_new_tokens, ignore_eos=True)
        counted: list[dict[str, float]] = []  # speeds of a wave, by row
        different, number, wanted = 0, 0, self.num_waves[level]
        while len(counted) < wanted and number <= MOST_WAVES * wanted:
            found, texts = {}, [prompts[(number * level + i) % len(prompts)] for i in range(level)]
            for name, engine in in_turn(engines.items(), number):
                gc.freeze()  # a collection that walked through what others have left would fall into a wave
                found[name] = wave(engine, [llm._intake.requests(ids, params)[0] for ids in texts])
                tell(f"{level} requests", 1)
            _, plain, _ = found[PLAIN]
            for _, outputs, _ in found.values():
                different += sum(a != b for a, b in zip(outputs, plain, strict=True))
            number += 1
            if number > WARM_UPS and all(is_clean for _, _, is_clean in found.values()):
                counted.append({name: speed for name, (speed, _, _) in found.items()})
        if not counted:
            what = f"graphs were recorded in all {number} waves"
            raise RequestError(f"{level} requests: {what}; give more --waves")
        speeds = {name: mean(each[name] for each in counted) for name in self.rows}
        return {
            "concurrency": level,
            "waves": [len(counted), number],
            "tokens_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
            "ratio": {name: round(speed / speeds[PLAIN], 3) for name, speed in speeds.items()},
            "of_waves": {name: [round(each[name] / each[PLAIN], 3) for each in counted] for name in speeds},
            "different": different,
        }


def wave(engine: Engine, requests: list[Request]) -> tuple[float, list[list[int]], bool]:
    """Tokens a second while all were running, the texts, and whether nothing was recorded meanwhile."""
    for request in requests:
        engine.add(request)
    while any(request.num_output == 0 for request in requests):
        engine.step()
    before, num_recorded = sum(r.num_output for r in requests), engine.executor.backend.num_recordings
    started = time.perf_counter()
    while not any(request.is_finished for request in requests):
        engine.step()
    speed = (sum(r.num_output for r in requests) - before) / (time.perf_counter() - started)
    is_clean = engine.executor.backend.num_recordings == num_recorded
    while not all(request.is_finished for request in requests):
        engine.step()
    for request in requests:
        engine.stats.pop(request.id, None)
    return speed, [request.output for request in requests], is_clean


def tables(report: dict[str, Any]) -> list[Table]:
    _, *names = report["levels"][0]["ratio"]
    rows = []
    for level in report["levels"]:
        ratios = [f"{level['ratio'][name]:.2f}" for name in names]
        plain = f"{level['tokens_per_s'][PLAIN]:,.0f}"
        rows.append((str(level["concurrency"]), plain, *ratios, str(level["different"])))
    columns, title = ("plain, tokens/s", *names, "different"), "plain decoding, and ratios to it"
    return [Table(f"{report['model']}: {title}", ("requests at once",), columns, rows)]
