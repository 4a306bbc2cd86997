"""/metrics: vLLM's names under the prefix `paceline:`, and what an operator needs of the server itself.

Invariant: counters only grow, also over restarts of the engine: what an engine reports is counted as the
difference to its last report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.process_collector import ProcessCollector

from paceline.server.calls import Call

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
    "prefix_cache_queries": ("Tokens looked up in the prefix cache.", ()),
    "prefix_cache_hits": ("Of them, those found.", ()),
    "spec_decode_num_drafts": ("Steps of a request that checked a draft.", ()),
    "spec_decode_num_draft_tokens": ("Drafted tokens that were checked.", ()),
    "spec_decode_num_accepted_tokens": ("Of them, those accepted.", ()),
    "spec_decode_num_accepted_tokens_per_pos": ("Accepted tokens by place in the draft.", ("position",)),
    "spec_decode_num_draft_tokens_by_drafter": ("Drafted tokens by drafter.", ("drafter",)),
    "spec_decode_num_accepted_tokens_by_drafter": ("Accepted tokens by drafter.", ("drafter",)),
    "spec_decode_num_accepted_tokens_per_pos_by_drafter": (
        "Accepted tokens by drafter and place.",
        ("drafter", "position"),
    ),
    "http_requests": ("Requests by route and status.", ("route", "status")),
    "requests_rejected": ("Requests that were turned away, by the error's code.", ("reason",)),
    "client_disconnects": ("Clients that left before their answer was complete.", ()),
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
}


class Metrics:
    def __init__(self, model_name: str) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._model = model_name
        self._histograms = {
            n: Histogram(f"paceline:{n}", h, ["model_name"], buckets=b, registry=self.registry)
            for n, (h, b) in HISTOGRAMS.items()
        }
        self._counters = {
            n: Counter(f"paceline:{n}", h, ["model_name", *ls], registry=self.registry)
            for n, (h, ls) in COUNTERS.items()
        }
        self._gauges = {
            n: Gauge(f"paceline:{n}", h, ["model_name"], registry=self.registry) for n, h in GAUGES.items()
        }
        self._last: dict[tuple[str, ...], float] = {}  # what the engine last reported
        self._bound: dict[str, Any] = {}
        for name in (*HISTOGRAMS, *GAUGES, *(n for n, (_, labels) in COUNTERS.items() if not labels)):
            family: Any = self._histograms.get(name) or self._gauges.get(name) or self._counters.get(name)
            self._bound[name] = family.labels(model_name)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        bound = self._counters[name].labels(model_name=self._model, **labels) if labels else self._bound[name]
        bound.inc(amount)

    def observe(self, name: str, value: float) -> None:
        self._bound[name].observe(value)

    def gauge(self, name: str, value: float) -> None:
        self._bound[name].set(value)

    def engine_up(self, is_up: bool, seconds: float | None = None) -> None:
        self.gauge("engine_up", is_up)
        if seconds is not None:
            self.gauge("engine_start_seconds", seconds)
        if not is_up:  # the next one counts from zero, and holds nothing
            self._last.clear()
            for name in ("requests_running", "requests_waiting"):
                self.gauge(f"num_{name}", 0)
            for name in ("usage_perc", "blocks_used"):
                self.gauge(f"kv_cache_{name}", 0)

    def heard(self, call: Call, said: Mapping[str, Any]) -> None:
        """A choice said something; called before the call itself hears it."""
        now, count = time.monotonic(), said["n"]
        if call.first_at is None:
            self.observe("time_to_first_token_seconds", now - call.arrived)
        elif count:
            self.observe("inter_token_latency_seconds", (now - call.last_at) / count)
        self.count("generation_tokens", count)
        if "end" in said:
            self._ended(call, said, now)

    def _ended(self, call: Call, said: Mapping[str, Any], now: float) -> None:
        usage = said["usage"]
        num_tokens, prefill, decode = usage["completion_tokens"], usage["prefill_s"], usage["decode_s"]
        self.count("request_success", finished_reason=said["end"])
        if said["i"] == 0:
            self.count("prompt_tokens", usage["prompt_tokens"])
            self.observe("request_prompt_tokens", usage["prompt_tokens"])
        self.observe("request_generation_tokens", num_tokens)
        self.observe("e2e_request_latency_seconds", now - call.arrived)
        self.observe("request_queue_time_seconds", usage["queue_s"])
        self.observe("request_prefill_time_seconds", prefill)
        self.observe("request_decode_time_seconds", decode)
        self.observe("request_inference_time_seconds", prefill + decode)
        if num_tokens > 1:
            self.observe("request_time_per_output_token_seconds", decode / (num_tokens - 1))

    def step(self, message: Mapping[str, Any]) -> None:
        if message.get("said"):
            self.observe("iteration_tokens_total", sum(said["n"] for said in message["said"]))
        if "figures" in message:
            self._report(message["figures"])

    def _report(self, figures: Mapping[str, Any]) -> None:
        self.gauge("num_requests_running", figures["num_running"])
        self.gauge("num_requests_waiting", figures["num_waiting"])
        self.gauge("kv_cache_usage_perc", figures["blocks_used"] / figures["blocks_total"])
        self.gauge("kv_cache_blocks_used", figures["blocks_used"])
        self.gauge("kv_cache_blocks_total", figures["blocks_total"])
        self._grow("num_preemptions", figures["num_preemptions"])
        self._grow("prefix_cache_queries", figures["prefix_queries"])
        self._grow("prefix_cache_hits", figures["prefix_hits"])
        stats, prefix = figures["stats"], "spec_decode_num"
        self._grow(f"{prefix}_drafts", sum(n for length, n in stats["lengths"].items() if length != "0"))
        self._grow(f"{prefix}_draft_tokens", stats["num_drafted"])
        self._grow(f"{prefix}_accepted_tokens", stats["num_accepted"])
        for place, count in enumerate(stats["accepted_at"]):
            self._grow(f"{prefix}_accepted_tokens_per_pos", count, position=str(place))
        for name, each in stats["by_source"].items():
            self._grow(f"{prefix}_draft_tokens_by_drafter", each["num_drafted"], drafter=name)
            self._grow(f"{prefix}_accepted_tokens_by_drafter", each["num_accepted"], drafter=name)
            for place, count in enumerate(each["accepted_at"]):
                labels = {"drafter": name, "position": str(place)}
                self._grow(f"{prefix}_accepted_tokens_per_pos_by_drafter", count, **labels)

    def _grow(self, name: str, total: float, **labels: str) -> None:
        key = (name, *labels.values())
        new = total - self._last.get(key, 0)
        if new or key not in self._last:
            self.count(name, new, **labels)
        self._last[key] = total
