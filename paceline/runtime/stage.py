"""Pipeline parallelism, the process of a stage behind the first: reads its layers and runs what rank 0 sends
through them (stages.py), with ranks of its own where the stage has several. It chooses nothing.

Invariant: it ends when rank 0's end of the connection is closed, whatever it is doing.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from contextlib import suppress

import torch

from paceline.core.errors import ConfigError, PacelineError
from paceline.loaders.checkpoint import open_checkpoint
from paceline.models.stage import Stage
from paceline.runtime.backend import backend_for
from paceline.runtime.link import Fields, Link, received
from paceline.runtime.part import Part, load_part
from paceline.runtime.rank import end_with
from paceline.runtime.ranks import Ranks, RankSetup
from paceline.runtime.stages import BEAT_S

FAILURES = (PacelineError, RuntimeError, MemoryError)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when it ends
    with suppress(*FAILURES):  # rank 0 has been told
        follow(Link(socket.socket(fileno=int(sys.argv[1]))))


def follow(link: Link, model: str | None = None) -> None:
    """Until rank 0 ends. model: where it is found here, if rank 0 is on another machine."""
    threading.Thread(target=end_with, args=(link.socket.fileno(),), daemon=True).start()
    threading.Thread(target=_beat, args=(link,), daemon=True).start()
    with suppress(OSError):  # rank 0 has ended
        try:
            run(link, *_setup(link.receive()[0], model))
        except FAILURES as error:
            link.send("failed", {"reason": f"{type(error).__name__}: {error}"})
            time.sleep(BEAT_S)  # for rank 0 to read it
            raise


def _beat(link: Link) -> None:
    """A thread: also while a pass runs, whose kernels leave the interpreter to others."""
    with suppress(OSError):
        while True:
            link.send("beat")
            time.sleep(BEAT_S)


def _setup(fields: Fields, model: str | None) -> tuple[RankSetup, str]:
    stage = Stage(*fields["stage"])
    values = {name: fields[name] for name in RankSetup._fields} | {"stage": stage}
    return RankSetup(**values | ({} if model is None else {"model": model})), fields["fingerprint"]


def run(link: Link, setup: RankSetup, fingerprint: str) -> None:
    torch.set_num_threads(setup.num_threads)
    source = open_checkpoint(setup.model, False, setup.load_format)
    if source.fingerprint != fingerprint:
        raise ConfigError(f"model {setup.model!r:.80} is not the one of rank 0; give both the same files")
    ranks = None if setup.num_ranks == 1 else Ranks(setup)
    link.send("ready")
    link.receive()  # once rank 0 has packed and compiled what can be found on disk then
    cpu, group = torch.device("cpu"), ranks and ranks.group
    backend = backend_for(cpu, setup.kernels, group=group)
    executor = load_part(backend, source, setup, ranks)
    part = Part(executor, setup.stage, source.config)
    link.send("ready")
    while True:
        found = part.run(received(*link.receive()))
        fields = {"hidden": list(found.hidden), "picked": found.picked}
        link.send("done", fields, [each.numpy() for each in (found.x, *found.hidden.values())])


if __name__ == "__main__":
    main()
