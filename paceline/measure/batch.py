"""`paceline bench batch`: tokens a second by the number of requests at once, as ratios to plain decoding. All
rows read the same waves. Warm, they take turns on one loaded model, and a wave is timed from when the last of
its requests has its first token to when the first ends. Cold, each is a fresh process, one after the other.
Invariant: cold, all counts: loading from the start of the process, waves from the first, to their very ends.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import mean, median
from typing import Any

from paceline.api.llm import LLM
from paceline.core.errors import ConfigError, ModelFileError
from paceline.core.options import require
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.engine.engine import Engine
from paceline.loaders import hub
from paceline.loaders.checkpoint import Checkpoint, describe, open_checkpoint
from paceline.loaders.tokenizer import Tokenizer
from paceline.measure.engines import engine_of, ids_of, load_model, rows_of, speculation_of
from paceline.measure.models import hf_folder, vllm_head
from paceline.measure.options import Batch
from paceline.measure.processes import ANSWER_S, WorkerError, peer_worker
from paceline.measure.prompts import chosen
from paceline.measure.results import Table, Tell, cell, table_of
from paceline.measure.rows import OURS, PLAIN, Row, in_turn, names_of, peer_python, sizes_of
from paceline.runtime.backend import resolve

WARM_UPS = 2  # warm waves before any counts: in them the policy finds out which drafters are worth asking
FEWEST_REQUESTS = 24  # of the waves of a level together
CONTEXT, PROMPT = 1536, 1000  # most tokens of a request, and of its prompt
SYNTHETIC = "synthetic"
PEER, HEAD, DRAFTED = "vllm", "eagle", 3  # tokens that the peer's head drafts
COLD = {"load": "{load_s:.1f}", "tok/s": "{tokens_per_s:,.1f}", "ratio": "{ratio:.2f}"}
COLD |= {"steady": "{steady_tokens_per_s:,.1f}", "median": "{median_s:.3f}", "worst": "{worst_s:.3f}"}
COLD |= {"recorded": "{recordings}", "different": "{different}"}
LEGEND = """Ratios are to plain decoding in the same waves; recorded: graphs recorded meanwhile; different:
texts that are not plain decoding's. Cold: load, median and worst wave in seconds; steady: the later half.
"""
Record = dict[str, Any]
Waves = dict[int, list[Any]]  # by requests at once, wave by wave: the prompts' tokens, or the answer


class Run:
    def __init__(self, asked: Batch) -> None:
        self.asked, self.prompts, self.device = asked, chosen(asked.prompts, None), resolve(asked.device).type
        self.rows = {name: Row(OURS, asked.dtype, name) for name in rows_of(asked.rows, not asked.cold)}
        self.acceptance = _rates(asked.acceptance)
        levels, extra = sizes_of("--concurrency", asked.concurrency), 0 if asked.cold else WARM_UPS
        self.num_waves = {level: max(asked.waves, FEWEST_REQUESTS // level) + extra for level in levels}
        if PEER in names_of("--peers", asked.peers, ("none", PEER)):
            require(asked.cold, "--peers", asked.peers, "other engines are measured with --cold")
            peer_python(PEER)
            for name, method in ((PEER, PLAIN), (f"{PEER} {HEAD}", HEAD)):
                self.rows[name] = Row(PEER, "bfloat16" if self.device == "cuda" else "float32", method)
        require(not asked.cold or asked.plot is None, "--plot", asked.plot, "of --cold nothing is drawn")
        self.num_turns = sum(self.num_waves.values()) * len(self.rows)

    def report(self, tell: Tell) -> Record:
        asked, room = self.asked, min(CONTEXT, describe(self.asked.model).config.max_context)
        checkpoint = open_checkpoint(asked.model, load_format=asked.load_format)
        tokenizer, most = Tokenizer(checkpoint.tokenizer_source()), min(PROMPT, room - asked.max_new_tokens)
        ids, waves = [ids_of(tokenizer, prompt.text)[-most:] for prompt in self.prompts], Waves()
        for level, count in self.num_waves.items():
            starts = range(0, count * level, level)
            waves[level] = [[ids[(at + i) % len(ids)] for i in range(level)] for at in starts]
        limits = {"max_num_batched_tokens": asked.max_num_batched_tokens, "max_model_len": room}
        found = self._cold(checkpoint, waves, limits, tell) if asked.cold else self._warm(waves, limits, tell)
        return {"model": checkpoint.name, "device": self.device, **found}

    def _warm(self, waves: Waves, limits: Record, tell: Tell) -> Record:
        tell("loading the model", 0)
        limits |= {"max_num_seqs": max(waves), "enable_prefix_caching": False, "progress": False}
        with load_model(self.asked, **limits) as llm:
            gc.collect()
            levels = [self._level(llm, level, each, tell) for level, each in waves.items()]
            is_exact = llm.engine.executor.decoder.is_exact
        return {"levels": levels, "is_ok": not (is_exact and any(level["different"] for level in levels))}

    def _level(self, llm: LLM, level: int, waves: list[list[list[int]]], tell: Tell) -> Record:
        # New engines for each level: an answer given before would be known when its prompt comes again.
        params = SamplingParams(temperature=0, max_tokens=self.asked.max_new_tokens, ignore_eos=True)
        engines, more = {}, {"acceptance": self.acceptance}
        for row in self.rows:
            is_synthetic = row.partition("/")[0] == SYNTHETIC
            engines[row] = engine_of(llm, row, **(more if is_synthetic else {}))
            for texts in waves if is_synthetic else ():  # it drafts answers that it has heard
                wave(engines[row], [llm._intake.requests(ids, params)[0] for ids in texts])
        counted: list[dict[str, float]] = []  # speeds of a wave, by row
        different, before = 0, llm.engine.executor.backend.num_recordings
        for number, texts in enumerate(waves):
            found = {}
            for name, engine in in_turn(engines.items(), number):
                gc.freeze()  # a collection that walked through what others have left would fall into a wave
                found[name] = wave(engine, [llm._intake.requests(ids, params)[0] for ids in texts])
                tell(f"{level} requests", 1)
            for _, outputs in found.values():
                different += sum(a != b for a, b in zip(outputs, found[PLAIN][1], strict=True))
            if number >= WARM_UPS:
                counted.append({name: speed for name, (speed, _) in found.items()})
        speeds = {name: mean(each[name] for each in counted) for name in self.rows}
        return {
            "concurrency": level,
            "waves": len(counted),
            "tokens_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
            "ratio": {name: round(speed / speeds[PLAIN], 3) for name, speed in speeds.items()},
            "of_waves": {name: [round(each[name] / each[PLAIN], 3) for each in counted] for name in speeds},
            "recordings": llm.engine.executor.backend.num_recordings - before,
            "different": different,
        }

    def _cold(self, checkpoint: Checkpoint, waves: Waves, limits: Record, tell: Tell) -> Record:
        found, records, notes, is_ok = dict[str, Waves](), list[Record](), list[str](), True
        for name, row in self.rows.items():
            try:
                load_s, told = self._answers(row, self._options(row, checkpoint, limits, tell), waves, tell)
            except (ConfigError, ModelFileError, WorkerError) as error:
                if row.peer == OURS:
                    raise
                notes.append(f"{name} is left out: {error}")  # the others' figures are whole
                continue
            found[name] = told
            for level in waves:
                plain = found.get(PLAIN if row.peer == OURS else PEER, {}).get(level)  # of the same engine
                figures = compared(told[level], plain, found[PLAIN][level])
                records.append({"requests": level, "row": name, "load_s": round(load_s, 2), **figures})
                is_ok &= not (told[level][0].get("is_exact") and figures["different"])
        return {"cold": sorted(records, key=lambda each: each["requests"]), "notes": notes, "is_ok": is_ok}

    def _options(self, row: Row, checkpoint: Checkpoint, limits: Record, tell: Tell) -> Record:
        """What a worker loads."""
        asked, more = self.asked, {**limits, "load_format": self.asked.load_format, "dtype": row.variant}
        if row.peer == OURS:
            more |= {"device": asked.device, "exact": asked.exact}
            return {"model": asked.model, "more": more | {"speculative_config": speculation_of(row.method)}}
        is_dummy = asked.load_format == "dummy"  # then a folder with a config.json is enough
        folder = (hub.existing(asked.model) or asked.model) if is_dummy else hf_folder(checkpoint, tell)
        if row.method == HEAD:
            head = {"method": "eagle3", "model": str(vllm_head(checkpoint, HEAD, tell))}
            more["speculative_config"] = {**head, "num_speculative_tokens": DRAFTED}
        return {"model": str(folder), "more": more}

    def _answers(self, row: Row, options: Record, waves: Waves, tell: Tell) -> tuple[float, Waves]:
        """The seconds of loading, and the answer to each wave."""
        answers, num_tokens, started = Waves(), self.asked.max_new_tokens, time.perf_counter()
        with peer_worker(row, {**options, "in_flight": max(waves)}, tell) as worker:
            load_s = time.perf_counter() - started
            for level, batch in ((level, batch) for level, batches in waves.items() for batch in batches):
                prompts = [{"ids": ids, "num_tokens": num_tokens} for ids in batch]
                seconds = ANSWER_S + level * num_tokens  # slower than a token a second is no answer
                answers.setdefault(level, []).append(worker.ask("wave", seconds, prompts=prompts))
                tell(f"{row}: {level} requests", 1)
        return load_s, answers


def _rates(text: str) -> list[float]:
    """--acceptance"""
    with suppress(ValueError):
        rates = [float(each) for each in text.split(",")]
        if all(0 <= rate <= 1 for rate in rates):
            return rates
    raise ConfigError(f"--acceptance is {text!r:.60}; give numbers from 0 to 1 with commas, such as 0.8,0.7")


def wave(engine: Engine, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """Tokens a second while all were running, and the texts."""
    for request in requests:
        engine.add(request)
    while any(request.num_output == 0 for request in requests):
        engine.step()
    before, started = sum(r.num_output for r in requests), time.perf_counter()
    while not any(request.is_finished for request in requests):
        engine.step()
    speed = (sum(r.num_output for r in requests) - before) / (time.perf_counter() - started)
    while not all(request.is_finished for request in requests):
        engine.step()
    for request in requests:
        engine.stats.pop(request.id, None)
    return speed, [request.output for request in requests]


def compared(waves: Sequence[Record], plain: Sequence[Record] | None, base: Sequence[Record]) -> Record:
    """Figures of all cold waves of a level; plain: of the same engine; base: of ours."""

    def speed(some: Sequence[Record]) -> float:
        return sum(len(ids) for each in some for ids in each["ids"]) / sum(each["wall_s"] for each in some)

    seconds, recordings = [each["wall_s"] for each in waves], [each.get("recordings") for each in waves]
    texts, said = ([ids for each in some or () for ids in each["ids"]] for some in (waves, plain))
    return {
        "tokens_per_s": round(speed(waves), 1),
        "ratio": round(speed(waves) / speed(base), 3),
        "steady_tokens_per_s": round(speed(waves[len(waves) // 2 :]), 1),
        "median_s": round(median(seconds), 4),
        "worst_s": round(max(seconds), 4),
        "recordings": None if None in recordings else sum(recordings),  # a peer does not say
        "different": sum(a != b for a, b in zip(texts, said, strict=True)) if plain else None,
    }


def tables(report: Record) -> list[Table]:
    if "cold" in report:
        title = f"{report['model']}: from a fresh process on, nothing left out"
        return [table_of(title, ("requests", "row"), COLD, report["cold"])._replace(notes=report["notes"])]
    _, *names = report["levels"][0]["ratio"]
    rows = []
    for level in report["levels"]:
        ratios = [f"{level['ratio'][name]:.2f}" for name in names]
        plain, recorded = f"{level['tokens_per_s'][PLAIN]:,.0f}", cell(level.get("recordings"), "{}")
        rows.append((str(level["concurrency"]), plain, *ratios, recorded, str(level["different"])))
    columns, title = ("plain, tokens/s", *names, "recorded", "different"), "plain decoding, and ratios to it"
    return [Table(f"{report['model']}: {title}", ("requests at once",), columns, rows)]
