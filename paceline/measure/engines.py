"""Several engines over one loaded model: rows of `bench decode`, `bench batch` and `tune`, timed in turns.
The one place where measuring makes engines and policies. Invariant: all of them share the model's executor
and take turns, so a comparison is of drafting alone; each has drafters of its own. `load` is what a worker
process of `paceline bench` and of `bench batch --cold` calls (workers/serve.py).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from paceline.api.llm import LLM
from paceline.core.errors import ConfigError, RequestError
from paceline.core.options import nearest
from paceline.core.params import SamplingParams
from paceline.drafters import registry
from paceline.drafters.base import Drafter
from paceline.drafters.suffix import Suffix
from paceline.engine.engine import Engine
from paceline.engine.policy.auto import AutoPolicy
from paceline.engine.policy.cost import CostTable
from paceline.loaders.tokenizer import Tokenizer
from paceline.measure.options import Loaded
from paceline.measure.rows import AUTO, PLAIN, names_of

# of SpecStats
COUNTS = ("num_tokens", "num_steps", "num_drafted", "num_accepted", "drafted_at", "accepted_at")
FREE = "auto-free"  # auto without a learned head
NAMED: dict[str, Any] = {PLAIN: None, AUTO: AUTO, FREE: {"method": AUTO, "head": False}}


def rows_of(text: str, has_synthetic: bool = False) -> list[str]:
    """--rows: plain first, always, since all speedups are against it."""
    drafters = [*registry.DRAFTERS, *(registry.FOR_BENCHMARKS if has_synthetic else ())]
    names, known = names_of("--rows", text), [PLAIN, AUTO, FREE, *drafters]
    for name in names:
        method, slash, length = name.partition("/")
        if method not in known:
            raise ConfigError(f"--rows holds {name!r}; {nearest(method, known)}")
        sizes = length.split("x")  # a tree's: width, depth and nodes
        is_valid = len(sizes) in (1, 3) and all(size.isdecimal() and int(size) for size in sizes)
        if slash and (method not in drafters or not is_valid):
            raise ConfigError(f"--rows holds {name!r}; write a drafter and its length, such as suffix/4")
    return list(dict.fromkeys([PLAIN, *names]))


def load_model(asked: Loaded, **more: Any) -> LLM:
    """The model that the options name."""
    sizes = "tensor_parallel_size", "pipeline_parallel_size"
    names = ("model", "dtype", "device", "exact", *sizes, "load_format")
    return LLM(**{name: getattr(asked, name) for name in names}, **more)


def engine_of(llm: LLM, row: str, **more: Any) -> Engine:
    """A new engine for a row. more: of its speculative_config."""
    if row == PLAIN:
        return engine_with(llm, None, 0)
    if row in (AUTO, FREE):
        costs: CostTable = llm.engine.policy.costs  # type: ignore[attr-defined]
        return auto_engine(llm, costs, has_head=row == AUTO)
    options: Any = speculation_of(row, **more)
    return engine_with(llm, drafter_of(llm, options), options["num_speculative_tokens"])


def speculation_of(row: str, **more: Any) -> dict[str, Any] | str | None:
    """The speculative_config of a row. A drafter by its name always drafts its usual length."""
    method, _, length = row.partition("/")
    if row in NAMED:
        return NAMED[row]
    options = {"method": method, **more}
    if "x" in length:
        width, depth, nodes = map(int, length.split("x"))
        return {**options, "tree_width": width, "tree_depth": depth, "num_speculative_tokens": nodes}
    most = int(length) if length else registry.parse(options)[1].num_speculative_tokens
    return {**options, "num_speculative_tokens": most}


def drafter_of(llm: LLM, options: dict[str, Any]) -> Drafter:
    """A new drafter from a speculative_config."""
    made: Drafter = registry.create(*registry.parse(options), llm.context)
    return made


def engine_with(llm: LLM, drafter: Any, most: int) -> Engine:
    """Drafts `most` tokens whenever it can."""
    return Engine(llm.engine.executor, drafter, replace(llm.engine.config, num_speculative_tokens=most))


def auto_engine(llm: LLM, costs: CostTable, has_head: bool = True) -> Engine:
    """As `LLM` makes it by default, without what a profile on disk knows of its drafters."""
    executor, config = llm.engine.executor, llm.engine.config
    head = registry.head_for(llm.checkpoint, has_head)
    options = [registry.AUTO, *([head] if head else ())]
    lengths = [registry.parse(each)[1].num_speculative_tokens for each in options]
    drafters, most = [drafter_of(llm, each) for each in options], min(sum(lengths), config.max_model_len - 1)
    costs = CostTable(**costs.to_json())  # without what was learned since
    backend = executor.backend
    limits: dict[str, Any] = {"most_requests": backend.most_drafted, "most_matched": backend.most_matched}
    policy = AutoPolicy(drafters, costs, most_nodes=most, **limits)
    return Engine(executor, drafters[0], replace(config, num_speculative_tokens=most), policy)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """As the model's chat template puts it, or the text itself where it has none."""
    is_chat = tokenizer.has_chat_template
    return tokenizer.encode_chat([{"role": "user", "content": text}]) if is_chat else tokenizer.encode(text)


def answer(llm: LLM, ids: list[int], params: SamplingParams, engine: Engine | None = None) -> dict[str, Any]:
    """One request as rows.py counts answers, with the seconds at which steps wrote tokens, and how many."""
    llm.engine = engine or llm.engine
    tokens, times, counts, started = [], [], [], time.perf_counter()
    for chunk in llm.stream(ids, params):
        if chunk.tokens:
            times.append(time.perf_counter() - started)
            counts.append(len(chunk.tokens))
            tokens += [token.id for token in chunk.tokens]
    assert chunk.result is not None, "a stream ends with its result"
    found = {"ids": tokens, "first_s": times[0], "total_s": times[-1], "times": times, "counts": counts}
    return {**found, **{name: getattr(chunk.result.stats, name) for name in COUNTS}}


def load(options: dict[str, Any]) -> dict[str, Any]:
    """Paceline as a worker, timed like every peer; it also reads the prompts for all (`encode`)."""
    # no prefix caching: every repeat reads its prompt anew
    limits = {"max_num_seqs": options["in_flight"], "enable_prefix_caching": False, "progress": False}
    llm = LLM(options["model"], **options["more"], **limits)
    answered: set[tuple[int, ...]] = set()  # prompts whose answers a drafter may remember

    def begin(prompts: list[dict[str, Any]]) -> None:
        """A repeat must not find its answer in what a drafter remembers of the last one."""
        asked = {tuple(prompt["ids"]) for prompt in prompts}
        if answered & asked:
            for drafter in llm.engine.policy.drafters:
                if isinstance(drafter, Suffix):
                    drafter.forget()
            answered.clear()
        answered.update(asked)

    def one(prompt: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=prompt["num_tokens"], ignore_eos=True)
        return answer(llm, prompt["ids"], params)

    def wave(prompts: list[dict[str, Any]]) -> dict[str, Any]:
        """Requests as a user gives them, all at once: seconds until the last has ended."""
        begin(prompts)
        params = SamplingParams(temperature=0, max_tokens=prompts[0]["num_tokens"], ignore_eos=True)
        backend, is_exact = llm.engine.executor.backend, llm.engine.executor.decoder.is_exact
        before, started = backend.num_recordings, time.perf_counter()
        results = llm.generate([prompt["ids"] for prompt in prompts], params)
        found = {"wall_s": time.perf_counter() - started, "recordings": backend.num_recordings - before}
        return {**found, "is_exact": is_exact, "ids": [result.token_ids for result in results]}

    def encode(texts: dict[str, str], max_tokens: int, min_tokens: int) -> dict[str, Any]:
        """Each prompt as the model's chat template puts it, and how long its plain greedy answer is."""
        found, plain = {}, SamplingParams(temperature=0, max_tokens=max_tokens, num_speculative_tokens=0)
        for name, text in texts.items():
            try:
                ids = ids_of(llm.tokenizer, text)
                (result,) = llm.generate([ids], plain)
            except RequestError as error:
                raise RequestError(f"prompt {name}: {error}") from None
            answered.add(tuple(ids))
            room = llm.engine.config.max_model_len - len(ids)
            length = min(max(len(result.token_ids), min_tokens), max_tokens, room)
            found[name] = {"ids": ids, "num_tokens": length}
        return {"prompts": found}

    return {"answer": one, "begin": begin, "encode": encode, "wave": wave}
