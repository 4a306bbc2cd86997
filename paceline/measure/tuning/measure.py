"""Measures drafters on a loaded model: what they cost, what they get right, what they gain. One request at a
time, greedy.

For each prompt every drafter first writes the answer as it is listened to (guesses.py); then plain decoding
and each K take turns, so that whatever else the machine does hits all alike, and of repeats the quickest
counts. Times are those after a request's first draft: reading the prompt, a drafter's own reading included,
is no part of decoding and is reported by itself. Invariant: a drafter that remembers texts never meets one
that it was shown before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter

from paceline.api.llm import LLM
from paceline.core.errors import RequestError
from paceline.core.params import SamplingParams
from paceline.core.types import Proposer
from paceline.drafters import registry
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.shipped import shipped_head
from paceline.engine.costs import CostModel
from paceline.engine.engine import Engine
from paceline.engine.plan import Policy
from paceline.engine.policy import AutoPolicy
from paceline.measure.tuning.findings import LEAST_TOKENS, REPEATS, Asked, Finding, Findings, Row, Timing
from paceline.measure.tuning.guesses import Account, Listening, Times, acceptance
from paceline.measure.tuning.predict import Prices, predict
from paceline.runtime.timing import measure as time_passes

PASS_SECONDS = 2.0  # for timing the target's passes
# of the time, for the first repeat, in which drafters are listened to as well; it decides how many prompts
# there are
FIRST = 0.6
PLAIN, AUTO = 0, -1  # in the place of a K

Tell = Callable[[str, int], None]  # what is being done, and how many turns have just been finished


@dataclass(slots=True)
class Group:
    """What takes turns: plain decoding and one drafter's lengths, or the policy's choices."""

    name: str
    engines: Callable[[], dict[int, Engine]]  # by K; new ones, that know no text yet
    current: dict[int, Engine] = field(default_factory=dict)
    times: dict[int, dict[int, Timing]] = field(default_factory=dict)  # by K and prompt, the quickest

    def note(self, k: int, prompt: int, timing: Timing) -> None:
        known = self.times.setdefault(k, {})
        known[prompt] = min(known.get(prompt, timing), timing)

    def seconds(self, k: int) -> float | None:
        """For a token, over all prompts."""
        times = self.times.get(k, {}).values()
        num_tokens = sum(timing.num_tokens for timing in times)
        return sum(timing.seconds for timing in times) / num_tokens if num_tokens else None

    def speedup(self, k: int) -> float | None:
        plain, own = self.seconds(PLAIN), self.seconds(k)
        return plain / own if plain and own else None


@dataclass(slots=True)
class Subject:
    """A drafter, and what was heard from it."""

    drafter: Proposer
    lengths: list[int]
    listening: Listening
    listener: Engine
    group: Group
    accounts: list[Account] = field(default_factory=list)


class Session:
    def __init__(self, llm: LLM, asked: Asked, tell: Tell) -> None:
        self.llm, self.asked, self.tell = llm, asked, tell
        self.own = llm.engine  # put back at the end
        self.params = SamplingParams(
            temperature=0, max_tokens=asked.max_tokens, min_tokens=min(LEAST_TOKENS, asked.max_tokens)
        )
        tell("timing passes", 0)
        self.costs = CostModel(*time_passes(self.own.runner, PASS_SECONDS))
        self.subjects = [self._subject(name) for name in asked.methods]
        self.auto = Group("auto", lambda: {AUTO: self._auto()})
        self.undisturbed = Listening(None, 0)
        self.plain = self._engine(None, 0, self.undisturbed)

    def _engine(self, drafter: Proposer | None, k: int, policy: Policy | None = None) -> Engine:
        return Engine(self.own.runner, drafter, replace(self.own.config, num_speculative_tokens=k), policy)

    def _drafter(self, name: str, k: int) -> Proposer:
        return registry.create(*registry.parse(self.asked.options(name, k)), self.llm.context)

    def _subject(self, name: str) -> Subject:
        self.tell(f"loading {name}", 0)
        is_free, lengths = self.asked.is_free(name), self.asked.lengths_of(name)
        drafter = self._drafter(name, lengths[-1])
        listening = Listening(drafter, lengths[-1])

        def engines() -> dict[int, Engine]:
            # One that runs a model knows the text of the request and nothing else, so it may be used again;
            # it stops drafting after K.
            return {k: self._engine(self._drafter(name, k) if is_free else drafter, k) for k in lengths}

        return Subject(
            drafter, lengths, listening, self._engine(drafter, lengths[-1], listening), Group(name, engines)
        )

    def _auto(self) -> Engine:
        head = shipped_head(self.llm.checkpoint, True)
        parsed = [registry.parse(options) for options in (*registry.AUTO, *([head] if head else ()))]
        drafters = [registry.create(*each, self.llm.context) for each in parsed]
        most = min(
            sum(config.num_speculative_tokens for _, config in parsed), self.own.config.max_model_len - 1
        )
        known = {
            s.group.name: (median(s.listening.times.asking), acceptance(s.accounts))
            for s in self.subjects
            if s.listening.times.asking
        }
        has_trees = self.own.runner.decoder.checks_trees
        policy = AutoPolicy(drafters, self.costs.fresh(), most_nodes=most, has_trees=has_trees, known=known)
        return self._engine(drafters[0], most, policy)

    def run(self, prompts: Sequence[list[int]]) -> Findings:
        started = perf_counter()
        self._answer(self.plain, prompts[0])  # what is compiled or read on first use is nobody's to wait for
        done = 0
        for repeat in range(REPEATS):
            for group in self._groups():
                group.current = group.engines()
            limit = self.asked.seconds * (FIRST if repeat == 0 else 1.0)
            for number, ids in enumerate(prompts if repeat == 0 else prompts[:done]):
                if number and perf_counter() - started > limit:
                    break
                if repeat == 0:
                    self._listen(ids)
                    done = number + 1
                self._take_turns(number, ids, number + repeat)
        self.llm.engine = self.own
        return self._findings(done)

    def _groups(self) -> list[Group]:
        return [*(subject.group for subject in self.subjects), self.auto]

    def _listen(self, ids: list[int]) -> None:
        for subject in self.subjects:
            self.tell(f"listening to {subject.group.name}", 0)
            _, output = self._answer(subject.listener, ids)
            subject.accounts.append(subject.listening.account(len(ids), output, self.asked.max_tokens))
            self.tell(f"listening to {subject.group.name}", 1)

    def _take_turns(self, number: int, ids: list[int], shift: int) -> None:
        groups = self._groups()
        for group in groups[shift % len(groups) :] + groups[: shift % len(groups)]:
            engines = [(PLAIN, self.plain), *group.current.items()]
            for k, engine in engines[shift % len(engines) :] + engines[: shift % len(engines)]:
                group.note(k, number, self._answer(engine, ids)[0])
                self.tell(f"timing {group.name}", 1)

    def _answer(self, engine: Engine, ids: list[int]) -> tuple[Timing, list[int]]:
        """The time from the second step on, and the whole answer."""
        self.llm.engine = engine
        times, tokens, counts = [], [], []
        for chunk in self.llm.stream(ids, self.params):
            times.append(perf_counter())
            counts.append(len(chunk.tokens))
            tokens += [token.id for token in chunk.tokens]
        return Timing(times[-1] - times[min(1, len(times) - 1)], sum(counts[2:])), tokens

    def _findings(self, num_prompts: int) -> Findings:
        timed = [seconds for group in self._groups() if (seconds := group.seconds(PLAIN))]
        if not timed:
            raise RequestError(
                f"no answer was long enough to be timed; give prompts that leave room for {LEAST_TOKENS} tokens"
            )
        plain = median(timed)
        accounts = self.subjects[0].accounts
        places = [(account.num_prompt + at) for account in accounts for at in range(2, len(account.output))]
        host = max(
            plain - sum(self.costs.pass_seconds(1, place, place) for place in places) / len(places), 0.0
        )
        findings = tuple(self._finding(subject, host) for subject in self.subjects)
        num_tokens = sum(len(account.output) for account in accounts)
        return Findings(
            self.costs, host, 1 / plain, self.auto.speedup(AUTO), findings, num_prompts, num_tokens
        )

    def _finding(self, subject: Subject, host: float) -> Finding:
        times, is_free = subject.listening.times, subject.drafter.is_free
        entering, asking, learning = (
            median(each or [0.0]) for each in (times.entering, times.asking, times.learning)
        )
        # A drafter's weights and tables take the caches' room, and what it wants to know of a pass must be
        # looked up.
        slower = max(self._excess(times) - self._excess(self.undisturbed.times), 0.0)
        prices = Prices(self.costs, host, asking, learning + slower, _catching_up(subject.drafter), is_free)
        line = tuple(predict(subject.accounts, k, prices) for k in range(subject.lengths[-1] + 1))
        rows = tuple(Row(line[k], subject.group.speedup(k)) for k in subject.lengths)
        return Finding(
            subject.group.name, is_free, acceptance(subject.accounts), entering, asking, rows, line
        )

    def _excess(self, times: Times) -> float:
        """Seconds by which passes, with what follows them, took longer than they cost by themselves."""
        return median(
            seconds - self.costs.pass_seconds(rows, cached, rows * cached)
            for rows, cached, seconds in times.passing
        )


def _catching_up(drafter: Proposer) -> float:
    """A model with a cache of its own has not read the last token it drafted: where that is right, it reads
    two the next time.
    """
    if not isinstance(drafter, DraftModel):
        return 0.0
    costs = CostModel(*time_passes(drafter.runner))
    return costs.pass_seconds(2) - costs.pass_seconds(1)
