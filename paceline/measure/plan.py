"""`paceline plan`: what drafting could gain for a model on a machine, from its shape and the machine's limits
alone. Nothing is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from paceline.core import formulas
from paceline.core.errors import ConfigError
from paceline.core.options import nearest
from paceline.loaders.dummy import describe
from paceline.measure import roofline
from paceline.measure.options import Paper
from paceline.measure.roofline import KV_WIDTHS, MOST_K, WIDTHS, Deployment, Gains, Hardware, training
from paceline.measure.tables import Table

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
KS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 1024
UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


class Plan(NamedTuple):
    name: str
    target: Deployment
    draft_name: str | None
    draft: Deployment | None
    alphas: tuple[float, ...]
    ks: tuple[int, ...]
    budget: float | None

    @property
    def gains(self) -> Gains:
        return Gains(self.target, self.draft)


def check(asked: Paper) -> None:
    for alpha in asked.alpha or ():
        if not 0 <= alpha <= 1:
            raise ConfigError(f"--alpha is {alpha}; it is a chance, give a number from 0 to 1")
    for k in asked.k or ():
        if not 1 <= k <= MOST_K:
            raise ConfigError(f"-k is {k}; give a whole number from 1 to {MOST_K}")
    if asked.budget is not None and not 1e6 <= asked.budget <= 1e30:
        raise ConfigError(f"--budget is {asked.budget:g}; give FLOPs between 1e6 and 1e30, such as 1e18")


def machine_of(asked: Paper) -> Hardware:
    given = (asked.bandwidth, asked.flops, asked.memory)
    if all(value is None for value in given):
        return roofline.named(asked.hardware or roofline.THIS)
    return roofline.explicit(*given, roofline.named(asked.hardware) if asked.hardware is not None else None)


def prepare(asked: Paper, machine: Hardware) -> Plan:
    usual = "int8" if machine.int8_flops is not None else "bfloat16"
    dtype = usual if asked.dtype == "auto" else asked.dtype
    floats = [name for name in KV_WIDTHS if name != "int8"]  # integers come with integer activations alone
    if dtype not in WIDTHS:
        raise ConfigError(f"--dtype is {dtype!r}; {nearest(dtype, ['auto', *WIDTHS])}")
    if asked.kv_dtype not in ("auto", *floats):
        raise ConfigError(f"--kv-dtype is {asked.kv_dtype!r}; {nearest(asked.kv_dtype, ['auto', *floats])}")
    kv_dtype = machine.kv_dtype(dtype) if asked.kv_dtype == "auto" else asked.kv_dtype
    name, config = describe(asked.model)
    drafter = describe(asked.draft) if asked.draft is not None else None
    most = min(config.max_context, drafter.config.max_context if drafter else config.max_context)
    context = min(CONTEXT, most) if asked.context is None else asked.context
    if context > most:
        raise ConfigError(f"--context is {context}; the longest context here is {most}, give at most that")
    target = Deployment(config, machine, dtype, kv_dtype, asked.batch, context)
    draft = replace(target, config=drafter.config) if drafter else None
    alphas, ks = tuple(asked.alpha or ALPHAS), tuple(asked.k or KS)
    return Plan(name, target, drafter.name if drafter else None, draft, alphas, ks, asked.budget)


def report_of(plan: Plan) -> dict[str, Any]:
    target, gains, hardware = plan.target, plan.gains, plan.target.hardware
    trained = training(plan.budget, target) if plan.budget is not None else None
    return {
        "model": {"name": plan.name, **_model(target)},
        "draft": None if plan.draft is None else {"name": plan.draft_name, **_model(plan.draft)},
        "hardware": {
            "name": hardware.name,
            "bandwidth": hardware.bandwidth,
            "flops": hardware.product_flops(target.dtype),
            "memory": hardware.memory,
            "ridge": hardware.ridge(target.dtype),
        },
        "batch": target.batch,
        "context": target.context,
        "passes": [_pass(target, n) for n in ROWS],
        "free_tokens": max(target.free_rows - 1, 0),
        "draft_cost": gains.draft_cost,
        "speedups": [_speedups(gains, alpha, plan.ks) for alpha in plan.alphas],
        "break_even_alpha": {k: gains.break_even(k) for k in plan.ks},
        "memory": _memory(plan),
        "training": None if trained is None else trained._asdict(),
    }


def _model(on: Deployment) -> dict[str, Any]:
    return {
        "parameters": on.num_parameters,
        "dtype": on.dtype,
        "kv_dtype": on.kv_dtype,
        "weight_bytes": on.weight_bytes,
        "bytes_read": on.bytes_read,
        "kv_bytes_per_token": on.kv_bytes_per_token,
        "kv_bytes": on.kv_bytes,
        "tokens_per_second": on.batch / on.seconds(1),
    }


def _memory(plan: Plan) -> dict[str, Any]:
    """Bytes of both models and their K/V, and what fits."""
    target, draft, available = plan.target, plan.draft, plan.target.hardware.memory
    held = {"target_weights": target.weight_bytes, "target_kv": target.kv_bytes}
    if draft is not None:
        held |= {"draft_weights": draft.weight_bytes, "draft_kv": draft.kv_bytes}
    total, kv = sum(held.values()), draft.context * draft.kv_bytes_per_token if draft else 0
    most = target.most_requests(draft.weight_bytes if draft else 0, kv) if target.context else None
    fits = total <= available
    return {**held, "total": total, "available": available, "fits": fits, "most_sequences": most}


def _pass(on: Deployment, num_rows: int) -> dict[str, Any]:
    work = on.work(num_rows)
    return {
        "tokens": num_rows,
        "flops": work.flops,
        "bytes": work.num_bytes,
        "intensity": work.intensity,
        "bound": "memory" if on.is_memory_bound(num_rows) else "arithmetic",
        "ms": 1000 * on.seconds(num_rows),
        "relative": on.relative(num_rows),
    }


def _speedups(gains: Gains, alpha: float, ks: tuple[int, ...]) -> dict[str, Any]:
    best = gains.best_k(alpha)
    by_k = {k: {"tokens": formulas.expected_tokens(alpha, k), "speedup": gains.speedup(alpha, k)} for k in ks}
    return {"alpha": alpha, "by_k": by_k, "best_k": best, "best_speedup": gains.speedup(alpha, best)}


def tables(report: dict[str, Any]) -> list[Table]:
    free = report["free_tokens"]
    is_longer = "reading the weights takes longer than multiplying"
    why = is_longer if free else "multiplying takes longer than reading already"
    speed = report["model"]["tokens_per_second"]
    rows = [
        (str(p["tokens"]), f"{p['intensity']:.1f}", p["bound"], f"{p['ms']:.3g}", f"{p['relative']:.2f}")
        for p in report["passes"]
    ]
    said = [
        f"Drafted tokens checked for free, a sequence: {free} ({why}).",
        f"Plain decoding: at most {speed:,.1f} tokens/s.",
    ]
    columns = ("tokens", "FLOP/byte", "bound by", "ms", "t(n)/t(1)")
    return [
        Table("", (), (), (), _heading(report)),
        Table("a pass of the target", (), columns, rows, said),
        _gains(report),
    ]


def _heading(report: dict[str, Any]) -> list[str]:
    lines = []
    for model in filter(None, (report["model"], report["draft"])):
        weights = f"{model['dtype']} weights {_amount(model['weight_bytes'])}B"
        held = f"{_amount(model['parameters'])} parameters, {weights}"
        kept = f"K/V {_amount(model['kv_bytes_per_token'])}B a token ({model['kv_dtype']})"
        batch = f"{_amount(model['kv_bytes'])}B for {report['batch']} x {report['context']}"
        lines.append(f"{model['name']}: {held}, {kept}, {batch}")
    machine, memory = report["hardware"], report["memory"]
    limits = f"reads {_amount(machine['bandwidth'])}B/s, multiplies {_amount(machine['flops'])}FLOP/s"
    ridge = f"ridge at {machine['ridge']:.0f} FLOP a byte, {_amount(machine['memory'])}B"
    lines.append(f"{machine['name']}: {limits}, {ridge}")
    fits, most = "fits" if memory["fits"] else "does not fit", memory["most_sequences"]
    room = "" if most is None else f"; at most {most:,} sequences of this context"
    held = f"{_amount(memory['total'])}B of {_amount(memory['available'])}B"
    return [*lines, f"memory: {held}, {fits}{room}"]


def _gains(report: dict[str, Any]) -> Table:
    ks, cost = list(report["break_even_alpha"]), report["draft_cost"]
    said = f"a drafted token costs {cost:.3f} of a pass" if report["draft"] else "drafts cost nothing"
    rows = []
    for row in report["speedups"]:
        cells = [f"{row['by_k'][k]['speedup']:.2f}" for k in ks]
        rows.append((f"{row['alpha']:g}", *cells, str(row["best_k"]), f"{row['best_speedup']:.2f}"))
    edges = ["never" if edge is None else f"{edge:.2f}" for edge in report["break_even_alpha"].values()]
    notes = [
        "α: chance that a drafted token is accepted; "
        "E[tokens a pass] = (1 - α^(K+1)) / (1 - α), over K drafts and t(K+1)"
    ]
    if report["training"] is not None:
        notes.append(_training(report["training"]))
    columns = (*(f"K={k}" for k in ks), "best K", "speedup")
    rows.append(("pays from", *edges, "", ""))
    return Table(f"speedup over plain decoding, {said}", ("α",), columns, rows, notes)


def _training(found: dict[str, Any]) -> str:
    edge = found["pays_from"]
    pays = "never pays with K = 4" if edge is None else f"pays from α = {edge:.2f} with K = 4"
    size = (
        f"{_amount(found['parameters'])} parameters on {_amount(found['tokens'])} tokens (C = 6ND, D = 20N)"
    )
    cost = f"a token of it costs {found['draft_cost']:.3f} of a pass and {pays}"
    budget = f"training a drafter with {found['flops']:.3g} FLOPs"
    return f"{budget}: {size}, about {found['hours']:.3g} hours here; {cost}"


def _amount(number: float) -> str:
    unit, size = next(((unit, size) for unit, size in UNITS if number >= size), ("", 1.0))
    return f"{number / size:.3g} {unit}"
