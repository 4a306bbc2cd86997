"""/metrics: vLLM's names under the prefix `paceline:`, and what an operator needs of the server itself.
Invariant: counters only grow, also over restarts of the engine: what an engine reports is counted as the
difference to its last report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import prometheus_client as prometheus

from paceline.server.calls import Call, added

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
LAG = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", SECONDS),
    "inter_token_latency_seconds": ("Between one message of tokens and the next, for each token.", SHORT),
    "request_time_per_output_token_seconds": ("Seconds after the first token, for each further one.", SHORT),
    "e2e_request_latency_seconds": ("From a request's arrival to its last token.", SECONDS),
    "request_queue_time_seconds": ("From the arrival at the engine to its first step.", SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", SECONDS),
    "request_inference_time_seconds": ("From the first step to the last token.", SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of an answer.", TOKENS),
    "iteration_tokens_total": ("Tokens said in one step of the engine.", TOKENS),
    "event_loop_lag_seconds": ("How late the HTTP process came to what was due.", LAG),
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_tokens": ("Tokens of all prompts.", ()),
    "generation_tokens": ("Tokens of all answers.", ()),
    "request_success": ("Answers that ended, by why.", ("finished_reason",)),
    "num_preemptions": ("Requests that gave their blocks back to be computed again.", ()),
    "num_recordings": ("CUDA graphs recorded and kernels loaded since the start: requests waited.", ()),
    "prefix_cache_queries": ("Tokens looked up in the prefix cache.", ()),
    "prefix_cache_hits": ("Of them, those found.", ()),
    "spec_decode_num_drafts": ("Steps of a request that checked a draft.", ()),
    "spec_decode_num_draft_tokens": ("Drafted tokens that were checked.", ()),
    "spec_decode_num_accepted_tokens": ("Of them, those accepted.", ()),
    "spec_decode_num_accepted_tokens_per_pos": ("Accepted tokens by place in the draft.", ("position",)),
    "spec_decode_num_draft_tokens_by_drafter": ("Drafted tokens by drafter.", ("drafter",)),
    "spec_decode_num_accepted_tokens_by_drafter": ("Accepted tokens by drafter.", ("drafter",)),
    "spec_decode_num_accepted_tokens_per_pos_by_drafter": ("By drafter and place.", ("drafter", "position")),
    "http_requests": ("Requests by route and status.", ("route", "status")),
    "requests_rejected": ("Requests that were turned away, by the error's code.", ("reason",)),
    "client_disconnects": ("Clients that left before their answer was complete.", ()),
    "handovers": ("Prompts whose K/V came from the prefill server.", ()),
    "handovers_failed": ("Prompts that were read here because it did not serve.", ()),
    "requests_retried": ("Requests that were sent to a second replica.", ()),
    "engine_restarts": ("Engines that were started because one died.", ()),
}
GAUGES = {
    "num_requests_running": "Answers being written.",
    "num_requests_waiting": "Answers waiting for their turn.",
    "kv_cache_usage_perc": "Used share of the KV cache, 0 to 1.",
    "kv_cache_blocks_used": "Blocks of the KV cache that belong to a request.",
    "kv_cache_blocks_total": "Blocks of the KV cache.",
    "engine_up": "1 while the engine can take requests.",
    "engine_start_seconds": "What the last start of the engine took.",
    "engine_pid": "The engine's process.",
    "replicas": "Replicas that answer, where this is their front.",
}
IN_USE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_cache_blocks_used")


class Metrics:
    def __init__(self, model_name: str) -> None:
        prometheus.disable_created_metrics()
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)
        self._model = model_name
        self._last: dict[tuple[str, ...], float] = {}  # what the engine last reported
        self._families: dict[str, Any] = {}
        for name, (text, buckets) in HISTOGRAMS.items():
            self._add(name, prometheus.Histogram, text, buckets=buckets)
        for name, (text, labels) in COUNTERS.items():
            self._add(name, prometheus.Counter, text, labels)
        for name, text in GAUGES.items():
            self._add(name, prometheus.Gauge, text)

    def _add(self, name: str, kind: Any, text: str, labels: tuple[str, ...] = (), **options: Any) -> None:
        names = ("model_name", *labels)
        made = self._families[name] = kind(f"paceline:{name}", text, names, registry=self.registry, **options)
        if not labels:
            made.labels(self._model)  # there from the start, with zero

    def text(self) -> bytes:
        return prometheus.generate_latest(self.registry)

    def count(self, name: str, amount: float = 1, *labels: str) -> None:
        self._families[name].labels(self._model, *labels).inc(amount)

    def observe(self, name: str, value: float) -> None:
        self._families[name].labels(self._model).observe(value)

    def gauge(self, name: str, value: float) -> None:
        self._families[name].labels(self._model).set(value)

    def engine_up(self, is_up: bool, start_seconds: float = 0.0) -> None:
        self.gauge("engine_up", is_up)
        if is_up:
            self.gauge("engine_start_seconds", start_seconds)
            return
        self._last.clear()  # the next one counts from zero, and holds nothing
        for name in IN_USE:
            self.gauge(name, 0)

    def heard(self, call: Call, said: Mapping[str, Any]) -> None:
        """A choice said something; called before the call itself hears it."""
        now, count = time.monotonic(), said["n"]
        if call.first_at is None:
            self.observe("time_to_first_token_seconds", now - call.arrived)
        elif count:
            self.observe("inter_token_latency_seconds", (now - call.last_at) / count)
        self.count("generation_tokens", count)
        if "end" not in said:
            return
        usage = said["usage"]
        num_tokens = usage["completion_tokens"]
        self.count("request_success", 1, said["end"])
        if said["i"] == 0:
            self.count("prompt_tokens", usage["prompt_tokens"])
            self.observe("request_prompt_tokens", usage["prompt_tokens"])
        self.observe("request_generation_tokens", num_tokens)
        self.observe("e2e_request_latency_seconds", now - call.arrived)
        for part in ("queue", "prefill", "decode"):
            self.observe(f"request_{part}_time_seconds", usage[f"{part}_s"])
        self.observe("request_inference_time_seconds", usage["prefill_s"] + usage["decode_s"])
        if num_tokens > 1:
            self.observe("request_time_per_output_token_seconds", usage["decode_s"] / (num_tokens - 1))

    def step(self, message: Mapping[str, Any]) -> None:
        """A message of a step: what it said, and now and then figures of the engine."""
        if message.get("said"):
            self.observe("iteration_tokens_total", sum(said["n"] for said in message["said"]))
        if "figures" not in message:
            return
        for name, value in message["figures"]["gauges"].items():
            self.gauge(name, value)
        for name, value in message["figures"]["counters"].items():
            self._grow(name, value)
        stats, prefix = added([message["figures"]["stats"]]), "spec_decode_num"
        self._grow(f"{prefix}_drafts", stats.num_drafts)
        counted: dict[str, Any] = {"": stats, **stats.by_source}  # in all, and by drafter
        for drafter, counts in counted.items():
            by, label = "_by_drafter" if drafter else "", [drafter] if drafter else []
            self._grow(f"{prefix}_draft_tokens{by}", counts.num_drafted, *label)
            self._grow(f"{prefix}_accepted_tokens{by}", counts.num_accepted, *label)
            for place, count in enumerate(counts.accepted_at):
                self._grow(f"{prefix}_accepted_tokens_per_pos{by}", count, *label, str(place))

    def _grow(self, name: str, total: float, *labels: str) -> None:
        key = (name, *labels)
        self.count(name, total - self._last.get(key, 0), *labels)
        self._last[key] = total
