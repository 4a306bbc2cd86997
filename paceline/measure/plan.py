"""`paceline plan`: what drafting could gain for a model on a machine, from its shape and the machine's limits
alone. Invariant: nothing is loaded, and the tables are made from the report.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.options import nearest, require
from paceline.loaders.checkpoint import describe
from paceline.measure import layout, roofline
from paceline.measure.options import Paper
from paceline.measure.results import Table, cell, table_of
from paceline.measure.roofline import HARDWARE, THIS, Deployment, Hardware, Link, training

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
KS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 1024
UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
PASSES = {"tokens": "{tokens}", "FLOP/byte": "{intensity:.1f}", "bound by": "{bound}", "ms": "{ms:.3g}"}
PASSES["t(n)/t(1)"] = "{relative:.2f}"


def report_of(asked: Paper) -> dict[str, Any]:
    for alpha in asked.alpha:
        require(0 <= alpha <= 1, "--alpha", alpha, "it is a chance, give a number from 0 to 1")
    for k in asked.k:
        require(1 <= k <= roofline.MOST_K, "-k", k, f"give a whole number from 1 to {roofline.MOST_K}")
    is_sane = asked.budget is None or 1e6 <= asked.budget <= 1e30
    require(is_sane, "--budget", asked.budget, "give FLOPs between 1e6 and 1e30, such as 1e18")
    machine, ks = _machine(asked), asked.k or KS
    name, config = describe(asked.model)
    drafter = describe(asked.draft) if asked.draft is not None else None
    most = min(config.max_context, drafter.config.max_context if drafter else config.max_context)
    context = min(CONTEXT, most) if asked.context is None else asked.context
    require(context <= most, "--context", context, f"the longest context here is {most}, give at most that")
    dtype = "int8" if machine.int8_flops is not None else "bfloat16"
    dtype = dtype if asked.dtype == "auto" else asked.dtype
    # integers come with integer activations alone
    floats = ["auto", *(name for name in roofline.KV_WIDTHS if name != "int8")]
    require(dtype in roofline.WIDTHS, "--dtype", dtype, nearest(dtype, ["auto", *roofline.WIDTHS]))
    require(asked.kv_dtype in floats, "--kv-dtype", asked.kv_dtype, nearest(asked.kv_dtype, floats))
    kept = machine.kv_dtype(dtype) if asked.kv_dtype == "auto" else asked.kv_dtype
    target = Deployment(config, machine, dtype, kept, asked.batch, context)
    draft = replace(target, config=drafter.config) if drafter else None
    # of drafting one token, relative to a pass of the target over one; looking text up costs nothing
    cost = draft.seconds(1) / target.seconds(1) if draft is not None else 0.0
    edges = [roofline.break_even_alpha(k, cost, target.relative(k + 1)) for k in ks]
    limits = {"bandwidth": machine.bandwidth, "flops": machine.product_flops(target.dtype)}
    limits |= {"memory": machine.memory, "ridge": machine.ridge(target.dtype)}
    return {
        "model": {"name": name, **_model(target)},
        "draft": {"name": drafter.name, **_model(draft)} if drafter and draft else None,
        "hardware": {"name": machine.name, **limits},
        "batch": target.batch,
        "context": context,
        "passes": [_pass(target, n) for n in ROWS],
        "free_tokens": max(target.free_rows - 1, 0),
        "draft_cost": cost,
        "speedups": [_speedups(target, cost, alpha, ks) for alpha in asked.alpha or ALPHAS],
        "break_even_alpha": dict(zip(ks, edges, strict=True)),
        "memory": _memory(target, draft),
        "training": training(asked.budget, target) if asked.budget is not None else None,
        "layouts": layout.report_of(asked, target, draft) if _has_layouts(asked) else None,
    }


def _has_layouts(asked: Paper) -> bool:
    return any((asked.devices, asked.tensor_parallel_size, asked.pipeline_parallel_size))


def _machine(asked: Paper) -> Hardware:
    """The one that is named, or this one; the user's own figures, in GB/s, TFLOP/s and GB, replace its."""
    given = {"--bandwidth": asked.bandwidth, "--flops": asked.flops, "--memory": asked.memory}
    more = {"--link": asked.link, "--network": asked.network, "--measured": asked.measured}
    for option, value in (given | more).items():
        is_ok = value is None or 0 < value < 1e9
        require(is_ok, option, value, "give a positive number (GB/s, TFLOP/s, GB or ms)")
    missing = [option for option, value in given.items() if value is None]
    if asked.hardware is None and 0 < len(missing) < len(given):
        remedy = "give all of --bandwidth, --flops and --memory, or name --hardware as well"
        raise ConfigError(f"{', '.join(missing)} left out; {remedy}")
    name, known = asked.hardware or THIS, [*HARDWARE, THIS]
    remedy = f"{nearest(name, known)}, or give --bandwidth, --flops and --memory"
    require(name in known, "--hardware", name, remedy)
    if name == THIS and missing:
        from paceline.measure.limits import measure

        machine = measure()
    else:
        machine = HARDWARE.get(name, Hardware("given", 0, 0, 0, 0))
    if asked.bandwidth is not None:
        machine = replace(machine, bandwidth=asked.bandwidth * roofline.GB)
    if asked.flops is not None:
        flops = asked.flops * roofline.TERA
        machine = replace(machine, half_flops=flops, float_flops=flops, int8_flops=None)
    if asked.memory is not None:
        machine = replace(machine, memory=asked.memory * roofline.GB)
    if name == THIS and _has_layouts(asked):
        from paceline.measure.limits import measure_ranks

        machine = measure_ranks(machine)
    machine = replace(
        machine, link=_link(asked.link, machine.link), network=_link(asked.network, machine.network)
    )
    is_changed = asked.hardware is not None and len(missing) < len(given)
    return replace(machine, name=f"{machine.name}, changed") if is_changed else machine


def _link(given: float | None, known: Link | None) -> Link | None:
    """Of the user's speed, with a known one's latency."""
    return known if given is None else Link(given * roofline.GB, (known or roofline.PCIE_4).latency)


def _model(on: Deployment) -> dict[str, Any]:
    sizes = ("dtype", "kv_dtype", "weight_bytes", "bytes_read", "kv_bytes_per_token", "kv_bytes")
    sized = {name: getattr(on, name) for name in sizes}
    if (experts := on.config.experts) is not None:
        sized |= {"active_parameters": on.active_parameters, "experts": experts.count}
    return {"parameters": on.num_parameters, **sized, "tokens_per_second": on.batch / on.seconds(1)}


def _memory(target: Deployment, draft: Deployment | None) -> dict[str, Any]:
    """Bytes of both models and their K/V, and what fits."""
    models = {"target": target, **({"draft": draft} if draft is not None else {})}
    weights = {f"{name}_weights": each.weight_bytes for name, each in models.items()}
    kept = {f"{name}_kv": each.kv_bytes for name, each in models.items()}
    available, total = target.hardware.memory, sum(weights.values()) + sum(kept.values())
    each_kv = target.context * sum(each.kv_bytes_per_token for each in models.values())
    most = max(0, int((available - sum(weights.values())) / each_kv)) if target.context else None
    fits = {"total": total, "available": available, "fits": total <= available}
    return {**weights, **kept, **fits, "most_sequences": most}


def _pass(on: Deployment, num_rows: int) -> dict[str, Any]:
    work = on.work(num_rows)
    bound = "memory" if on.is_memory_bound(num_rows) else "arithmetic"
    times = {"ms": 1000 * on.seconds(num_rows), "relative": on.relative(num_rows)}
    counted = {"flops": work.flops, "bytes": work.num_bytes, "intensity": work.flops / work.num_bytes}
    woken = {"experts": on.woken(num_rows)} if on.config.experts is not None else {}
    return {"tokens": num_rows, **counted, "bound": bound, **times, **woken}


def _speedups(target: Deployment, cost: float, alpha: float, ks: tuple[int, ...]) -> dict[str, Any]:
    best = roofline.best_k(alpha, cost, target.relative, roofline.MOST_K)
    gains = {k: roofline.speedup(alpha, k, cost, target.relative(k + 1)) for k in {*ks, best}}
    by_k = {k: {"tokens": roofline.expected_tokens(alpha, k), "speedup": gains[k]} for k in ks}
    return {"alpha": alpha, "by_k": by_k, "best_k": best, "best_speedup": gains[best]}


def tables(report: dict[str, Any]) -> list[Table]:
    free, speed = report["free_tokens"], report["model"]["tokens_per_second"]
    slower, quicker = ("reading the weights", "multiplying") if free else ("multiplying", "reading already")
    notes = [
        f"Drafted tokens checked for free, a sequence: {free} ({slower} takes longer than {quicker}).",
        f"Plain decoding: at most {speed:,.1f} tokens/s.",
    ]
    columns, experts = PASSES, report["model"].get("experts")
    if experts is not None:
        columns = PASSES | {f"experts of {experts}": "{experts:.1f}"}
        notes[0] = "No drafted token is checked for free: each wakes experts of its own in every layer."
    passes = table_of("a pass of the target", (), columns, report["passes"])._replace(notes=notes)
    lines = []
    for model in filter(None, (report["model"], report["draft"])):
        weights = f"{model['dtype']} {_amount(model['weight_bytes'])}B"
        active = f" ({_amount(model['active_parameters'])} active)" if "experts" in model else ""
        held = f"{_amount(model['parameters'])} parameters{active}, {weights}"
        kept = f"K/V {_amount(model['kv_bytes_per_token'])}B a token ({model['kv_dtype']})"
        batch = f"{_amount(model['kv_bytes'])}B for {report['batch']} x {report['context']}"
        lines.append(f"{model['name']}: {held}, {kept}, {batch}")
    machine, memory = report["hardware"], report["memory"]
    limits = f"reads {_amount(machine['bandwidth'])}B/s, multiplies {_amount(machine['flops'])}FLOP/s"
    lines.append(f"{machine['name']}: {limits}, ridge at {machine['ridge']:.0f} FLOP a byte")
    fits, most = "fits" if memory["fits"] else "does not fit", memory["most_sequences"]
    room = "" if most is None else f"; at most {most:,} sequences of this context"
    lines.append(f"memory: {_amount(memory['total'])}B of {_amount(memory['available'])}B, {fits}{room}")
    made = [Table("", (), (), (), lines), passes, _gains(report)]
    if (found := report["layouts"]) is not None:
        made.append(layout.table(found, report["batch"], report["context"]))
    return made


def _gains(report: dict[str, Any]) -> Table:
    ks, edges = list(report["break_even_alpha"]), report["break_even_alpha"].values()
    rows = []
    for row in report["speedups"]:
        cells = [f"{row['by_k'][k]['speedup']:.2f}" for k in ks]
        rows.append((f"{row['alpha']:g}", *cells, str(row["best_k"]), f"{row['best_speedup']:.2f}"))
    rows.append(("pays from", *(cell(edge, "{:.2f}") for edge in edges), "", ""))
    notes = ["α: chance that a drafted token is accepted; E[tokens a pass] = (1 - α^(K+1)) / (1 - α)"]
    if (found := report["training"]) is not None:
        size = f"{_amount(found['parameters'])} parameters, {_amount(found['tokens'])} tokens"
        cost = f"a token of it costs {found['draft_cost']:.3f} of a pass"
        pays = f"K = 4 pays from α = {cell(found['pays_from'], '{:.2f}')}"
        spent = f"training with {found['flops']:.3g} FLOPs (C = 6ND, D = 20N)"
        notes.append(f"{spent}: {size}, {found['hours']:.3g} hours here; {cost}, {pays}")
    said = f"a drafted token costs {report['draft_cost']:.3f} of a pass"
    columns = (*(f"K={k}" for k in ks), "best K", "speedup")
    return Table(f"speedup over plain decoding; {said}", ("α",), columns, rows, notes)


def _amount(number: float) -> str:
    unit, size = next(((unit, size) for unit, size in UNITS if number >= size), ("", 1.0))
    return f"{number / size:.3g} {unit}"
