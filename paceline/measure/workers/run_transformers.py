"""transformers as a worker: `generate` as its users call it, plain and with prompt lookup. Runs in the peer's
environment. One request at a time: its assisted decoding has no batches. Steps and drafted tokens are counted
on the way into the model.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
import transformers

DRAFTED = 3


def load(options: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(options["threads"])
    chosen = {"dtype": torch.float32, "local_files_only": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(options["model"], **chosen).eval()
    # no end token: the length alone ends it
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    extra = {"prompt_lookup_num_tokens": DRAFTED} if options["method"] == "ngram" else {}
    widths: list[int] = []  # tokens of each pass

    def count(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        widths.append(int(ids.shape[1]))

    model.register_forward_pre_hook(count, with_kwargs=True)

    def answer(prompt: dict[str, Any]) -> dict[str, Any]:
        """One request. Times are in seconds from its start."""
        widths.clear()
        ids, times, started = torch.tensor([prompt["ids"]]), list[float](), time.perf_counter()
        # a streamer that notes when tokens come; the first call is the prompt
        clock = SimpleNamespace(put=lambda _: times.append(time.perf_counter() - started), end=lambda: None)
        limits = {"attention_mask": torch.ones_like(ids), "max_new_tokens": prompt["num_tokens"]}
        with torch.inference_mode():
            output = model.generate(ids, **limits, use_cache=True, streamer=clock, **extra)
        total = time.perf_counter() - started
        new = output[0, len(prompt["ids"]) :].tolist()
        drafted = sum(widths) - len(prompt["ids"]) - (len(widths) - 1)
        counts = {"num_steps": len(widths), "num_drafted": drafted, "num_accepted": len(new) - len(widths)}
        return {"ids": new, "num_tokens": len(new), "first_s": times[1], "total_s": total, **counts}

    return {"answer": answer}
