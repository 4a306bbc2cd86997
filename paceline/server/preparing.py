"""From what a client wrote to engine requests: chat templates, tokens, limits and grammars. Runs in the
engine process, beside the steps. Invariant: what it refuses is refused before anything is queued, by a
PacelineError; it changes nothing that the engine reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.api.build import Built
from paceline.api.intake import Intake
from paceline.core.errors import RequestError
from paceline.core.options import brief
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.engine.engine import Engine
from paceline.server.grammar_check import GrammarChecker


class TooLong(RequestError):
    """A prompt that the context or a limit of the server does not hold."""


@dataclass(slots=True)
class Preparer:
    engine: Engine
    intake: Intake
    checker: GrammarChecker
    max_prompt_tokens: int | None
    max_completion_tokens: int | None

    def prepare(self, message: Mapping[str, Any]) -> Any:
        """For an `add` its requests, else the answer itself."""
        if message["do"] == "detokenize":
            tokens, known = message["tokens"], self.intake.vocab_size
            for token in tokens:
                if not 0 <= token < known:
                    raise RequestError(
                        f"tokens holds {brief(token)}; the model's ids go from 0 to {known - 1}"
                    )
            return {"prompt": self.intake.tokenizer.decode(tokens, skip_special=False)}
        try:
            tokens = self._tokens(message["prompt"])
        except RecursionError:
            raise RequestError("the messages are nested too deeply; flatten them") from None
        if message["do"] == "tokenize":
            return {"tokens": tokens, "count": len(tokens), "max_model_len": self.intake.max_model_len}
        return self._requests(tokens, message)

    def _tokens(self, prompt: Mapping[str, Any]) -> list[int]:
        if "tokens" in prompt:
            return list(prompt["tokens"])
        if "text" in prompt:
            return self.intake.tokenizer.encode(prompt["text"], add_special=prompt.get("add_special", True))
        options = {name: prompt[name] for name in ("add_generation_prompt", "tools")}
        return self.intake.tokenizer.encode_chat(prompt["messages"], **options, **prompt["template_options"])

    def _requests(self, tokens: list[int], message: Mapping[str, Any]) -> list[Request]:
        context, limit, count = self.intake.max_model_len, self.max_prompt_tokens, len(tokens)
        if limit is not None and count > limit:
            raise TooLong(f"the prompt has {count:,} tokens; this server takes at most {limit:,}")
        if count >= context:
            what = f"the prompt has {count:,} tokens and the context holds {context:,}"
            raise TooLong(f"{what}; shorten it to at most {context - 1:,}")
        room = context - count
        options = {"max_tokens": min(room, self.max_completion_tokens or room), **message["params"]}
        if "logit_bias" in options:  # JSON has no whole numbers for keys
            options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
        params = SamplingParams(**options)
        if params.structured_outputs is not None:
            self.checker.check(options["structured_outputs"])
        requests = self.intake.requests(tokens, params, message.get("priority", 0))
        self.engine.check_fits(requests[0])
        return requests


def description(built: Built, config: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """What the HTTP side must know of the model and the drafters. config: the speculative_config."""
    engine, selectable = built.engine, built.engine.policy.drafters
    template = built.checkpoint.tokenizer_source().chat_template
    method = config.get("method", "draft_model") if isinstance(config, Mapping) else config or "off"
    return {
        "max_model_len": engine.config.max_model_len,
        "max_num_seqs": engine.config.max_num_seqs,
        "num_blocks": engine.executor.kv.num_blocks,
        "has_template": template is not None,
        "has_tools": template is not None and "tools" in template,
        "speculative": {
            "method": "hybrid" if isinstance(method, list) else method,
            "drafters": [each.name for one in selectable for each in (one, *getattr(one, "drafters", ()))],
            "selectable": [drafter.name for drafter in selectable],
            "num_speculative_tokens": engine.config.num_speculative_tokens,
            "is_pinned": isinstance(config, Mapping) and "num_speculative_tokens" in config,
        },
    }
