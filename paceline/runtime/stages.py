"""Pipeline parallelism, rank 0's side: it runs the first layers itself, sends what leaves them to the next
stage, and that stage's answer on to the one after it, until logits come back.

Several passes may be under way, one a stage, where stages do not share their cores. Invariant: every stage
gets passes in the order in which they were sent, so K/V that a pass leaves are there for those after it, and
blocks that were given to another request are written for it last. A stage that ends or is silent ends them
all with a RankError.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from paceline.core.errors import RankError
from paceline.core.types import Output, Segment
from paceline.models.config import ModelConfig
from paceline.models.stage import Stage
from paceline.runtime import group
from paceline.runtime.executor import LocalExecutor
from paceline.runtime.link import Link, PassInput
from paceline.runtime.part import Part
from paceline.runtime.ranks import REMEDY, RankSetup

BEAT_S = 1.0  # between two signs of life of a stage
ENDING_S = 0.5  # for a process whose connection has closed to end


class Later:
    """An Output that is on its way: reading it waits."""

    def __init__(self, given: PassInput, hidden: dict[int, torch.Tensor], top: Callable[[Any], Any]) -> None:
        """top: finds the most likely tokens in logits."""
        self.fields, self.arrays = given.fields(), given.arrays()  # what every stage is sent
        self._hidden, self._top = hidden, top
        self._done, self._lost = threading.Event(), ""
        self._output: Output | None = None

    def take(self, layers: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        """Hidden states that a stage has answered with."""
        self._hidden |= {n: torch.from_numpy(each) for n, each in zip(layers, rows, strict=True)}

    def finish(self, logits: np.ndarray, picked: list[int] | None) -> None:
        self._logits, self._picked = torch.from_numpy(logits), picked
        self._done.set()

    def fail(self, why: str) -> None:
        self._lost = why
        self._done.set()

    @property
    def output(self) -> Output:
        self._done.wait()
        if self._lost:
            raise RankError(self._lost)
        if self._output is None:
            self._output = Output(self._logits, self._hidden, self._picked, self._top(self._logits))
        return self._output

    logits = property(lambda self: self.output.logits)
    hidden = property(lambda self: self.output.hidden)
    picked = property(lambda self: self.output.picked)
    top = property(lambda self: self.output.top)

    def _replace(self, **values: Any) -> Output:
        return self.output._replace(**values)


class Stages:
    """All but rank 0's own. Its threads know this object; it ends with the executor."""

    def __init__(self, links: Sequence[Link], processes: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        """processes: of the stages, where this one has started them."""
        self.links, self.processes, self.size = links, processes, len(links) + 1
        self.lost = ""
        self._sent: list[deque[Later]] = [deque() for _ in links]
        self._lock = threading.Lock()
        numbers = range(1, self.size)
        self._readers = [threading.Thread(target=self._read, args=(n,), daemon=True) for n in numbers]

    @classmethod
    def start(cls, size: int) -> Stages:
        """Processes of this machine."""
        pairs = [_start() for _ in range(1, size)]
        return cls([link for _, link in pairs], [process for process, _ in pairs])

    @property
    def take_turns(self) -> bool:
        """Stages of one machine: each has all its cores while the others wait, since one pass over all
        requests reads the weights once. On several machines all are busy with requests of their own."""
        return bool(self.processes)

    def set_up(self, setup: RankSetup, fingerprint: str) -> None:
        """Tell every stage what to load; `wait` for their word."""
        for number, link in enumerate(self.links, 1):
            fields = setup._replace(stage=Stage(number, self.size))._asdict()
            self._guarded(number, link.send, "load", {**fields, "fingerprint": fingerprint})
        self.wait()

    def wait(self) -> None:
        """Until all have done what they were told last."""
        for number, link in enumerate(self.links, 1):
            while (fields := self._guarded(number, link.receive)[0])["kind"] == "beat":
                pass
            if fields["kind"] == "failed":
                self._fail(f"stage {number} has failed: {fields['reason']}")

    def begin(self) -> None:
        """Load; then passes may come."""
        for number, link in enumerate(self.links, 1):
            self._guarded(number, link.send, "begin")
        self.wait()
        for thread in self._readers:
            thread.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _guarded(self, number: int, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except OSError as error:
            self._fail(self._reason(number, error))

    def _fail(self, why: str) -> None:
        self.end(f"{why}; {REMEDY}")
        raise RankError(self.lost)

    def send(self, number: int, later: Later, x: np.ndarray) -> None:
        with self._lock:
            if self.lost:
                raise RankError(self.lost)
            self._sent[number - 1].append(later)
        self._guarded(number, self.links[number - 1].send, "pass", later.fields, [*later.arrays, x])

    def _read(self, number: int) -> None:
        """A thread: a stage's answers, each of which the next stage gets."""
        try:
            while True:
                fields, arrays = self.links[number - 1].receive()
                if fields["kind"] == "failed":
                    self.end(f"stage {number} has failed: {fields['reason']}; {REMEDY}")
                    return
                if fields["kind"] == "beat":
                    continue
                later = self._sent[number - 1].popleft()
                later.take(fields["hidden"], arrays[1:])
                if number < self.size - 1:
                    self.send(number + 1, later, arrays[0])
                else:
                    later.finish(arrays[0], fields["picked"])
        except OSError as error:
            self.end(f"{self._reason(number, error)}; {REMEDY}")
        except (RankError, LookupError, TypeError, ValueError) as error:
            self.end(f"stage {number} has answered wrongly ({error!s:.60}); {REMEDY}")

    def _watch(self) -> None:
        """A thread: a stage that says nothing for long is lost. If this process itself was stopped, all are
        given time anew."""
        while not self.lost:
            before = time.monotonic()
            time.sleep(BEAT_S / 2)
            now = time.monotonic()
            for number, link in enumerate(self.links, 1):
                if now - before > 2 * BEAT_S:
                    link.heard = now
                elif now - link.heard > group.LOST_S:
                    self.end(f"stage {number} has not answered within {group.LOST_S:.0f} s; {REMEDY}")

    def _reason(self, number: int, error: OSError) -> str:
        if self.processes:
            with suppress(subprocess.TimeoutExpired):
                code = self.processes[number - 1].wait(ENDING_S)
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                return f"stage {number} of {self.size} has ended ({how})"
        return f"the connection to stage {number} is lost ({error!s:.60})"

    def end(self, why: str) -> None:
        """From any thread, once: all processes end, and every pass with an error."""
        with self._lock:
            if self.lost:
                return
            self.lost = why
            under_way = [later for sent in self._sent for later in sent]
        for process in self.processes:  # none holds anything that must be written down
            process.kill()
        for process in self.processes:
            process.wait()
        for link in self.links:
            link.close()
        for later in under_way:
            later.fail(why)

    def close(self) -> None:
        """End all. A thread that still had a tensor when the interpreter ends would abort the process."""
        self.end(f"the model is closed; {REMEDY}")
        for thread in self._readers:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(ENDING_S)


def _start() -> tuple[subprocess.Popen[bytes], Link]:
    ours, theirs = socket.socketpair()
    with theirs:
        # -P: modules come from where they are installed, never from the folder this was started in.
        command = [sys.executable, "-P", "-m", "paceline.runtime.stage", str(theirs.fileno())]
        # Threads that have done their part leave the cores to the next stage at once; OpenMP's else do not.
        quiet = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        # A group of its own: Ctrl-C is for rank 0 alone.
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "process_group": 0, "env": quiet}
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), **given)
    return process, Link(ours)


class StagesExecutor(LocalExecutor):
    def __init__(self, own: LocalExecutor, stages: Stages, whole: ModelConfig) -> None:
        """own: of rank 0's layers."""
        super().__init__(own.backend, own.decoder, own.memory)
        self._part, self.stages = Part(own, Stage(0, stages.size), whole), stages
        self._whole = replace(whole, max_context=own.config.max_context)
        self.num_ranks, self.num_stages = own.num_ranks, stages.size
        self.num_under_way = 1 if stages.take_turns else stages.size
        self._end = weakref.finalize(self, stages.close)
        stages.begin()

    @property
    def config(self) -> ModelConfig:
        return self._whole

    def forward(
        self, segments: Sequence[Segment], *, num_layers: int | None = None,
        hidden_layers: Sequence[int] = (), top_tokens: int = 0,
    ) -> Output:  # fmt: skip
        """As soon as this stage's layers are done; reading the output waits for the others'."""
        batch, total = super()._ready(segments), self._whole.num_layers
        depth = total if num_layers is None else num_layers
        assert all(0 <= n <= depth <= total for n in (0, *hidden_layers)), "no such layer"
        given = PassInput(batch, depth, hidden_layers, needs_logits=top_tokens > 0)
        if self.stages.lost:
            raise RankError(self.stages.lost)
        found = self._part.run(given)
        later = Later(given, dict(found.hidden), lambda x: self._top(x, top_tokens))
        self.stages.send(1, later, found.x.numpy())
        return cast(Output, later)

    def _top(self, logits: torch.Tensor, count: int) -> torch.Tensor | None:
        return self.backend.top(logits, count) if count else None

    def apply(self, moves: Any) -> None:
        """With the batch that they travel with, as every stage does."""

    def close(self) -> None:
        self._end()
        self._part.executor.close()
