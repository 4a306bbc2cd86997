"""`paceline tune`: what drafters cost, what they get right and what they gain on a loaded model, one greedy
request at a time.

For each prompt every drafter first writes the answer once with a clock around it, drafting its longest: that
says how often it is right at each depth and what asking it costs, from which the formulas of core/formulas.py
predict the speedup of every K. Then plain decoding, the policy and every K take turns, so that what else the
machine does hits all alike, and of repeats the quickest counts. Times are those after a request's first
draft. Invariant: a drafter that remembers texts never meets one that it was shown before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from paceline.api.llm import LLM
from paceline.core import formulas
from paceline.core.errors import ConfigError, RequestError
from paceline.core.options import nearest
from paceline.core.params import SamplingParams
from paceline.core.types import Draft, Request
from paceline.drafters import registry
from paceline.engine.engine import Engine
from paceline.engine.policy.cost import CostTable
from paceline.engine.profile import DrafterProfile, Profile, load_profile, profile_path, save_profile
from paceline.measure.engines import answer, auto_engine, drafter_of, engine_of, engine_with, ids_of, rotated
from paceline.measure.engines import load as load_model
from paceline.measure.options import Tune
from paceline.measure.prompts import Prompt, first_of_each, load
from paceline.measure.results import Table, Tell, cell
from paceline.measure.rows import AUTO, PLAIN
from paceline.runtime.timing import measure as time_passes

LENGTHS, LENGTHS_OF_MODELS = (1, 2, 3, 4, 6), (1, 2, 3, 4)  # K of drafters that run no model, and that do
MOST_K = 12
NUM_PROMPTS = 6  # where nothing is said, about this many, of all categories alike
LEAST_TOKENS, UNTIMED = 16, 2  # of an answer; its first steps are not timed, and there must be more
REPEATS = 2
PASS_SECONDS = 2.0  # for timing the target's passes
FIRST = 0.6  # of the time, for the first repeat, which decides how many prompts there are
WORTH = 1.02  # a speedup that is no more than this may be noise
AHEAD = 1.05  # by which a fixed length must beat the policy, which adapts, to be recommended instead
SHOWN_DEPTHS = 4
LEGEND = """α by depth: how often a token was right where one was drafted after tokens that were; drafted, τ:
tokens drafted and written a step; predicted: from acceptance and what passes and drafting cost; measured: in
turn with plain decoding.
"""


class Plan(NamedTuple):
    asked: Tune
    methods: list[str]
    prompts: list[Prompt]

    def options(self, name: str, k: int) -> dict[str, Any]:
        made: dict[str, Any] = {"method": name, "num_speculative_tokens": k}
        if self.asked.draft_model and name in ("draft_model", *registry.HEADS):
            made["model"] = self.asked.draft_model
        return made

    def is_free(self, name: str) -> bool:
        return bool(registry.parse(self.options(name, 1))[0].is_free)

    def lengths_of(self, name: str) -> list[int]:
        ks = set(self.asked.k or (LENGTHS if self.is_free(name) else LENGTHS_OF_MODELS))
        if name == "lookahead":  # its window and its n-grams have that many nodes and no more
            most = registry.parse({"method": name})[1].num_speculative_tokens
            ks = {min(k, most) for k in ks}
        return sorted(ks)


def prepare(asked: Tune) -> Plan:
    methods = list(dict.fromkeys(name.strip() for name in asked.methods.split(",")))
    known = [name for name in registry.DRAFTERS if name != "hybrid"]
    for name in methods:
        if name == "hybrid":
            raise ConfigError(
                "--methods holds 'hybrid'; name its drafters one by one, each is measured alone"
            )
        if name not in known:
            raise ConfigError(f"--methods holds {name!r}; {nearest(name, known)}")
        if name == "draft_model" and asked.draft_model is None:
            raise ConfigError(f"--methods holds {name!r}; name the smaller model with --draft-model")
    for k in asked.k:
        if not 1 <= k <= MOST_K:
            raise ConfigError(f"-k is {k}; give a whole number from 1 to {MOST_K}")
    prompts = load(asked.prompts)
    usual = max(1, NUM_PROMPTS // len({prompt.category for prompt in prompts}))
    return Plan(asked, methods, first_of_each(prompts, asked.limit or usual))


def num_turns(plan: Plan) -> int:
    """Of a prompt: each drafter by the clock, then each of its lengths, the policy and plain decoding."""
    timed = 2 + sum(len(plan.lengths_of(name)) for name in plan.methods)
    return (len(plan.methods) + REPEATS * timed) * len(plan.prompts)


class Clocked:
    """A drafter with a clock around its drafts; else it is the drafter."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self._known = drafter, set[str]()
        # seconds of a draft, after the first of a request, which reads its prompt; with a model of each token
        self.asking: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        started = perf_counter()
        drafts: list[Draft] = self.drafter.propose(requests, budgets)
        seconds = perf_counter() - started
        if requests[0].id in self._known:
            self.asking.append(seconds if self.drafter.is_free else seconds / max(budgets[0], 1))
        self._known.add(requests[0].id)
        return drafts


class Prices(NamedTuple):
    """Seconds."""

    target: CostTable
    cached: int  # tokens that a row sees, on average
    plain: float  # a plain step
    asking: float  # a drafter; one that runs a model, for each token
    is_free: bool

    def more(self, drafted: int) -> float:
        """What a pass takes longer that checks a draft of this length."""
        rows = 1 + drafted
        longer = self.target.pass_seconds(rows, self.cached, rows * self.cached)
        return longer - self.target.pass_seconds(1, self.cached, self.cached)


def predict(lengths: Counter[int], accepted_at: Sequence[int], k: int, prices: Prices) -> dict[str, Any]:
    """What drafts of k tokens would gain. Of longer drafts, `lengths` counts steps by the tokens they
    drafted, `accepted_at` by the depth they got right."""
    steps = sum(lengths.values())
    if k == 0 or not steps:
        return {"k": k, "speedup": 1.0, "tau": 1.0, "num_drafted": 0.0, "draft_cost": 0.0, "verify_cost": 1.0}
    drafted = sum(min(n, k) * count for n, count in lengths.items()) / steps
    extra = sum(prices.more(min(n, k)) * count for n, count in lengths.items()) / steps
    verify_cost = 1 + extra / prices.plain
    draft_cost = prices.asking * (1 if prices.is_free else drafted) / prices.plain / k
    reached = [steps, *accepted_at[:k]]
    alphas = [further / before if before else 0.0 for before, further in pairwise(reached)]
    return {
        "k": k,
        "speedup": formulas.speedup(alphas, k, draft_cost, verify_cost),
        "tau": formulas.expected_tokens(alphas, k),
        "num_drafted": drafted,
        "draft_cost": draft_cost,  # of each of the k tokens, relative to a plain step
        "verify_cost": verify_cost,  # relative to a plain step
    }


@dataclass(slots=True)
class Subject:
    """A drafter, and what is known of it."""

    name: str
    lengths: list[int]
    is_free: bool
    clocked: Clocked
    engine: Engine  # with the clocked drafter, at its longest
    asking: float = 0.0  # seconds of a draft; of one that runs a model, for each token

    @property
    def acceptance(self) -> list[float]:
        """By depth from 1 on: how often a token was right where one was drafted after tokens that were."""
        stats = self.engine.totals
        parents = [*stats.drafted_at[:1], *stats.accepted_at]
        reached = [min(d, p) for d, p in zip(stats.drafted_at, parents, strict=False)]
        return [a / n if n else 0.0 for a, n in zip(stats.accepted_at, reached, strict=True)]


class Session:
    def __init__(self, llm: LLM, plan: Plan, tell: Tell) -> None:
        self.llm, self.plan, self.tell = llm, plan, tell
        least = min(LEAST_TOKENS, plan.asked.max_tokens)
        self.params = SamplingParams(temperature=0, max_tokens=plan.asked.max_tokens, min_tokens=least)
        tell("timing passes", 0)
        self.costs = CostTable(*time_passes(llm.engine.executor, PASS_SECONDS))
        self.plain, self.subjects = engine_of(llm, PLAIN), [self._subject(name) for name in plan.methods]
        self.best: dict[tuple[str, int], tuple[float, int]] = {}  # seconds and tokens, by row and prompt
        self.num_prompts = self.num_tokens = self.num_cached = 0

    def _subject(self, name: str) -> Subject:
        self.tell(f"loading {name}", 0)
        lengths = self.plan.lengths_of(name)
        clocked = Clocked(drafter_of(self.llm, self.plan.options(name, lengths[-1])))
        engine = engine_with(self.llm, clocked, lengths[-1])
        return Subject(name, lengths, self.plan.is_free(name), clocked, engine)

    def _rows(self) -> dict[str, Engine]:
        """New engines, that know no text yet. A drafter that runs a model knows the text of its request and
        nothing else, so it may be used again."""
        rows = {PLAIN: self.plain}
        for subject in self.subjects:
            for k in subject.lengths:
                is_new = subject.is_free
                options = self.plan.options(subject.name, k)
                drafter = drafter_of(self.llm, options) if is_new else subject.clocked.drafter
                rows[f"{subject.name}/{k}"] = engine_with(self.llm, drafter, k)
        return {**rows, AUTO: auto_engine(self.llm, self.costs)}

    def run(self, prompts: Sequence[list[int]]) -> None:
        own, started = self.llm.engine, perf_counter()
        answer(self.llm, prompts[0], self.params, self.plain)  # what is compiled or read on first use
        for repeat in range(REPEATS):
            rows, limit = self._rows(), self.plan.asked.seconds * (FIRST if repeat == 0 else 1.0)
            for number, ids in enumerate(prompts if repeat == 0 else prompts[: self.num_prompts]):
                if number and perf_counter() - started > limit:
                    break
                if repeat == 0:
                    self._clock(ids)
                for row, engine in rotated(rows, number + repeat):
                    timing = answer(self.llm, ids, self.params, engine).timed(UNTIMED)
                    self.best[row, number] = min(self.best.get((row, number), timing), timing)
                    self.tell(f"timing {row.partition('/')[0]}", 1)
        self.llm.engine = own

    def _clock(self, ids: list[int]) -> None:
        self.num_prompts += 1
        for subject in self.subjects:
            found = answer(self.llm, ids, self.params, subject.engine)
            self.tell(f"clocking {subject.name}", 1)
        self.num_tokens += len(found.ids)
        self.num_cached += len(found.ids) * (len(ids) + len(found.ids) // 2)

    def seconds(self, row: str) -> float | None:
        """For a token, over all prompts."""
        found = [timing for (name, _), timing in self.best.items() if name == row]
        total, num_tokens = (sum(column) for column in zip(*found, strict=True))
        return total / num_tokens if num_tokens else None

    def speedup(self, row: str) -> float | None:
        plain, own = self.seconds(PLAIN), self.seconds(row)
        return plain / own if plain and own else None

    def report(self) -> dict[str, Any]:
        plain, cached = self.seconds(PLAIN), self.num_cached // max(self.num_tokens, 1)
        if plain is None:
            remedy = f"give prompts that leave room for {LEAST_TOKENS} tokens"
            raise RequestError(f"no answer was long enough to be timed; {remedy}")
        return {
            "model": self.llm.checkpoint.name,
            "prompts": self.num_prompts,
            "prompts_left_out": len(self.plan.prompts) - self.num_prompts,
            "tokens": self.num_tokens,
            "plain_tokens_per_second": 1 / plain,
            "passes": self.costs.to_json(),
            "drafters": {each.name: self._drafter(each, plain, cached) for each in self.subjects},
            "auto": self.speedup(AUTO),
        }

    def _in_bursts(self, subject: Subject, prices: Prices) -> float:
        """Seconds of a drafted token where a burst drafts: what its steps take longer than a check."""
        stats, token = subject.engine.totals, self.seconds(f"{subject.name}/{subject.lengths[-1]}")
        if subject.is_free or token is None or not stats.num_drafted:
            return 0.0
        drafted = stats.num_drafted / stats.num_steps
        return max(token * stats.tau - prices.plain - prices.more(round(drafted)), 0.0) / drafted

    def _drafter(self, subject: Subject, plain: float, cached: int) -> dict[str, Any]:
        stats, prices = subject.engine.totals, Prices(self.costs, cached, plain, 0.0, subject.is_free)
        subject.asking = median(subject.clocked.asking or [self._in_bursts(subject, prices)])
        prices, lengths = prices._replace(asking=subject.asking), Counter(stats.lengths)
        line = [predict(lengths, stats.accepted_at, k, prices) for k in range(subject.lengths[-1] + 1)]
        rows = [{**line[k], "measured": self.speedup(f"{subject.name}/{k}")} for k in subject.lengths]
        return {
            "acceptance_by_depth": subject.acceptance,
            ("ask_seconds" if subject.is_free else "token_seconds"): subject.asking,
            "lengths": rows,
            "best_k": max(rows, key=lambda row: row["measured"] or 0.0)["k"],
            "predicted": [each["speedup"] for each in line],
        }


def run(plan: Plan, tell: Tell) -> dict[str, Any]:
    """The report; what was learned is saved for `auto` when everything has been measured, or not at all."""
    tell("loading the model", 0)
    with load_model(plan.asked, speculative_config=None, max_num_seqs=1) as llm:
        session = Session(llm, plan, tell)
        session.run([ids_of(llm, prompt.text) for prompt in plan.prompts])
        report = session.report()
        profile = _save(llm, plan.asked.dtype, session)
        return {**report, "recommended": recommended(report), "profile": profile}


def _save(llm: LLM, dtype: str, session: Session) -> str | None:
    """Where the profile is now; None if it cannot be written. What is known of other drafters stays."""
    executor = llm.engine.executor
    dtype = executor.backend.default_dtype if dtype == "auto" else dtype
    path = profile_path(llm.checkpoint.fingerprint, dtype, executor)
    before = load_profile(path)
    drafters = dict(before.drafters) if before is not None else {}
    for subject in session.subjects:
        if subject.name != "draft_model":  # another draft model would be another drafter of the same name
            drafters[subject.name] = DrafterProfile(subject.asking, tuple(subject.acceptance))
    return str(path) if save_profile(path, Profile(session.costs, drafters)) else None


def _best(drafter: dict[str, Any]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = drafter["lengths"]
    return max(rows, key=lambda row: row["measured"] or 0.0)


def recommended(report: dict[str, Any]) -> str | dict[str, Any] | None:
    """A speculative_config: "auto", a drafter with its length, or None where nothing gains."""
    name, drafter = max(report["drafters"].items(), key=lambda pair: _best(pair[1])["measured"] or 0.0)
    gain, auto = _best(drafter)["measured"] or 0.0, report["auto"] or 0.0
    if max(gain, auto) <= WORTH:
        return None
    return AUTO if gain < AHEAD * auto else {"method": name, "num_speculative_tokens": drafter["best_k"]}


def tables(report: dict[str, Any]) -> list[Table]:
    passes = ", ".join(f"{rows}: {1e3 * s:.2f}" for rows, s in report["passes"]["seconds"].items())
    plain = f"plain decoding {report['plain_tokens_per_second']:,.1f} tokens/s"
    notes = [
        f"{report['model']}: {plain}; ms of a pass by its tokens: {passes}",
        f"{report['prompts']} prompts, {report['tokens']:,} tokens, greedy, one request at a time",
    ]
    if report["prompts_left_out"]:
        notes.append(f"({report['prompts_left_out']} prompts left out for want of time; raise --seconds)")
    rows = []
    for name, drafter in report["drafters"].items():
        alphas = " ".join(f"{alpha:.2f}" for alpha in drafter["acceptance_by_depth"][:SHOWN_DEPTHS])
        for row in drafter["lengths"]:
            figures = [f"{row[key]:.2f}" for key in ("num_drafted", "tau", "speedup")]
            best = "best" if row["k"] == drafter["best_k"] else ""
            rows.append((name, str(row["k"]), *figures, cell(row["measured"], "{:.2f}"), best, alphas))
            alphas = ""
        notes.append(_verdict(name, _best(drafter)))
    rows.append((AUTO, "", "", "", "", cell(report["auto"], "{:.2f}"), "", ""))
    columns = ("K", "drafted", "τ", "predicted", "measured", "", "α by depth")
    saved = f"saved {report['profile']}" if report["profile"] else "not saved: the cache cannot be written"
    notes += [_advice(report), saved]
    return [Table("speedup over plain decoding", ("drafter",), columns, rows, notes)]


def _verdict(name: str, best: dict[str, Any]) -> str:
    """What it would gain, or why it does not."""
    gain = best["measured"] or best["speedup"]
    if gain > WORTH:
        return f"{name}: gains {gain:.2f}x with K = {best['k']}"
    edge = formulas.break_even_alpha(best["k"], best["draft_cost"], best["verify_cost"])
    pays = "even perfect drafts would not pay" if edge is None else f"it would pay from α = {edge:.2f}"
    cost = best["k"] * best["draft_cost"] + best["verify_cost"]
    why = f"a step costs {cost:.2f} plain ones, {pays}"
    return f"{name}: gains nothing ({gain:.2f}x with K = {best['k']}): {why}"


def _advice(report: dict[str, Any]) -> str:
    choice, auto = report["recommended"], report["auto"]
    if choice is None:
        return "Use none of them here: nothing gains. auto does so by itself, at no cost."
    if choice == AUTO:
        return f"Use auto, the default: {auto:.2f}x, and it adapts to the text."
    gain = _best(report["drafters"][choice["method"]])["measured"]
    return f"Use --method {choice['method']} -k {choice['num_speculative_tokens']}: {gain:.2f}x."
