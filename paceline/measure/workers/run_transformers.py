"""transformers as a worker: `generate` as its users call it, plain and with prompt lookup. Runs in the peer's
environment.

One request at a time: its assisted decoding has no batches. Steps and drafted tokens are counted on the way
into the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

DRAFTED = 3


class Clock(BaseStreamer):
    """Notes when tokens come; the first call is the prompt."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.times: list[float] = []
        self.has_prompt = False

    def put(self, value: Any) -> None:
        if self.has_prompt:
            self.times.append(time.perf_counter() - self.started)
        self.has_prompt = True

    def end(self) -> None:
        pass


def load(options: dict[str, Any]) -> dict[str, Callable[..., dict[str, Any]]]:
    torch.set_num_threads(options["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=torch.float32, local_files_only=True
    ).eval()
    # no end token: the length alone ends it
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    extra = {"prompt_lookup_num_tokens": DRAFTED} if options["method"] == "ngram" else {}
    widths: list[int] = []  # tokens of each pass
    model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(_width(args, kwargs)), with_kwargs=True
    )

    def generate(prompts: list[dict[str, Any]], in_flight: int) -> dict[str, Any]:
        assert in_flight == 1, "assisted decoding has no batches"
        started = time.perf_counter()
        answers = [_answer(model, prompt, widths, extra) for prompt in prompts]
        return {"wall_s": time.perf_counter() - started, "answers": answers}

    return {"generate": generate}


def _width(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
    return int(ids.shape[1])


def _answer(model: Any, prompt: dict[str, Any], widths: list[int], extra: dict[str, Any]) -> dict[str, Any]:
    """One request. Times are in seconds from its start."""
    widths.clear()
    ids = torch.tensor([prompt["ids"]])
    clock = Clock()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=prompt["num_tokens"],
            use_cache=True,
            streamer=clock,
            **extra,
        )
    total = time.perf_counter() - clock.started
    new = output[0, len(prompt["ids"]) :].tolist()
    prompt_width = len(prompt["ids"])
    drafted = sum(width - (prompt_width if i == 0 else 1) for i, width in enumerate(widths))
    return {
        "ids": new,
        "num_tokens": len(new),
        "first_s": clock.times[0],
        "total_s": total,
        "num_steps": len(widths),
        "num_drafted": drafted,
        "num_accepted": len(new) - len(widths),
    }
