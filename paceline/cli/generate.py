"""`paceline generate`: one prompt in, text out as it is made. With --json: one object with everything known
about it.
"""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass

import paceline
from paceline.cli import console, options, parsing
from paceline.cli.options import ENGINE, MAIN, Given, Sampling, group
from paceline.cli.streaming import as_prompt, completion_json, given_prompt, print_answer
from paceline.core.errors import ConfigError
from paceline.core.options import option, options_of


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Complete one prompt.

    Examples:

      paceline generate "Why is the sky blue?" --temperature 0 --method ngram

      echo "2 + 2 =" | paceline generate - --raw --max-tokens 8 --json

      paceline generate "Is water wet?" --choice yes --choice no
    """

    prompt: str = option(MISSING, MAIN, options.PROMPT_HELP, is_argument=True)
    engine: Given = group(ENGINE)
    sampling: Given = group(options_of(Sampling))
    system: str | None = option(None, MAIN, options.SYSTEM_HELP)
    raw: bool = option(False, MAIN, options.RAW_HELP)
    json: bool = option(False, MAIN, options.JSON_HELP)


def generate(asked: Generate) -> None:
    params, system = parsing.sampling_params(asked.sampling), asked.system
    engine = parsing.engine_options(asked.engine)
    if asked.raw and system is not None:
        what = f"--system is {system[:40]!r} but --raw leaves the chat template out"
        raise ConfigError(f"{what}; put it into the prompt")
    text = given_prompt(asked.prompt)
    with paceline.LLM(engine) as llm:
        prompt = as_prompt(llm, text, asked.raw, system)
        if params.n == 1:
            if print_answer(llm.stream(prompt, params), asked.json).is_interrupted:
                raise KeyboardInterrupt
            return
        started = time.perf_counter()
        outputs = llm.generate([prompt], params)[0].outputs
        seconds = time.perf_counter() - started
    screen = console.stdout()
    if asked.json:
        made = [completion_json(completion) for completion in outputs]
        console.write_json(screen, {**made[0], "timings": {"total_s": round(seconds, 4)}, "outputs": made})
        return
    for number, completion in enumerate(outputs, start=1):
        console.write(screen, f"[{number}]\n", style="dim")
        console.write(screen, completion.text + "\n")
