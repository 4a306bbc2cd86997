"""`paceline bench quality`: perplexity of precisions on a text. It is cut into contexts of CONTEXT tokens;
within one, every token after the first is predicted from all before it. Invariant: every precision reads the
same tokens in the same contexts, so that only the weights differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.types import BLOCK_SIZE, Cached, Segment
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.tokenizer import Tokenizer
from paceline.measure.options import Quality
from paceline.measure.prompts import text_of
from paceline.measure.results import Table, Tell, table_of
from paceline.measure.rows import DTYPES, names_of
from paceline.runtime.backend import backend_for
from paceline.runtime.executor import LocalExecutor

CONTEXT = 512
CHUNK = 128  # tokens of a pass: logits of a whole context would take much memory
SHIPPED = Path(__file__).parent.parent / "data" / "perplexity.txt"
BASELINE, CPU = "float32", torch.device("cpu")
FIGURES = {"perplexity": "{perplexity:.3f}", "change": "{change:+.2%}", "tokens": "{tokens}"}
LEGEND = "change: against float32 of the same file, which is itself quantized where the file is.\n"


class Run:
    num_turns = None  # not known before the text is read

    def __init__(self, asked: Quality) -> None:
        self.model, self.dtypes = asked.model, names_of("--dtypes", asked.dtypes, DTYPES)
        self.text = text_of(SHIPPED if asked.text is None else asked.text, "give a text file")

    def report(self, tell: Tell) -> dict[str, Any]:
        """A record for each precision, with its change against float32 where that is among them."""
        checkpoint = open_checkpoint(self.model)
        tokenizer = Tokenizer(checkpoint.tokenizer_source())
        bos = checkpoint.bos_id if tokenizer.encode("a")[:1] == [checkpoint.bos_id] else None
        size = min(CONTEXT, checkpoint.config.max_context)
        pieces = contexts_of(tokenizer.encode(self.text, add_special=False), bos, size)
        if not pieces:
            raise ConfigError("--text holds fewer than two tokens, which predict nothing; give a longer text")
        records, blocks, backend = [], -(-size // BLOCK_SIZE), backend_for(CPU, "exact", False)
        for dtype in self.dtypes:
            tell(f"loading {dtype}", 0)
            executor = LocalExecutor.load(backend, checkpoint, blocks, dtype=dtype, context=size)
            total = 0.0
            for piece in pieces:
                total += negative_log_likelihood(executor, piece)
                tell(f"reading with {dtype}", 1)
            count = sum(len(piece) - 1 for piece in pieces)
            records.append({"dtype": dtype, "perplexity": round(math.exp(total / count), 5), "tokens": count})
        return {"context": size, "rows": compared(records)}


def contexts_of(ids: Sequence[int], bos: int | None, size: int) -> list[list[int]]:
    """Pieces of at most `size` tokens, each with the model's first token, where it has one."""
    start = [] if bos is None else [bos]
    step = size - len(start)
    pieces = [[*start, *ids[at : at + step]] for at in range(0, len(ids), step)]
    return [piece for piece in pieces if len(piece) > 1]  # one token predicts nothing


def negative_log_likelihood(executor: LocalExecutor, tokens: Sequence[int]) -> float:
    """The sum of -log p over the tokens after the first."""
    cache, total = Cached(), 0.0
    assert executor.kv.reserve(cache, len(tokens)), "the caller made room for a context"
    for at in range(0, len(tokens) - 1, CHUNK):
        seen = list(tokens[at : min(at + CHUNK, len(tokens) - 1)])
        logits = executor.forward([Segment(seen, cache, None, len(seen))]).logits  # [len(seen), vocab]
        targets = torch.tensor(tokens[at + 1 : at + 1 + len(seen)])
        total += float(torch.nn.functional.cross_entropy(logits.double(), targets, reduction="sum"))
        cache.num_cached += len(seen)
    executor.kv.free(cache)
    return total


def compared(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    base = next((each["perplexity"] for each in records if each["dtype"] == BASELINE), None)
    return [{**each, "change": base and round(each["perplexity"] / base - 1, 6)} for each in records]


def tables(report: dict[str, Any]) -> list[Table]:
    title = f"perplexity, contexts of {report['context']} tokens"
    return [table_of(title, ("dtype",), FIGURES, report["rows"])]
