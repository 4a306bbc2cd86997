"""`paceline plan` for several devices: what tensor, pipeline and expert parallelism and replicas read, hold
and send, and which of them writes most tokens a second.

What is sent follows from how ranks share the work (docs/decisions/17): every matrix is split by its outputs
and its inputs are gathered, so a layer has four exchanges. Stages of a pipeline hand on the rows of the
residual stream, and the last gives logits back; with as many groups of requests as stages, all of them work
at once. Stages of one machine take turns with its cores instead.
Invariant: one device in one replica takes the time of the roofline and sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.options import require
from paceline.measure.options import Paper
from paceline.measure.results import Table, table_of
from paceline.measure.roofline import GB, MOST_K, Deployment, Link, expected_tokens
from paceline.models.shard import Shard

EXCHANGES = 4  # of a layer: what attention found, its output, the inner values of the MLP, its output
MOST_SHOWN, USUAL_ALPHA = 12, 0.7
LAYOUTS = {
    "weights, GB": "{weights:.3g}", "K/V, GB": "{kv:.3g}", "fits": "{fits}", "MB in node": "{node_mb:.3g}",
    "ms": "{node_ms:.2f}", "MB between": "{network_mb:.3g}", "ms ": "{network_ms:.2f}",
    "pass, ms": "{pass_ms:.2f}", "tokens/s": "{plain:,.0f}", "K": "{k}", "drafting": "{drafting:,.0f}",
}  # fmt: skip


class Layout(NamedTuple):
    tensor: int
    pipeline: int
    replicas: int
    is_by_expert: bool

    def __str__(self) -> str:
        parts = [(self.tensor, "EP" if self.is_by_expert else "TP"), (self.pipeline, "PP")]
        named = [f"{name} {size}" for size, name in parts if size > 1] or ["one device"]
        return " x ".join(named) + (f", {self.replicas} replicas" if self.replicas > 1 else "")


class Traffic(NamedTuple):
    """What a pass waits for, by link: bytes that a device gets, and seconds."""

    node_bytes: float = 0.0
    network_bytes: float = 0.0
    node_seconds: float = 0.0
    network_seconds: float = 0.0

    def plus(self, other: Traffic, times: float = 1.0) -> Traffic:
        return Traffic(*(a + times * b for a, b in zip(self, other, strict=True)))

    @property
    def seconds(self) -> float:
        return self.node_seconds + self.network_seconds


@dataclass
class Placed:
    """A model laid out over devices, of which `per_node` are in a node; neighbours have neighbouring ranks.
    reach: how many times longer passes take than the roofline says."""

    target: Deployment  # all requests, on one device
    layout: Layout
    per_node: int
    draft: Deployment | None = None  # whole, on rank 0
    reach: float = 1.0
    stages: list[Deployment] = field(init=False)

    def __post_init__(self) -> None:
        target, (tensor, pipeline, replicas, is_by_expert) = self.target, self.layout
        self.requests = math.ceil(target.batch / replicas)
        takes_turns = target.hardware.threads is not None  # stages of one machine have all its cores
        self.num_groups = 1 if takes_turns else min(pipeline, self.requests)  # under way in different stages
        group, count = math.ceil(self.requests / self.num_groups), target.config.num_layers
        active = min(replicas, target.batch) * tensor * self.num_groups
        share = pipeline if takes_turns else 1  # of the memory alone
        hardware = target.hardware.device(tensor * replicas * pipeline // share, active)
        hardware = replace(hardware, memory=hardware.memory / share)
        part = replace(target, hardware=hardware, batch=group, shard=Shard(tensor - 1, tensor, is_by_expert))
        cuts = [count * stage // pipeline for stage in range(pipeline + 1)]
        # the last rank's part is as large as any
        self.stages = [replace(part, layers=range(*ends)) for ends in pairwise(cuts)]
        if self.draft is not None:
            self.draft = replace(self.draft, hardware=hardware, batch=group)

    @property
    def _value_bytes(self) -> int:
        """Of a number that is exchanged: the residual stream's."""
        hardware, dtype = self.target.hardware, self.target.dtype
        return 4 if dtype == "float32" or hardware.int8_flops is not None else 2

    def _sent(self, size: float, is_far: bool) -> Traffic:
        """From one device to another."""
        link = self.target.hardware.network if is_far else self.target.hardware.link
        assert link is not None
        seconds = link.latency + size / link.bandwidth
        return Traffic(0, size, 0, seconds) if is_far else Traffic(size, 0, seconds, 0)

    def _gathered(self, width: float, exchanges: int) -> Traffic:
        """Bytes of which every rank of a stage computes a part and all get the whole."""
        size, near = self.layout.tensor, min(self.layout.tensor, self.per_node)
        if size == 1:
            return Traffic()
        hardware, far = self.target.hardware, size - near
        local, other = (near - 1) / size * width, far / size * width
        links = (hardware.link or Link(1, 0), hardware.network if far else Link(1, 0))
        inside, outside = (link or Link(1, 0) for link in links)
        waits = exchanges * (outside if far else inside).latency
        seconds = local / inside.bandwidth, other / outside.bandwidth
        return Traffic(local, other, seconds[0] + (0 if far else waits), seconds[1] + (waits if far else 0))

    def _within(self, stage: Deployment, rows: int) -> Traffic:
        """Among the ranks of a stage."""
        config, size = stage.config, self._value_bytes * rows
        total, layers = Traffic(), stage.layers
        assert layers is not None
        for layer in layers:
            width, experts = config.num_heads * config.head_dim + config.hidden_size, config.experts_of(layer)
            if experts is None:
                width += config.intermediate_size + config.hidden_size
            elif self.layout.is_by_expert:  # what each expert found, whole
                width += experts.shared_inner + experts.per_token * config.hidden_size
            else:
                width += experts.shared_inner + experts.per_token * experts.inner + config.hidden_size
            total = total.plus(self._gathered(width * size, EXCHANGES))
        if layers.stop == config.num_layers:
            total = total.plus(self._gathered(4 * config.vocab_size * rows, 1))
        return total

    def _after(self, number: int, rows: int) -> Traffic:
        """From a stage to the next; from the last to rank 0."""
        count, tensor, config = self.layout.pipeline, self.layout.tensor, self.target.config
        if count == 1:
            return Traffic()
        if number == count - 1:
            return self._sent(4 * config.vocab_size * rows, number * tensor // self.per_node > 0)
        far = number * tensor // self.per_node != (number + 1) * tensor // self.per_node
        return self._sent(self._value_bytes * config.hidden_size * rows, far)

    def _rows(self, num_rows: int) -> int:
        return num_rows * self.stages[0].batch

    def traffic(self, num_rows: int) -> Traffic:
        """That a pass of `num_rows` rows for each request waits for, on its way through the stages."""
        total, rows = Traffic(), self._rows(num_rows)
        for number, stage in enumerate(self.stages):
            total = total.plus(self._within(stage, rows)).plus(self._after(number, rows))
        return total

    def seconds(self, num_rows: int, drafted: int = 0) -> float:
        """Until every request has had a pass, and before it `drafted` tokens from the draft model."""
        rows = self._rows(num_rows)
        times = [self.reach * s.seconds(num_rows) + self._within(s, rows).seconds for s in self.stages]
        if self.draft is not None and drafted:
            times[0] += self.reach * drafted * self.draft.seconds(1)
        handing = sum(self._after(number, rows).seconds for number in range(len(times)))
        return max(self.num_groups * max(times), sum(times) + handing)

    def best_drafts(self, alpha: float) -> tuple[int, float]:
        """The length of draft that writes most, and tokens a second."""
        rates = {k: expected_tokens(alpha, k) / self.seconds(k + 1, k) for k in range(MOST_K + 1)}
        best = max(rates, key=lambda k: (rates[k], -k))
        return best, self.target.batch * rates[best]

    def report(self, alpha: float) -> dict[str, Any]:
        tokens = self.requests * self.target.context
        held = [[stage.weight_bytes, tokens * stage.kv_bytes_per_token] for stage in self.stages]
        if self.draft is not None:
            held[0][0] += self.draft.weight_bytes
            held[0][1] += tokens * self.draft.kv_bytes_per_token
        fullest, sent, seconds = max(held, key=sum), self.traffic(1), self.seconds(1)
        k, drafting = self.best_drafts(alpha)
        figures = {
            "weights": fullest[0] / GB,
            "kv": fullest[1] / GB,
            "stages_gb": [sum(s) / GB for s in held],
        }
        figures["fits"] = "yes" if sum(fullest) <= self.stages[0].hardware.memory else "no"
        figures |= {"node_mb": sent.node_bytes / 1e6, "node_ms": sent.node_seconds * 1e3}
        figures |= {"network_mb": sent.network_bytes / 1e6, "network_ms": sent.network_seconds * 1e3}
        figures |= {"pass_ms": seconds * 1e3, "plain": self.target.batch / seconds, "k": k}
        return {"layout": str(self.layout), **self.layout._asdict(), **figures, "drafting": drafting}


def layouts(asked: Paper, target: Deployment) -> Iterator[Layout]:
    """All that use the devices and what was asked for."""
    config, devices = target.config, num_devices(asked)
    for tensor in [asked.tensor_parallel_size] if asked.tensor_parallel_size else range(1, devices + 1):
        for pipeline in (
            [asked.pipeline_parallel_size] if asked.pipeline_parallel_size else range(1, devices + 1)
        ):
            if devices % (tensor * pipeline) or pipeline > config.num_layers:
                continue
            kinds = {asked.enable_expert_parallel or False, tensor > 1 and config.experts is not None}
            for is_by_expert in sorted(kinds if not asked.enable_expert_parallel else {True}):
                with suppress(ConfigError):
                    if tensor > 1:
                        Shard(0, tensor, is_by_expert).check(config)
                    yield Layout(
                        tensor, pipeline, devices // (tensor * pipeline), is_by_expert and tensor > 1
                    )


def num_devices(asked: Paper) -> int:
    return asked.devices or (asked.tensor_parallel_size or 1) * (asked.pipeline_parallel_size or 1)


def checked(asked: Paper, target: Deployment) -> None:
    """Refuse what cannot be laid out."""
    devices, config, machine = num_devices(asked), target.config, target.hardware
    tensor, pipeline = asked.tensor_parallel_size or 1, asked.pipeline_parallel_size or 1
    whole = f"{devices} devices are not a whole number of times {tensor} x {pipeline}"
    require(devices % (tensor * pipeline) == 0, "--devices", devices, whole)
    require(devices % asked.nodes == 0, "--nodes", asked.nodes, f"each has as many of the {devices} devices")
    remedy = f"the model has {config.num_layers} layers, use at most that many stages"
    require(pipeline <= config.num_layers, "--pipeline-parallel-size", pipeline, remedy)
    if tensor > 1 or asked.enable_expert_parallel:
        Shard(0, tensor, asked.enable_expert_parallel).check(config)
    if machine.threads is not None:
        most = f"this machine has {machine.threads} cores, each at most a device"
        require(devices <= machine.threads and asked.nodes == 1, "--devices", devices, most)
    alone = devices == asked.nodes
    require(alone or machine.link is not None, "--link", None, "give GB/s between devices of a node")
    has_network = asked.nodes == 1 or machine.network is not None
    require(has_network, "--network", None, "give GB/s between nodes")


def report_of(asked: Paper, target: Deployment, draft: Deployment | None) -> dict[str, Any]:
    """Every layout of the devices, the quickest that fits first."""
    checked(asked, target)
    devices, alpha = num_devices(asked), (asked.alpha or (USUAL_ALPHA,))[0]
    per_node, reach = devices // asked.nodes, 1.0
    if asked.measured is not None:
        one = replace(target, hardware=target.hardware.device(devices, 1), batch=1)
        reach = asked.measured / 1e3 / one.seconds(1)
        require(
            0.5 <= reach <= 100, "--measured", asked.measured, f"the roofline says {1e3 * one.seconds(1):.3g}"
        )
    each = [Placed(target, layout, per_node, draft, reach) for layout in layouts(asked, target)]
    rows = [placed.report(alpha) for placed in each]
    rows.sort(key=lambda row: (row["fits"] != "yes", -row["drafting"], -row["plain"]))
    named = {"devices": devices, "nodes": asked.nodes, "alpha": alpha, "reach": reach}
    links = {"link": target.hardware.link, "network": target.hardware.network}
    sizes = {name: link and link.bandwidth for name, link in links.items()}
    return {**named, **sizes, "rows": rows}


def table(found: dict[str, Any], batch: int, context: int) -> Table:
    """Predictions: nothing of it was measured but what --measured gave."""
    nodes = f" in {found['nodes']} nodes" if found["nodes"] > 1 else ""
    title = f"predicted for {found['devices']} devices{nodes}: {batch} requests of {context} tokens"
    shown = table_of(title, ("layout",), LAYOUTS, found["rows"][:MOST_SHOWN])
    fitting = [row for row in found["rows"] if row["fits"] == "yes"]
    best = (
        f"Best: {fitting[0]['layout']}."
        if fitting
        else "No layout fits: more devices, or fewer bits a weight."
    )
    notes = [
        best,
        "Weights and K/V: of the fullest device. MB and ms: what a pass of one row for each request",
    ]
    notes.append(f"waits for, by link. drafting: with the best K where α is {found['alpha']:g}.")
    if found["reach"] != 1:
        notes.append(f"Passes take {found['reach']:.2f} times as long as the roofline says, as was measured.")
    return shown._replace(notes=notes)
