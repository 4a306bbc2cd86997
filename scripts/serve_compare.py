"""`paceline serve` and llama.cpp's server under the same load, taking turns: tokens a second with 1, 4 and 16
clients.

    python scripts/serve_compare.py --prompts dev.jsonl --peers Q8_0,Q4_0,Q8_0+ngram --rounds 3 --json
    compare.json

A client sends its next prompt when its last answer is complete. A round gives every server the same new
prompts at every level, in an order that turns round, so no server meets a prompt twice. Both keep the
beginnings of prompts they have read, both have a place for every client. The reading of prompts counts;
--shorter-than leaves long ones out. A peer is its quantization, with +ngram if it drafts. Invariant: the
ratio is to the fastest peer of each level; exits 1 if it is below 1 anywhere or a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from serve_soak import Server

from paceline.loaders import hub
from paceline.loaders.checkpoint import open_checkpoint
from paceline.measure.endpoint import endpoint_of
from paceline.measure.load import Job, Level, Record, run_level
from paceline.measure.models import gguf_file
from paceline.measure.plan import peer_python
from paceline.measure.processes import Worker
from paceline.measure.prompts import Prompt, load
from paceline.measure.serve import Options, job_of

OURS = "paceline"
QUIET_S = 0.3  # between servers: whoever has just worked may still be spinning
TIMEOUT_S = 300.0
FEWEST = 4  # prompts of a level, times --turns


class Subject(NamedTuple):
    name: str
    options: Options

    def job(self, prompt: Prompt) -> Job:
        return job_of(self.options, self.name, prompt)


def subject(name: str, url: str, asked: argparse.Namespace, extra: dict[str, Any]) -> Subject:
    options = Options(
        server=endpoint_of(url, None), model=name, levels=(), prompts=(), num_prompts=0, max_new_tokens=asked.tokens,
        ignores_eos=not asked.until_end, extra=extra,
    )  # fmt: skip
    return Subject(name, options)


@contextmanager
def ours(asked: argparse.Namespace, flags: list[str]) -> Iterator[Subject]:
    server = Server.start(asked.model, ["--max-num-seqs", str(max(asked.levels)), *flags])
    try:
        yield subject(OURS, f"http://127.0.0.1:{server.port}", asked, {"model": None})
    finally:
        server.stop()


@contextmanager
def peer(name: str, asked: argparse.Namespace, folder: Path) -> Iterator[Subject]:
    kind, _, method = name.partition("+")
    path = gguf_file(
        open_checkpoint(asked.model),
        kind,
        hub.cache_dir() / "bench",
        lambda text: print(text, file=sys.stderr),
    )
    threads = len(os.sched_getaffinity(0))
    options = {
        "model": str(path),
        "in_flight": max(asked.levels),
        "context": asked.context,
        "threads": threads,
        "method": method or "none",
    }
    worker = Worker(
        f"llama.cpp {name}", peer_python("llama.cpp"), "run_llamacpp", folder / f"{name}.log", threads
    )
    try:
        if note := worker.load(options)["note"]:
            print(f"llama.cpp: {note}", file=sys.stderr)
        yield subject(name, worker.ask("address")["url"], asked, {"cache_prompt": True})
    finally:
        worker.stop()


async def measure(who: Subject, clients: int, prompts: Sequence[Prompt]) -> dict[str, Any]:
    jobs = [who.job(prompt) for prompt in prompts]
    level, stop = Level(math.inf, clients), asyncio.Event()
    records = await run_level(
        who.options.server, level, jobs, [0.0] * len(jobs), TIMEOUT_S, stop, lambda record: None
    )
    await asyncio.sleep(QUIET_S)
    errors = [record.error for record in records if record.error is not None]
    return {
        "tokens": sum(record.num_tokens for record in records),
        "seconds": _span(records),
        "errors": errors,
    }


def _span(records: Sequence[Record]) -> float:
    return max(record.end for record in records) - min(record.sent for record in records)


async def rounds(
    subjects: Sequence[Subject], prompts: list[Prompt], asked: argparse.Namespace
) -> list[dict[str, Any]]:
    unused, found = iter(prompts), list[dict[str, Any]]()
    warm_up = [next(unused) for _ in range(FEWEST)]
    for who in subjects:
        await measure(who, FEWEST, warm_up)
    for number in range(asked.rounds):
        for clients in asked.levels:
            chosen = [next(unused) for _ in range(max(clients, FEWEST) * asked.turns)]
            for i in range(len(subjects)):
                who = subjects[(number + i) % len(subjects)]
                found.append(
                    {
                        "round": number,
                        "clients": clients,
                        "server": who.name,
                        **await measure(who, clients, chosen),
                    }
                )
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def summary(found: Sequence[dict[str, Any]], clients: int) -> dict[str, Any]:
    mine = [record for record in found if record["clients"] == clients]
    speeds = {}
    for name in dict.fromkeys(record["server"] for record in mine):
        own = [record for record in mine if record["server"] == name]
        speeds[name] = sum(record["tokens"] for record in own) / sum(record["seconds"] for record in own)
    fastest = max((name for name in speeds if name != OURS), key=lambda name: speeds[name])
    return {
        "clients": clients,
        "tokens_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
        "fastest_peer": fastest,
        "ratio": round(speeds[OURS] / speeds[fastest], 3),
        "ratios_by_round": _by_round(mine, fastest),
        "failed": sum(len(record["errors"]) for record in mine),
    }


def _by_round(mine: Sequence[dict[str, Any]], fastest: str) -> list[float]:
    speed = {(record["round"], record["server"]): record["tokens"] / record["seconds"] for record in mine}
    numbers = sorted({record["round"] for record in mine})
    return [round(speed[number, OURS] / speed[number, fastest], 3) for number in numbers]


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument(
        "--peers", default="Q8_0,Q4_0", help="quantizations of llama.cpp's, each with +ngram or without"
    )
    parser.add_argument(
        "--levels", default="1,4,16", type=lambda text: [int(level) for level in text.split(",")]
    )
    parser.add_argument("--prompts", type=Path, help="a .jsonl file; default: those of the package")
    parser.add_argument("--shorter-than", type=int, help="characters: only prompts below that")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--until-end", action="store_true", help="answers end where the model ends them, not all at --tokens"
    )
    parser.add_argument(
        "--turns", type=int, default=2, help=f"prompts for each client (of at least {FEWEST}) and round"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=4096, help="tokens of a place of llama.cpp's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_known_args()


def main() -> int:
    asked, flags = arguments()  # other options go to `paceline serve`
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left behind
    prompts = [
        prompt
        for prompt in load(asked.prompts)
        if asked.shorter_than is None or len(prompt.text) < asked.shorter_than
    ]
    random.Random(asked.seed).shuffle(prompts)
    needed = FEWEST + sum(max(clients, FEWEST) for clients in asked.levels) * asked.rounds * asked.turns
    if needed > len(prompts):
        raise SystemExit(
            f"{needed} prompts are needed and there are {len(prompts)}; give more, or fewer --rounds or --turns"
        )
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        subjects = [stack.enter_context(ours(asked, flags))]
        subjects += [stack.enter_context(peer(name, asked, Path(folder))) for name in asked.peers.split(",")]
        found = asyncio.run(rounds(subjects, prompts, asked))
    levels = [summary(found, clients) for clients in asked.levels]
    for level in levels:
        print(json.dumps(level))
    if asked.json is not None:
        asked.json.write_text(json.dumps({"levels": levels, "records": found}, indent=1), encoding="utf-8")
    return int(any(level["ratio"] < 1 or level["failed"] for level in levels))


if __name__ == "__main__":
    sys.exit(main())
