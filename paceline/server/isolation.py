"""Keeps the exception of one request from ending the engine: after a step that failed, the requests that ran
in it are tried one by one. One that fails alone ends with an error; the others go on where they were.
Invariant: a request that goes on has emitted exactly its tokens and holds no block of the failed step. What
this raises means that the engine cannot answer the simplest request any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from paceline.api.intake import Intake
from paceline.core.errors import RequestError
from paceline.core.params import SamplingParams
from paceline.core.types import FinishReason, Request, Status
from paceline.engine.commit import Emission
from paceline.engine.engine import Engine
from paceline.server import processes

# In the messages of the system and of libraries.
NO_MEMORY = ("allocate memory", "out of memory", "not enough memory", "bad_alloc", "start new thread")
LEAST_BYTES = 2**26  # to be had by a process that does not lack memory
MOST_FAILURES = 3  # of steps in a row that no single request is to blame for, before the engine is given up


class InternalError(RequestError):
    """A fault of this program, not of the request."""


class OutOfMemory(RequestError):
    """Too little of it, here and now."""


def unexpected(error: Exception) -> RequestError:
    """What the client is told of an error that was not raised for it; the log has the rest."""
    if any(map(_tells_of_memory, _causes(error))) or _is_short():
        what = "there is too little memory for the request now"
        return OutOfMemory(f"{what}; ask for less, or try again later")
    return InternalError("the request failed inside the engine; the server's log says where")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """It, and what it was raised for: a library may say something else when it meets an error of memory."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _tells_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)


def _is_short() -> bool:
    """Whether hardly any memory can be had now: then that is why, whatever a library has said."""
    try:
        np.empty(LEAST_BYTES, np.uint8)  # the system promises it or refuses; none of it is touched
    except MemoryError:
        return True
    return False


@dataclass(slots=True)
class Isolation:
    engine: Engine
    intake: Intake
    _num_emitted: dict[Request, int] = field(default_factory=dict)  # tokens of those that have not ended
    _num_failures: int = 0

    def add(self, request: Request) -> None:
        self.engine.add(request)
        self._num_emitted[request] = 0

    def abort(self, request: Request) -> None:
        self.engine.abort(request)
        self._num_emitted.pop(request, None)

    def step(self) -> list[Emission]:
        """A step of the engine; where that fails, what the trials of its requests emitted."""
        try:
            emissions = self.engine.step()
            self._num_failures = 0
        except Exception as error:
            processes.log_error("a step failed; its requests are tried one by one", error)
            self._num_failures += 1
            if self._num_failures > MOST_FAILURES:
                raise
            emissions = self._try_all(error)
        for emission in emissions:
            self._num_emitted[emission.request] += len(emission.tokens)
            if emission.request.is_finished:
                del self._num_emitted[emission.request]
        return emissions

    def _try_all(self, error: Exception) -> list[Emission]:
        num_running = len(self.engine.scheduler.running)
        requests = self.engine.set_aside()
        ended = self._num_emitted.keys() - set(requests)  # by the failed step
        emissions = [_failed(request, error) for request in ended]
        for request in requests[:num_running]:
            emissions += self._try(request, error)
        # One token of the simplest request: what it raises is no request's fault.
        params = SamplingParams(temperature=0, max_tokens=1)
        probe = Request("probe", params, [0, 0], 2, 0)
        self.engine.add(probe)
        while not probe.is_finished:
            self.engine.step()
        self.engine.stats.pop(probe.id)
        for request in requests:
            if not request.is_finished:
                self.engine.scheduler.add(request)
        if any(emission.request.error is not None for emission in emissions):
            self._num_failures = 0
        return emissions

    def _try(self, request: Request, problem: Exception) -> list[Emission]:
        """Alone, up to its next token; set aside again afterwards. problem: of the failed step."""
        if request.num_output != self._num_emitted[request]:  # changed by the failed step
            return [_failed(request, problem)]
        emissions: list[Emission] = []
        try:
            # Its grammar is made anew: the failed step may have left the one it had anywhere.
            constraint = request.constraint = self.intake.constraint(request.params)
            if constraint is not None:
                for token in request.output:
                    constraint.advance(token)
            self.engine.scheduler.add(request)
            while not emissions:
                emissions += self.engine.step()
        except Exception as error:
            processes.log_error("a request failed", error)
            problem = error
        self.engine.set_aside()
        return emissions or [_failed(request, problem)]


def _failed(request: Request, error: Exception) -> Emission:
    """The end of a request that the engine holds no more."""
    request.error = unexpected(error)
    request.status, request.finish_reason = Status.FINISHED, FinishReason.ERROR
    return Emission(request, (), 0, (), ())
