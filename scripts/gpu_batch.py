"""Tokens a second of many requests at once on a GPU, beside what memory and arithmetic would allow, and what
exact mode costs.

    python scripts/gpu_batch.py --model llama-8b --load-format dummy
    python scripts/gpu_batch.py --model default --methods off,auto,ngram,early_exit --exact

Every request has a prompt of its own and writes as many tokens as the others; the prompt's reading is not
counted. Bandwidth and arithmetic are measured in the same run: a copy of 4 GB and a product of two large
matrices. Invariant: each row was warmed up with its own shape.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline import LLM, SamplingParams
from paceline.runtime.kv_cache import bytes_per_token

PROMPT, ANSWER = 256, 128


def best_seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def limits_of_device() -> tuple[float, float]:
    """Bytes a second that a copy reads and writes, operations a second of a bfloat16 product."""
    a, b = (torch.empty(2**31, dtype=torch.uint8, device="cuda") for _ in range(2))
    bandwidth = 2 * a.numel() / best_seconds(lambda: [b.copy_(a) for _ in range(5)]) * 5
    square = torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16)
    flops = 2 * 8192**3 * 10 / best_seconds(lambda: [square @ square for _ in range(10)])
    return bandwidth, flops


def floors_ms(llm: LLM, batch: int, bandwidth: float, flops: float) -> tuple[float, float]:
    """Of a plain step at the middle of the answers: bytes of weights and cache, and operations of the
    products.
    """
    runner = llm.engine.runner
    kept = batch * (PROMPT + ANSWER / 2) * bytes_per_token(runner.config, runner.kv.kept)
    weights = sum(
        torch.Size(shape).numel()
        for name, shape in runner.config.weight_names().items()
        if "embed" not in name
    )
    weights += runner.config.vocab_size * runner.config.hidden_size * runner.config.tie_embeddings
    return 1000 * (runner.decoder.num_bytes + kept) / bandwidth, 1000 * 2 * weights * batch / flops


def texts_of(llm: LLM, batch: int) -> list[list[int]]:
    """Token ids that repeat themselves a little, as text does."""
    size = min(llm.checkpoint.config.vocab_size, 30_000)
    return [[(17 * i + (j * (7 + i)) % 61 * 13) % size for j in range(PROMPT)] for i in range(batch)]


def measure(llm: LLM, batch: int) -> dict[str, Any]:
    prompts, params = texts_of(llm, batch), SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    for _ in range(2):  # graphs are recorded, of every bucket that drafts may need
        llm.generate(prompts, params)
    requests = [request for prompt in prompts for request in llm._requests(prompt, params)]
    llm._add(requests)
    while any(request.num_output == 0 for request in requests):
        llm._pump()
    before, started, steps = sum(r.num_output for r in requests), time.perf_counter(), 0
    while not all(request.is_finished for request in requests):
        llm._pump()
        steps += 1
    seconds = time.perf_counter() - started
    written = sum(r.num_output for r in requests) - before
    for request in requests:
        llm._drop(request)
    return {"batch": batch, "tokens_per_s": round(written / seconds), "step_ms": round(1000 * seconds / steps, 3),
            "tokens_per_step": round(written / steps / batch, 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--methods", default="off", help="drafters, separated by commas; off is plain decoding"
    )
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--exact", action="store_true", help="also in exact mode")
    asked = parser.parse_args()
    bandwidth, flops = limits_of_device()
    print(f"{bandwidth / 1e12:.2f} TB/s, {flops / 1e12:.0f} Tflop/s", flush=True)
    batches = [int(count) for count in asked.batches.split(",")]
    for exact in (False, True) if asked.exact else (False,):
        for method in asked.methods.split(","):
            config = method if method in ("off", "auto") else {"method": method}
            with LLM(
                asked.model, load_format=asked.load_format, dtype=asked.dtype, device="cuda", exact=exact, speculative_config=config,
                max_num_seqs=max(batches), max_num_batched_tokens=2048, max_model_len=PROMPT + ANSWER + 64, progress=False,
            ) as llm:  # fmt: skip
                for batch in batches:
                    bytes_ms, flops_ms = floors_ms(llm, batch, bandwidth, flops)
                    record = {
                        "model": asked.model,
                        "dtype": asked.dtype,
                        "exact": exact,
                        "method": method,
                        **measure(llm, batch),
                    }
                    print(
                        json.dumps(
                            record
                            | {"bytes_floor_ms": round(bytes_ms, 3), "flops_floor_ms": round(flops_ms, 3)}
                        ),
                        flush=True,
                    )


if __name__ == "__main__":
    main()
