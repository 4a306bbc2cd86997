"""`paceline tune`: plain decoding, the policy and every K of every drafter take turns, and of repeats the
quickest counts. The drafts of the longest K are timed; how often they are right at each depth and what
they cost predict the speedup of every K. Invariant: a drafter that remembers texts meets none twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from paceline.api.llm import LLM
from paceline.core.errors import ConfigError, RequestError
from paceline.core.options import require
from paceline.core.params import SamplingParams
from paceline.core.types import Cached, Segment
from paceline.drafters import registry
from paceline.drafters.base import Drafter
from paceline.engine.engine import Engine
from paceline.engine.policy.base import FixedPolicy
from paceline.engine.policy.cost import CostTable
from paceline.engine.profile import DrafterProfile, Profile, load_profile, profile_path, save_profile
from paceline.measure import engines, roofline
from paceline.measure.fit import Form, fit, num_loads
from paceline.measure.options import Tune
from paceline.measure.prompts import chosen, load
from paceline.measure.results import Table, Tell, cell, table_of
from paceline.measure.rows import AUTO, PLAIN, in_turn, names_of
from paceline.runtime.executor import LocalExecutor
from paceline.runtime.record import StepRecord
from paceline.runtime.timing import ROWS
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
FITTED, FIT_PROMPTS = "draft_model", 4  # the drafter that --fit-draft is for; prompts whose answers it reads
FORMS = {"agreement": "{agreement:.2f}", "cost": "{cost:.2f}", "K": "{k}", "speedup": "{speedup:.2f}"}
LEGEND = """α by depth: how often a token was right where one was drafted after tokens that were; drafted, τ:
tokens drafted and written a step; predicted: from acceptance and what passes and drafting cost; measured: in
turn with plain decoding.
"""


class TimedPolicy(FixedPolicy):
    """Notes the seconds of each draft; of a drafter that runs a model, for each token."""

    def __init__(self, drafter: Drafter, num_speculative_tokens: int) -> None:
        super().__init__(drafter, num_speculative_tokens)
        self.asking: list[float] = []

    def observe(self, record: StepRecord) -> None:
        for length, seconds in record.drafting.values():
            if seconds is not None:
                self.asking.append(seconds if self.drafters[0].is_free else seconds / max(length, 1))


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


def woken_by_rows(executor: LocalExecutor, ids: Sequence[int]) -> dict[int, float]:
    """Distinct experts that the first tokens of a text wake in a layer, by their number; empty where there
    are none, or they are not counted."""
    found, cache = {}, Cached()
    if executor.config.experts is None or not executor.kv.reserve(cache, min(len(ids), max(ROWS))):
        return {}
    for rows in sorted(rows for rows in ROWS if rows <= len(ids)):
        executor.forward([Segment(ids[:rows], cache)])
        found[rows] = executor.decoder.woken
    executor.kv.free(cache)
    return found if all(found.values()) else {}


def predict(lengths: Counter[int], accepted_at: Sequence[int], k: int, prices: Prices) -> dict[str, Any]:
    """What drafts of k tokens would gain, from steps by tokens drafted and by the depth they got right."""
    steps = max(sum(lengths.values()), 1)
    drafted = sum(min(n, k) * count for n, count in lengths.items()) / steps
    extra = sum(prices.more(min(n, k)) * count for n, count in lengths.items()) / steps
    verify_cost = 1 + extra / prices.plain
    draft_cost = prices.asking * (1 if prices.is_free else drafted) / prices.plain / max(k, 1)
    reached = [steps, *accepted_at[:k]]
    alphas = [further / before if before else 0.0 for before, further in pairwise(reached)]
    return {
        "k": k,
        "speedup": roofline.speedup(alphas, k, draft_cost, verify_cost),
        "tau": roofline.expected_tokens(alphas, k),
        "num_drafted": drafted,
        "draft_cost": draft_cost,  # of each of the k tokens, relative to a plain step
        "verify_cost": verify_cost,  # relative to a plain step
    }


class Run:
    llm: LLM
    costs: CostTable
    first: dict[str, Engine]  # the engines of the first repeat, by row

    def __init__(self, asked: Tune) -> None:
        if "hybrid" in asked.methods:
            raise ConfigError("--methods holds 'hybrid'; name its drafters one by one, to be measured alone")
        methods = names_of("--methods", asked.methods, [*registry.DRAFTERS])
        for name in set(methods).intersection(registry.SMALLER) if asked.draft_model is None else ():
            raise ConfigError(f"--methods holds {name!r}; name the smaller model with --draft-model")
        for k in asked.k:
            require(1 <= k <= MOST_K, "-k", k, f"give a whole number from 1 to {MOST_K}")
        usual = max(1, NUM_PROMPTS // len({prompt.category for prompt in load(asked.prompts)}))
        self.asked, self.prompts = asked, chosen(asked.prompts, asked.limit or usual)
        self.lengths: dict[str, list[int]] = {}
        self.fitted: dict[str, Any] = {}  # options of the draft model
        for name in methods:
            is_free = registry.parse(self._options(name, 1))[0].is_free
            ks, most = asked.k or (LENGTHS if is_free else LENGTHS_OF_MODELS), MOST_K
            if name == "lookahead":  # its window and its n-grams have that many nodes and no more
                most = registry.parse({"method": name})[1].num_speculative_tokens
            self.lengths[name] = sorted({min(k, most) for k in ks})
        # of a prompt: each drafter's lengths, the policy and plain decoding
        self.num_turns = REPEATS * len(self.prompts) * (2 + sum(map(len, self.lengths.values())))
        least = min(LEAST_TOKENS, asked.max_tokens)
        self.params = SamplingParams(temperature=0, max_tokens=asked.max_tokens, min_tokens=least)
        if asked.fit_draft:
            has_draft = asked.draft_model is not None and FITTED in methods
            require(has_draft, "--fit-draft", True, f"give --draft-model and --methods {FITTED}")
            require(asked.device in ("cpu", "auto"), "--fit-draft", True, "it is for CPUs; add --device cpu")
            self.num_turns += num_loads(str(asked.draft_model))
        self.timed: dict[str, TimedPolicy] = {}  # each drafter at its longest, in the first repeat
        self.best: dict[tuple[str, int], tuple[float, int]] = {}  # seconds and tokens, by row and prompt
        self.num_prompts = self.num_tokens = self.num_cached = 0

    def _options(self, name: str, k: int) -> dict[str, Any]:
        has_model = self.asked.draft_model and name in (*registry.SMALLER, *registry.HEADS)
        model = {"model": self.asked.draft_model} if has_model else {}
        fitted = self.fitted if name == FITTED else {}
        return {"method": name, "num_speculative_tokens": k, **model, **fitted}

    def report(self, tell: Tell) -> dict[str, Any]:
        """What was learned is saved for `auto` when everything has been measured, or not at all."""
        tell("loading the model", 0)
        with engines.load_model(self.asked, speculative_config=None, max_num_seqs=1) as self.llm:
            tell("timing passes", 0)
            self.costs = CostTable(*time_passes(self.llm.engine.executor, PASS_SECONDS))
            prompts = [engines.ids_of(self.llm.tokenizer, prompt.text) for prompt in self.prompts]
            forms = self._fit(prompts, tell) if self.asked.fit_draft else []
            self._measure(prompts, tell)
            if (plain := self._seconds(PLAIN)) is None:
                remedy = f"give prompts that leave room for {LEAST_TOKENS} tokens"
                raise RequestError(f"no answer was long enough to be timed; {remedy}")
            report = {
                "model": self.llm.checkpoint.name,
                "prompts": self.num_prompts,
                "prompts_left_out": len(self.prompts) - self.num_prompts,
                "tokens": self.num_tokens,
                "plain_tokens_per_second": 1 / plain,
                "passes": self.costs.to_json(),
                "experts": self._experts(),
                "forms": [form._asdict() for form in forms],
                "drafters": {name: self._drafter(name, plain) for name in self.lengths},
                "auto": self._speedup(AUTO),
            }
            return {**report, "recommended": recommended(report), "profile": self._save(report)}

    def _fit(self, prompts: Sequence[list[int]], tell: Tell) -> list[Form]:
        """Forms of the draft model, the best first, which is then measured."""
        plain, texts, seconds = engines.engine_of(self.llm, PLAIN), [], []
        for ids in prompts[:FIT_PROMPTS]:
            found = engines.answer(self.llm, ids, self.params, plain)
            texts.append((ids, found["ids"]))
            seconds += [later - earlier for earlier, later in pairwise(found["times"])]
        step, cached = median(seconds), max(len(ids) for ids, _ in texts)
        prices = Prices(self.costs, cached, step, 0.0, is_free=False)
        dtype = self.asked.dtype
        backend = self.llm.engine.executor.backend
        dtype = backend.default_dtype(self.llm.checkpoint) if dtype == "auto" else dtype

        def verify_cost(rows: int) -> float:
            return 1 + prices.more(rows - 1) / step

        forms = fit(self.llm.context, str(self.asked.draft_model), dtype, texts, step, verify_cost, tell)
        self.fitted = {"dtype": forms[0].dtype, "skip_layers": list(forms[0].skip_layers)}
        return forms

    def _measure(self, prompts: Sequence[list[int]], tell: Tell) -> None:
        started, plain = perf_counter(), engines.engine_of(self.llm, PLAIN)
        engines.answer(self.llm, prompts[0], self.params, plain)  # what is compiled or read on first use
        for repeat in range(REPEATS):
            made = {PLAIN: plain, **self._engines(tell), AUTO: engines.auto_engine(self.llm, self.costs)}
            self.first = made if repeat == 0 else self.first
            limit = self.asked.seconds * (FIRST if repeat == 0 else 1.0)
            for number, ids in enumerate(prompts if repeat == 0 else prompts[: self.num_prompts]):
                if number and perf_counter() - started > limit:
                    break
                for row, engine in in_turn(made.items(), number + repeat):
                    found = engines.answer(self.llm, ids, self.params, engine)
                    first = found["times"][min(UNTIMED, len(found["times"])) - 1]
                    timing = found["total_s"] - first, sum(found["counts"][UNTIMED:])
                    self.best[row, number] = min(self.best.get((row, number), timing), timing)
                    tell(f"timing {row.partition('/')[0]}", 1)
                if repeat == 0:
                    written = found["num_tokens"]
                    self.num_prompts, self.num_tokens = number + 1, self.num_tokens + written
                    self.num_cached += written * (len(ids) + written // 2)

    def _experts(self) -> dict[str, Any] | None:
        """Woken by the rows of a pass, as measured and if each row chose for itself; what rows share."""
        executor, experts = self.llm.engine.executor, self.llm.checkpoint.config.experts
        found = woken_by_rows(executor, engines.ids_of(self.llm.tokenizer, self.prompts[0].text))
        if experts is None or max(found, default=1) == 1:
            return None
        alone = {rows: experts.expected_woken(rows) for rows in found}
        more, apart = (sum(by_rows.values()) - len(found) * experts.per_token for by_rows in (found, alone))
        return {"woken": found, "independent": alone, "factor": more / apart}

    def _engines(self, tell: Tell) -> dict[str, Engine]:
        """New ones, that know no text yet, for every length. A drafter that runs a model knows the text of
        its request and nothing else, so it is used again. In the first repeat the longest is timed."""
        made = {}
        for name, lengths in self.lengths.items():
            tell(f"loading {name}", 0)
            for k in reversed(lengths):
                known = self.timed.get(name)
                drafter = known.drafters[0] if known is not None else None
                if drafter is None or drafter.is_free:
                    drafter = engines.drafter_of(self.llm, self._options(name, k))
                engine = made[f"{name}/{k}"] = engines.engine_with(self.llm, drafter, k)
                if known is None:
                    engine.policy = self.timed[name] = TimedPolicy(drafter, k)
        return made

    def _seconds(self, row: str) -> float | None:
        """For a token, over all prompts."""
        found = [timing for (name, _), timing in self.best.items() if name == row]
        total, num_tokens = (sum(column) for column in zip(*found, strict=True))
        return total / num_tokens if num_tokens else None

    def _speedup(self, row: str) -> float | None:
        plain, own = self._seconds(PLAIN), self._seconds(row)
        return plain / own if plain and own else None

    def _drafter(self, name: str, plain: float) -> dict[str, Any]:
        lengths, asking = self.lengths[name], self.timed[name].asking
        is_free = self.timed[name].drafters[0].is_free
        stats = self.first[f"{name}/{lengths[-1]}"].totals
        prices = Prices(self.costs, self.num_cached // max(self.num_tokens, 1), plain, 0.0, is_free)
        token = self._seconds(f"{name}/{lengths[-1]}")
        if not asking and not is_free and token is not None and stats.num_drafted:
            # A burst drafted: a token costs its share of what a step takes longer than a check.
            drafted = stats.num_drafted / stats.num_steps
            asking = [max(token * stats.tau - plain - prices.more(round(drafted)), 0.0) / drafted]
        prices = prices._replace(asking=median(asking or [0.0]))
        line = [predict(Counter(stats.lengths), stats.accepted_at, k, prices) for k in range(lengths[-1] + 1)]
        rows = [{**line[k], "measured": self._speedup(f"{name}/{k}")} for k in lengths]
        # by depth from 1 on: how often a token was right where one was drafted after tokens that were
        drafted_at, right_at = stats.drafted_at, stats.accepted_at
        reached = [min(d, p) for d, p in zip(drafted_at, [*drafted_at[:1], *right_at], strict=False)]
        return {
            "options": self._options(name, 1),
            "acceptance_by_depth": [a / n if n else 0.0 for a, n in zip(right_at, reached, strict=True)],
            ("ask_seconds" if is_free else "token_seconds"): prices.asking,
            "lengths": rows,
            "best_k": _best({"lengths": rows})["k"],
            "predicted": [each["speedup"] for each in line],
        }

    def _save(self, report: dict[str, Any]) -> str | None:
        """Where the profile is now; None if it cannot be written. What is known of other drafters stays."""
        executor, dtype = self.llm.engine.executor, self.asked.dtype
        dtype = executor.backend.default_dtype(self.llm.checkpoint) if dtype == "auto" else dtype
        path = profile_path(self.llm.checkpoint.fingerprint, dtype, executor)
        before = load_profile(path)
        drafters = dict(before.drafters) if before is not None else {}
        for name, found in report["drafters"].items():
            if name not in registry.SMALLER:  # another model would be another drafter of the same name
                asking = found.get("ask_seconds", found.get("token_seconds"))
                drafters[name] = DrafterProfile(asking, tuple(found["acceptance_by_depth"]))
        return str(path) if save_profile(path, Profile(self.costs, drafters)) else None


def _best(drafter: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = max(drafter["lengths"], key=lambda row: row["measured"] or 0.0)
    return found


def recommended(report: dict[str, Any]) -> str | dict[str, Any] | None:
    """A speculative_config: "auto", a drafter with its length, or None where nothing gains."""
    drafter = max(report["drafters"].values(), key=lambda found: _best(found)["measured"] or 0.0)
    gain, auto = _best(drafter)["measured"] or 0.0, report["auto"] or 0.0
    if max(gain, auto) <= WORTH:
        return None
    best = {**drafter["options"], "num_speculative_tokens": drafter["best_k"]}
    return AUTO if gain < AHEAD * auto else best


def tables(report: dict[str, Any]) -> list[Table]:
    passes = ", ".join(f"{rows}: {1e3 * s:.2f}" for rows, s in report["passes"]["seconds"].items())
    plain = f"plain decoding {report['plain_tokens_per_second']:,.1f} tokens/s"
    notes = [f"{report['model']}: {plain}; ms of a pass by its tokens: {passes}"]
    if (experts := report["experts"]) is not None:
        woken = ", ".join(f"{rows}: {count:.1f}" for rows, count in experts["woken"].items())
        share = f"{experts['factor']:.2f} of what tokens that choose apart from each other would add"
        said = f"experts that a pass wakes in a layer, by its tokens: {woken}"
        notes.append(f"{said}; further ones add {share}")
    notes.append(f"{report['prompts']} prompts, {report['tokens']:,} tokens, greedy, one request at a time")
    if report["prompts_left_out"]:
        notes.append(f"({report['prompts_left_out']} prompts left out for want of time; raise --seconds)")
    rows = []
    for name, drafter in report["drafters"].items():
        alphas = " ".join(f"{alpha:.2f}" for alpha in drafter["acceptance_by_depth"][:SHOWN_DEPTHS])
        for row in drafter["lengths"]:
            figures = [f"{row[key]:.2f}" for key in ("num_drafted", "tau", "speedup")]
            mark = "best" if row["k"] == drafter["best_k"] else ""
            rows.append((name, str(row["k"]), *figures, cell(row["measured"], "{:.2f}"), mark, alphas))
            alphas = ""
        best = _best(drafter)  # what it would gain, or why it does not
        gain = best["measured"] or best["speedup"]
        said = f"gains {gain:.2f}x with K = {best['k']}"
        if gain <= WORTH:
            edge = roofline.break_even_alpha(best["k"], best["draft_cost"], best["verify_cost"])
            pays = "even perfect drafts would not" if edge is None else f"it would from α = {edge:.2f}"
            cost = f"{best['k'] * best['draft_cost'] + best['verify_cost']:.2f} plain ones"
            said = f"gains nothing ({gain:.2f}x with K = {best['k']}): a step costs {cost}; {pays} pay"
        notes.append(f"{name}: {said}")
    rows.append((AUTO, "", "", "", "", cell(report["auto"], "{:.2f}"), "", ""))
    columns = ("K", "drafted", "τ", "predicted", "measured", "", "α by depth")
    saved = f"saved {report['profile']}" if report["profile"] else "not saved: the cache cannot be written"
    choice, auto = report["recommended"], cell(report["auto"], "{:.2f}")
    advice = f"Use auto, the default: {auto}x, and it adapts to the text."
    if choice is None:
        advice = "Use none of them here: nothing gains. auto does so by itself, at no cost."
    elif choice != AUTO:
        gain = _best(report["drafters"][choice["method"]])["measured"]
        advice = f"Use --speculative-config '{json.dumps(choice)}': {gain:.2f}x."
        if set(choice) == {"method", "num_speculative_tokens"}:
            advice = f"Use --method {choice['method']} -k {choice['num_speculative_tokens']}: {gain:.2f}x."
    notes += [advice, saved]
    found = Table("speedup over plain decoding", ("drafter",), columns, rows, notes)
    if not report["forms"]:
        return [found]
    shown = [
        {**form, "skip_layers": " ".join(map(str, form["skip_layers"])) or "none"} for form in report["forms"]
    ]
    return [table_of("forms of the draft model, as expected", ("dtype", "skip_layers"), FORMS, shown), found]
