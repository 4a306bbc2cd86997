"""The API as a user meets it: text in, text out, on a tiny model with a real tokenizer."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import (
    LLM,
    ConfigError,
    EngineOptions,
    GrammarError,
    ModelError,
    ModelFileError,
    ModelNotFound,
    PacelineError,
    RequestError,
    SamplingParams,
    StructuredOutputs,
)
from tests.make_models import tiny_hf, tiny_tokenizer

PROMPT = "In a paceline, cyclists ride one behind the other. In a paceline,"
METHODS: dict[str, dict[str, Any] | str | None] = {
    "plain": None,
    "auto": "auto",
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
    "early_exit": {"method": "early_exit", "num_layers": 1, "num_speculative_tokens": 3},
    "quantized": {"method": "quantized", "bits": 8, "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
}


@pytest.fixture(scope="module")
def llms(tiny_folder: Path) -> dict[str, LLM]:
    made = {}
    for name, config in METHODS.items():
        options = (
            {**config, "model": str(tiny_folder)}
            if name == "draft_model" and isinstance(config, dict)
            else config
        )
        made[name] = LLM(str(tiny_folder), speculative_config=options, progress=False)
    return made


def all_texts(llms: dict[str, LLM], params: SamplingParams, prompt: Any = PROMPT) -> dict[str, Any]:
    results = {name: llm.generate(prompt, params)[0] for name, llm in llms.items()}
    for llm in llms.values():
        llm.engine.check()
        assert llm.engine.executor.kv.num_used == 0
    return results


def only(results: dict[str, Any]) -> Any:
    """The one answer all methods gave."""
    first = results["plain"]
    for name, result in results.items():
        assert [(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in result.outputs] == [
            (o.token_ids, o.text, o.finish_reason, o.logprobs) for o in first.outputs
        ], name
    return first


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_all_methods_say_the_same(llms: dict[str, LLM], temperature: float) -> None:
    results = all_texts(
        llms, SamplingParams(temperature=temperature, seed=4, max_tokens=40, logprobs=2, ignore_eos=True)
    )
    answer = only(results)
    assert len(answer.token_ids) == 40
    assert answer.finish_reason == "length"
    assert results["draft_model"].stats.alpha == 1.0
    assert results["draft_model"].stats.tau > 4


def test_n_completions_differ_and_the_first_is_that_of_n_1(llms: dict[str, LLM]) -> None:
    many = only(all_texts(llms, SamplingParams(n=4, seed=9, max_tokens=16, ignore_eos=True)))
    one = llms["plain"].generate(PROMPT, SamplingParams(seed=9, max_tokens=16, ignore_eos=True))[0]
    assert many.outputs[0].token_ids == one.token_ids
    assert len({tuple(o.token_ids) for o in many.outputs}) == 4


def test_stop_strings_end_the_text_inside_an_accepted_draft(llms: dict[str, LLM]) -> None:
    free = llms["plain"].generate(
        PROMPT, SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True)
    )[0]
    ends_inside_a_draft = 0
    for start in range(4, 40, 3):
        stop = free.text[start : start + 3]
        results = all_texts(
            llms, SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True, stop=stop)
        )
        answer = only(results)
        assert answer.finish_reason == "stop"
        assert answer.text == free.text[: free.text.index(stop)]
        assert free.token_ids[: len(answer.token_ids)] == answer.token_ids
        stats = results["draft_model"].stats
        ends_inside_a_draft += stats.num_own < stats.num_steps
        kept = llms["ngram"].generate(
            PROMPT,
            SamplingParams(
                temperature=0.8,
                seed=1,
                max_tokens=60,
                ignore_eos=True,
                stop=stop,
                include_stop_str_in_output=True,
            ),
        )
        assert kept[0].text == answer.text + stop
    assert ends_inside_a_draft > 0


def test_stop_ids_bad_words_and_min_tokens(llms: dict[str, LLM]) -> None:
    free = only(all_texts(llms, SamplingParams(temperature=0.9, seed=2, max_tokens=30, ignore_eos=True)))
    token = free.token_ids[7]
    first = free.token_ids.index(token)
    stopped = only(
        all_texts(
            llms,
            SamplingParams(temperature=0.9, seed=2, max_tokens=30, ignore_eos=True, stop_token_ids=[token]),
        )
    )
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    later = only(
        all_texts(
            llms,
            SamplingParams(
                temperature=0.9, seed=2, max_tokens=30, ignore_eos=True, stop_token_ids=[token], min_tokens=12
            ),
        )
    )
    assert len(later.token_ids) >= 12
    assert token not in later.token_ids[:12]
    tokenizer = llms["plain"].tokenizer
    word = next(
        w
        for t in free.token_ids
        if (w := tokenizer.token_text(t)).isalpha() and tokenizer.encode(w, add_special=False) == [t]
    )
    clean = only(
        all_texts(
            llms, SamplingParams(temperature=0.9, seed=2, max_tokens=30, ignore_eos=True, bad_words=[word])
        )
    )
    assert tokenizer.encode(word, add_special=False)[0] in free.token_ids
    assert tokenizer.encode(word, add_special=False)[0] not in clean.token_ids


STRUCTURES = {
    "json": StructuredOutputs(
        json={
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
    "regex": StructuredOutputs(regex=r"[a-c]{3,6}-[0-9]{2}"),
    "choice": StructuredOutputs(choice=["the rider", "the line", "rest"]),
    "grammar": StructuredOutputs(grammar='start: pair ("," pair)? \npair: ("up" | "down") " " /[0-9]/'),
}


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_output_with_every_method(llms: dict[str, LLM], kind: str, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=400, structured_outputs=STRUCTURES[kind]
    )
    answer = only(all_texts(llms, params))
    assert answer.finish_reason == "stop"
    if kind == "json":
        value = json.loads(answer.text)
        assert isinstance(value["a"], int)
        assert value["b"] in ("x", "yy")
    elif kind == "regex":
        assert re.fullmatch(r"[a-c]{3,6}-[0-9]{2}", answer.text)
    elif kind == "choice":
        assert answer.text in ("the rider", "the line", "rest")
    else:
        assert re.fullmatch(r"(up|down) \d(,(up|down) \d)?", answer.text)


def test_thousands_of_choices(tiny: LLM) -> None:
    choices = [f"rider {i}" for i in range(3000)]
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=30, structured_outputs=StructuredOutputs(choice=choices)
    )
    assert tiny.generate(PROMPT, params)[0].text in choices


def test_more_logprobs_than_tokens(tiny: LLM) -> None:
    (entry,) = tiny.generate(PROMPT, SamplingParams(max_tokens=1, logprobs=1000))[0].outputs[0].logprobs or []
    assert len(entry) == tiny.checkpoint.config.vocab_size


def test_threads_share_an_llm(tiny: LLM) -> None:
    """Streams and batches from several threads: everyone gets what it gets alone."""
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=25, ignore_eos=True) for i in range(8)]
    alone = [tiny.generate(PROMPT, p)[0].token_ids for p in params]

    def stream(p: SamplingParams) -> list[int]:
        return [t.id for c in tiny.stream(PROMPT, p) for t in c.tokens]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            streamed = list(pool.map(stream, params))
            batched = list(pool.map(lambda p: tiny.generate(PROMPT, p)[0].token_ids, params))
    finally:
        sys.setswitchinterval(before)
    assert streamed == batched == alone
    assert tiny.engine.executor.kv.num_used == 0


def test_a_model_of_nan_is_an_error_and_not_a_text(tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_hf(tmp_path, "llama")
    tiny_tokenizer(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    for temperature in (0.0, 1.0):
        with pytest.raises(ModelError, match="not finite"):
            LLM(str(tmp_path), progress=False).generate(
                "a", SamplingParams(temperature=temperature, max_tokens=2)
            )
    spoilt_draft = {
        "method": "draft_model",
        "model": str(tmp_path),
        "num_speculative_tokens": 2,
    }  # asked whether it pays or not
    llm = LLM(str(tiny_folder), speculative_config=spoilt_draft, progress=False)
    with pytest.raises(ModelError, match="not finite"):  # said aloud, not hidden by drafting nothing
        llm.generate("a b", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert llm.engine.executor.kv.num_used == 0


def test_unseeded_structured_output_ends_well(llms: dict[str, LLM]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, structured_outputs=STRUCTURES["regex"], n=6)
    for name, llm in llms.items():
        for output in llm.generate(PROMPT, params)[0].outputs:
            assert re.fullmatch(r"[a-c]{3,6}-[0-9]{2}", output.text), name


def test_a_stream_is_the_text_in_pieces(llms: dict[str, LLM]) -> None:
    params = SamplingParams(temperature=0.7, seed=6, max_tokens=30, ignore_eos=True)
    for name, llm in llms.items():
        chunks = list(llm.stream(PROMPT, params))
        whole = llm.generate(PROMPT, params)[0]
        assert "".join(c.text for c in chunks) == whole.text
        assert [t.id for c in chunks for t in c.tokens] == whole.token_ids
        assert chunks[-1].result is not None
        assert chunks[-1].result.text == whole.text
        sources = {t.source for c in chunks for t in c.tokens}
        assert sources <= {None, *(drafter.name for drafter in llm.engine.policy.drafters)}, name
        assert (
            sum(t.source is not None for c in chunks for t in c.tokens)
            == chunks[-1].result.stats.num_accepted
        )


def test_streams_may_be_interleaved_and_dropped(tiny: LLM) -> None:
    params = SamplingParams(temperature=0.7, seed=6, max_tokens=20, ignore_eos=True)
    one, two, three = (tiny.stream(PROMPT + " a" * i, params) for i in range(3))
    firsts = [next(one), next(two), next(three)]
    two.close()
    rest = [*one]
    assert firsts[0].text + "".join(c.text for c in rest) == tiny.generate(PROMPT, params)[0].text
    three.close()
    assert tiny.engine.executor.kv.num_used == 0
    assert not tiny.engine.has_work


def test_a_batch_gives_each_prompt_what_it_gets_alone(llms: dict[str, LLM]) -> None:
    prompts = [PROMPT[:n] for n in range(5, 60, 4)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=10 + i) for i in range(len(prompts))]
    for llm in llms.values():
        together = llm.generate(prompts, params)
        assert [r.token_ids for r in together] == [
            llm.generate(p, s)[0].token_ids for p, s in zip(prompts, params, strict=True)
        ]


@pytest.mark.parametrize("length", [17, 63, 100])
def test_a_context_need_not_be_whole_blocks(tiny_folder: Path, length: int) -> None:
    with LLM(str(tiny_folder), max_model_len=length, max_num_seqs=1, progress=False) as llm:
        (result,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1000, ignore_eos=True))
    assert len(result.token_ids) == length - 3


def test_closing_ends_what_is_running(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), progress=False)
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    kv = llm.engine.executor.kv
    llm.close()
    assert list(stream) == []
    assert kv.num_used == 0


def test_priorities_are_one_a_prompt(tiny: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    plain = [r.token_ids for r in tiny.generate(["a", "b c"], params)]
    assert [r.token_ids for r in tiny.generate(["a", "b c"], params, priority=[5, 1])] == plain
    with pytest.raises(ConfigError, match="priority is"):
        tiny.generate(["a", "b c"], params, priority=[5])


def test_chat_uses_the_template(tiny: LLM) -> None:
    messages = [{"role": "user", "content": "faster together?"}]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    answer = tiny.chat(messages, params)[0]
    assert (
        answer.token_ids
        == tiny.generate("<|im_start|>user\nfaster together?<|im_end|>\n<|im_start|>assistant\n", params)[
            0
        ].token_ids
    )
    assert [r.token_ids for r in tiny.chat([messages, messages], params)] == [answer.token_ids] * 2


def test_one_impossible_request_does_not_take_the_others_with_it(tiny: LLM) -> None:
    impossible = SamplingParams(
        max_tokens=5, allowed_token_ids=[40], bad_words=[tiny.tokenizer.token_text(40)]
    )
    results = tiny.generate(["a b", "a b"], [impossible, SamplingParams(max_tokens=5, ignore_eos=True)])
    assert results[0].finish_reason == "error"
    assert "relax" in str(results[0].outputs[0].error)
    assert len(results[1].token_ids) == 5
    with pytest.raises(GrammarError, match="leave no token"):
        tiny.generate("a b", impossible)


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": -3}, "max_tokens is -3"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"top_p": 0.0}, "top_p is 0.0"),
    ({"top_p": 1.1}, "top_p is 1.1"),
    ({"top_k": -2}, "top_k is -2"),
    ({"min_p": 2}, "min_p is 2"),
    ({"n": 0}, "n is 0"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"presence_penalty": 3}, "presence_penalty is 3"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9"),
    ({"stop": [""]}, "stop is"),
    ({"stop": "x\ud800"}, "valid Unicode"),
    ({"logit_bias": {3: float("inf")}}, "logit_bias holds inf"),
    ({"logit_bias": {"3": 1.0}}, "logit_bias holds '3'"),
    ({"allowed_token_ids": []}, "allowed_token_ids is ()"),
    ({"bad_words": "word"}, "bad_words is 'word'"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"structured_outputs": {"jsn": "{}"}}, "no option 'jsn'"),
    ({"structured_outputs": "x"}, "structured_outputs is 'x'"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex is 5"),
    ({"structured_outputs": {"choice": 5}}, "structured_outputs.choice is 5"),
    ({"temperature": 1e-310}, "temperature is 1e-310"),
    ({"temperature": 10**400}, "temperature is 1000"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty is 1e-40"),
    ({"stop": 5}, "stop is 5"),
    ({"bad_words": 5}, "bad_words is 5"),
    ({"stop_token_ids": 5}, "stop_token_ids is 5"),
    ({"allowed_token_ids": 3}, "allowed_token_ids is 3"),
    ({"logit_bias": {5: "x"}}, "logit_bias holds 'x'"),
    ({"logit_bias": [1, 2]}, "logit_bias is [1, 2]"),
    ({"ignore_eos": "no"}, "ignore_eos is 'no'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_PARAMS, ids=[m for _, m in BAD_PARAMS])
def test_bad_sampling_parameters_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SamplingParams(**options)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_ids_outside_the_vocabulary_are_named(tiny: LLM, field: str) -> None:
    value: Any = {999_999: 1.0} if field == "logit_bias" else [999_999]
    with pytest.raises(ConfigError, match=f"{field} holds token id 999999"):
        tiny.generate("a", SamplingParams(**{field: value}))


def test_bad_prompts_are_named(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        tiny.generate("")
    with pytest.raises(RequestError, match="no prompt"):
        tiny.generate([])
    with pytest.raises(RequestError, match="empty"):
        tiny.generate(["a", ""])
    with pytest.raises(RequestError, match="context holds 512"):
        tiny.generate("word " * 2000)
    with pytest.raises(ConfigError, match="prompt holds token id"):
        tiny.generate([[1, 2, 999_999]])
    for messages in ([], [{"role": "user", "content": ""}]):
        with pytest.raises(RequestError, match="conversation is empty"):
            tiny.chat(messages)
    with pytest.raises(ConfigError, match="sampling_params is"):
        tiny.stream("a", {"temperature": 0})  # type: ignore[arg-type]
    bad_calls: list[tuple[Any, ...]] = [
        (5,),
        (b"abc",),
        ([True],),
        ([None],),
        ("a", {"temperature": 0}),
        ("a", None, 3),
        (["a", "b"], None, ["x", 1]),
        (["a", "b"], None, [True, 1]),
    ]
    for prompts, *params in bad_calls:
        priority = params.pop() if len(params) == 2 else None
        with pytest.raises(PacelineError, match="give"):
            tiny.generate(prompts, *params, priority=priority)
    assert not tiny.engine.has_work


def test_token_ids_may_come_from_numpy(tiny: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    assert (
        tiny.generate(np.array([5, 6, 7]), params)[0].token_ids
        == tiny.generate([5, 6, 7], params)[0].token_ids
    )


BAD_GRAMMARS: list[tuple[dict[str, Any], type[PacelineError]]] = [
    ({"regex": "(unclosed"}, GrammarError),
    ({"json": '{"type": "nonsense"}'}, GrammarError),
    ({"json": "{not json"}, GrammarError),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 2}}, GrammarError),
    ({"grammar": "start: missing_rule"}, GrammarError),
    ({"choice": ["\ud800"]}, ConfigError),
    ({"choice": []}, ConfigError),
    ({}, ConfigError),
    ({"regex": "a", "choice": ["b"]}, ConfigError),
]


@pytest.mark.parametrize(("spec", "kind"), BAD_GRAMMARS, ids=[str(s) for s, _ in BAD_GRAMMARS])
def test_grammars_that_cannot_be_are_refused(
    tiny: LLM, spec: dict[str, Any], kind: type[PacelineError]
) -> None:
    with pytest.raises(kind):
        tiny.generate("a", SamplingParams(structured_outputs=StructuredOutputs(**spec)))


def test_prompts_may_be_mappings_as_in_vllm(tiny: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (expected,) = tiny.generate("ab", params)
    tokens = expected.prompt_token_ids
    forms: list[Any] = [
        {"prompt": "ab"},
        {"prompt_token_ids": tokens},
        {"prompt_token_ids": tokens, "prompt": "ab"},
    ]
    for form in forms:
        assert [r.token_ids for r in tiny.generate(form, params)] == [expected.token_ids]
        assert list(tiny.stream(form, params))[-1].result.token_ids == expected.token_ids  # type: ignore[union-attr]
    results = tiny.generate([*forms, "ab", tokens], params)
    assert [r.token_ids for r in results] == [expected.token_ids] * 5
    assert [r.prompt for r in results] == ["ab", None, "ab", "ab", None]


BAD_MAPPINGS: list[tuple[Any, str]] = [
    ({}, "give {'prompt': text} or {'prompt_token_ids': [...]}"),
    ({"text": "ab"}, "'text'"),
    ({"prompt": 3}, "the prompt is 3"),
    ({"prompt": ["a", "b"]}, "the prompt is"),
    ({"prompt_token_ids": "ab"}, "the prompt is 'ab'"),
    ({"prompt": "ab", "multi_modal_data": {}}, "'multi_modal_data'"),
    ([{"role": "user", "content": "ab"}], "chat"),
    (["ab", {"text": "ab"}], "'text'"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_MAPPINGS, ids=[str(p) for p, _ in BAD_MAPPINGS])
def test_other_mappings_are_refused(tiny: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        tiny.generate(prompt)


BAD_ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"speculative_config": {"method": "ngrm"}}, "did you mean 'ngram'"),
    ({"speculative_config": {"method": "ngram", "prompt_lookup_mx": 3}}, "did you mean 'prompt_lookup_max'"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "num_speculative_tokens is 0"),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 100}, "max_model_len": 64},
        "num_speculative_tokens is 100",
    ),
    ({"speculative_config": {"method": "early_exit", "num_layers": 9}}, "num_layers is 9"),
    ({"speculative_config": {"method": "quantized", "bits": 3}}, "bits is 3"),
    ({"speculative_config": {"method": "draft_model"}}, "name the draft model"),
    ({"speculative_config": "ngram"}, "give a dict"),
    ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ({"max_num_sequences": 4}, "LLM has no option 'max_num_sequences'; did you mean 'max_num_seqs'?"),
    ({"max_model_len": 10**9}, "max_model_len is 1000000000"),
    ({"kv_cache_memory": 100}, "kv_cache_memory is 100"),
    ({"kv_cache_memory": -1}, "kv_cache_memory is -1"),
    ({"kv_cache_memory": 1.5}, "kv_cache_memory is 1.5"),
    ({"kv_cache_memory": 2**16, "max_model_len": 512}, "the KV cache holds"),
    ({"kernels": "fast"}, "kernels"),
    ({"max_model_len": -100}, "max_model_len is -100"),
    ({"max_model_len": "x"}, "max_model_len is 'x'"),
    ({"kv_cache_memory": 10**15}, "bytes free"),
    ({"speculative_config": {"method": ["ngrm"]}}, "did you mean 'ngram'"),
    ({"speculative_config": "autp"}, "did you mean 'auto'"),
    ({"speculative_config": {"method": "auto", "num_speculative_tokens": 3}}, "beside method 'auto'"),
    ({"load_format": "dumy"}, "load_format is 'dumy'"),
    ({"kv_cache_dtype": "int7"}, "kv_cache_dtype is 'int7'"),
    ({"kv_cache_dtype": "int8", "dtype": "float32", "device": "cpu"}, "the weights are float32"),
]


@pytest.mark.parametrize(("options", "message"), BAD_ENGINES, ids=[m for _, m in BAD_ENGINES])
def test_bad_engine_options_are_named(tiny_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(str(tiny_folder), progress=False, **options)


def test_options_are_keywords_or_one_object(tiny_folder: Path) -> None:
    options = EngineOptions(model=str(tiny_folder), max_num_seqs=3, progress=False)
    with LLM(options, speculative_config=None) as llm:
        assert llm.options == replace(options, speculative_config=None)
        assert llm.engine.config.max_num_seqs == 3


def test_random_weights_need_only_a_config(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    params, said = SamplingParams(temperature=0, max_tokens=8), []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 2}):
        with LLM(str(tmp_path), load_format="dummy", speculative_config=config, progress=False) as llm:
            (result,) = llm.generate("each byte is a token", params)
            said.append(result.token_ids)
            assert len(result.prompt_token_ids) == len("each byte is a token")
    assert said[0] == said[1]


def test_a_draft_with_another_tokenizer_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="another tokenizer"):
        LLM(
            str(tiny_folder), speculative_config={"method": "draft_model", "model": "default"}, progress=False
        )


def test_unknown_models_and_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nosuchmodel"):
        LLM("nosuchmodel", progress=False)
    wrong = tmp_path / "notes.gguf"
    wrong.write_text("not a model")
    with pytest.raises(ModelFileError, match=r"notes\.gguf"):
        LLM(str(wrong), progress=False)


def test_kv_memory_is_what_was_asked(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), kv_cache_memory=2**20, progress=False)
    memory = llm.engine.executor.memory
    kept = sum(part.nbytes for part in memory.parts)
    assert kept <= 2**20 < kept * 1.05
