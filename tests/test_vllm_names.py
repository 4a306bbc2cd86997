"""Calls as vLLM's users write them, with only the import changed: the same names, shapes and meanings; and what
is written in docs/from_vllm.md runs.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    ConfigError,
    GuidedDecodingParams,
    PacelineError,
    ProcessorError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)
from paceline.api.build import sampling_defaults
from paceline.api.options import EngineOptions

PROMPTS = ["In a paceline, cyclists ride", "The rider in front", "After a while the leader", "def ride(line"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAFTERS = ("plain", "ngram", "draft_model", "auto")


@pytest.fixture(scope="module")
def llms(tiny_folder: Path) -> dict[str, LLM]:
    """As vLLM's examples of speculative decoding make them."""
    configs: dict[str, Any] = {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
        "draft_model": {
            "model": str(tiny_folder),
            "num_speculative_tokens": 5,
            "draft_tensor_parallel_size": 1,
        },
        "auto": "auto",
    }
    options: dict[str, Any] = {"tensor_parallel_size": 1, "trust_remote_code": False, "progress": False}
    return {
        name: LLM(model=str(tiny_folder), speculative_config=configs[name], **options) for name in DRAFTERS
    }


def told(llm: LLM, prompts: Any, params: Any) -> Any:
    """All that is promised to be the same with every drafter."""
    found = llm.generate(prompts, sampling_params=params)
    assert llm.engine.executor.kv.num_used == 0
    each = [(r.prompt_token_ids, r.prompt_logprobs, r.outputs) for r in found]
    names = ("text", "token_ids", "logprobs", "cumulative_logprob", "finish_reason", "stop_reason", "index")
    return [(ids, scores, [[getattr(o, n) for n in names] for o in outs]) for ids, scores, outs in each]


def test_generate(tiny: LLM) -> None:
    outputs = tiny.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95), use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    assert len({output.request_id for output in outputs}) == len(PROMPTS)
    for output in outputs:
        assert output.finished
        (completion,) = output.outputs
        assert completion.index == 0
        assert completion.finish_reason in ("stop", "length")
        assert completion.text == tiny.get_tokenizer().decode(completion.token_ids)
        assert completion.logprobs is completion.cumulative_logprob is output.prompt_logprobs is None
    assert tiny.get_default_sampling_params() == SamplingParams()  # its folder has no generation_config.json


def test_defaults_are_the_models_own(tiny: LLM, tiny_folder: Path, tmp_path: Path) -> None:
    own = {"temperature": 0.7, "top_p": None, "do_sample": True, "eos_token_id": 3, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    found = sampling_defaults(
        EngineOptions(override_generation_config={"top_k": 5, "temperature": 0.2}), tmp_path
    )
    assert found == {"temperature": 0.2, "top_k": 5, "repetition_penalty": 1.1}
    assert sampling_defaults(EngineOptions(generation_config="vllm"), tmp_path) == {}
    assert (
        sampling_defaults(EngineOptions(generation_config=str(tmp_path)), tiny_folder)["temperature"] == 0.7
    )
    for options, words in (
        ({"generation_config": "there"}, "generation_config is 'there'; use auto, vllm, or a folder"),
        (
            {"override_generation_config": {"top_q": 1}},
            "override_generation_config is {'top_q': 1}; give an object with some of temperature",
        ),
        ({"override_generation_config": {"top_p": 2}}, "generation_config: top_p is 2; .*'vllm'"),
        (
            {"override_generation_config": "greedy"},
            "override_generation_config is 'greedy'; give an object with",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            sampling_defaults(EngineOptions(**options), tmp_path)
    with LLM(model=str(tiny_folder), override_generation_config={"temperature": 0}, progress=False) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0)
        greedy = tiny.generate(PROMPTS[0], SamplingParams(temperature=0))[0].token_ids
        assert llm.generate(PROMPTS[0])[0].token_ids == greedy
        assert [token.id for chunk in llm.stream(PROMPTS[0]) for token in chunk.tokens] == greedy


def test_chat(tiny: LLM) -> None:
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about the importance of higher education."},
    ]
    (one,) = tiny.chat(conversation, GREEDY, use_tqdm=False)
    many = tiny.chat(messages=[conversation] * 3, sampling_params=GREEDY)
    assert [output.token_ids for output in many] == [one.token_ids] * 3
    written = tiny.get_tokenizer().apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True
    )
    assert one.prompt == written
    assert tiny.generate([written], GREEDY)[0].token_ids == one.token_ids
    parts = [
        *conversation[:3],
        {"role": "user", "content": [{"type": "text", "text": conversation[3]["content"]}]},
    ]
    assert tiny.chat(parts, GREEDY)[0].token_ids == one.token_ids
    assert tiny.chat("Hello", GREEDY)[0].prompt == tiny.chat([conversation[1]], GREEDY)[0].prompt
    template = "{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}"
    (other,) = tiny.chat("Hello", GREEDY, chat_template=template, chat_template_kwargs={"end": "?"})
    assert other.prompt == "Hello?"
    template = "{{ messages[3].content[0].text[:5] }}"
    (other,) = tiny.chat(parts, GREEDY, chat_template=template, chat_template_content_format="openai")
    assert other.prompt == "Write"
    begun = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The line rides "}]
    asked: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert tiny.chat(begun, GREEDY, **asked)[0].prompt.endswith("assistant\nThe line rides ")  # type: ignore[union-attr]


def test_chat_with_tools(tiny: LLM) -> None:
    """Calls and their answers come back as clients keep them; a template without tools has them in words."""
    call = {"type": "function", "id": "1", "function": {"name": "speed", "arguments": '{"rider": 3}'}}
    messages = [
        {"role": "user", "content": "How fast?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "41"},
    ]
    tools = [{"type": "function", "function": {"name": "speed", "parameters": {"type": "object"}}}]
    (output,) = tiny.chat(messages, GREEDY, tools=tools)
    assert output.prompt is not None
    for words in (
        '<tools>\n{"type": "function"',
        '{"name": "speed", "arguments": {"rider": 3}}',
        "41\n</tool_resp",
    ):
        assert words in output.prompt
    template = (
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments.rider if m.tool_calls }}{% endfor %}"
    )
    (output,) = tiny.chat(
        messages, GREEDY, tools=tools, chat_template=template + "{{ tools[0].function.name }}"
    )
    assert output.prompt == "3speed"


BAD_CHATS: list[tuple[Any, dict[str, Any], str]] = [
    (["Hello"], {}, "a message is 'Hello'"),
    (5, {}, "a message is 5"),
    ([{"content": "Hello"}], {}, "'role'"),
    ([{"role": "user", "content": 5}], {}, "content is 5"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "'image_url'; this model reads text only"),
    ([{"role": "assistant", "tool_calls": [5]}], {}, "a tool call is 5"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        {},
        "arguments are",
    ),
    ("Hello", {"lora_request": 1}, "no adapters"),
    ("Hello", {"tools": "f"}, "tools is 'f'"),
    ("Hello", {"chat_template_kwargs": {"messages": []}}, "an option of its own"),
    ("Hello", {"continue_final_message": True}, "add_generation_prompt=False"),
    ("Hello", {"chat_template_content_format": "x"}, "use one of auto"),
    ("Hello", {"add_generation_promt": True}, "did you mean 'add_generation_prompt'"),
]


@pytest.mark.parametrize(("messages", "options", "message"), BAD_CHATS, ids=[m for _, _, m in BAD_CHATS])
def test_bad_chats_are_named(tiny: LLM, messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=re.escape(message)):
        tiny.chat(messages, GREEDY, **options)


IDS = [5, 6, 7]
SHAPES: dict[str, tuple[Any, int]] = {
    "list": (IDS, 1),
    "tuple": (tuple(IDS), 1),
    "numpy": (np.array(IDS), 1),
    "int32": (np.array(IDS, np.int32), 1),
    "torch": (torch.tensor(IDS), 1),
    "numpy 2-d": (np.array([IDS, IDS]), 2),
    "torch 2-d": (torch.tensor([IDS, IDS]), 2),
    "arrays": ([np.array(IDS), torch.tensor(IDS), tuple(IDS)], 3),
    "numpy numbers": ([np.int64(i) for i in IDS], 1),
    "torch numbers": ([torch.tensor(i) for i in IDS], 1),
    "TokensPrompt": (TokensPrompt(prompt_token_ids=np.array(IDS)), 1),
    "mappings": ([{"prompt_token_ids": IDS}, {"prompt": None, "prompt_token_ids": torch.tensor(IDS)}], 2),
}


@pytest.mark.parametrize(("prompts", "count"), SHAPES.values(), ids=SHAPES)
def test_token_ids_of_every_shape(tiny: LLM, prompts: Any, count: int) -> None:
    found = tiny.generate(prompts, SamplingParams(temperature=0, max_tokens=np.int64(2), ignore_eos=True))
    assert [output.prompt_token_ids for output in found] == [IDS] * count


@pytest.mark.parametrize(
    "prompts",
    [np.array(5), np.array([1.5]), torch.tensor([True]), np.zeros((2, 2, 2), int), ["a", 5], [5, "a"]],
)
def test_other_shapes_are_refused(tiny: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="give a"):
        tiny.generate(prompts)


def test_structured_outputs(tiny: LLM) -> None:
    def text(**options: Any) -> str:
        return (
            tiny.generate(prompts="Say it:", sampling_params=SamplingParams(seed=1, **options))[0]
            .outputs[0]
            .text
        )

    assert text(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"])) in (
        "Positive",
        "Negative",
    )
    regex = r"[a-c]{2,9}@[a-c]{2}\.com\n"
    options: dict[str, Any] = {"stop": ["\n"], "max_tokens": 200}
    assert re.match(
        r"[a-c]+@[a-c]+\.com$", text(structured_outputs=StructuredOutputsParams(regex=regex), **options)
    )
    schema = {"type": "object", "properties": {"year": {"enum": [1996, 2026]}}, "required": ["year"]}
    assert "year" in text(guided_decoding=GuidedDecodingParams(json=schema), max_tokens=400)
    assert text(guided_decoding={"grammar": 'root ::= "SELECT " ("a" | "b")'}) in ("SELECT a", "SELECT b")
    with pytest.raises(ConfigError, match="did you mean 'regex'"):
        StructuredOutputsParams(regx="a")  # type: ignore[call-arg]


def test_prefix_caching(tiny_folder: Path) -> None:
    prefix = "In a paceline, cyclists ride one behind the other. The rider in front breaks the wind. " * 2
    prompts = [prefix + prompt for prompt in PROMPTS]
    with LLM(model=str(tiny_folder), enable_prefix_caching=False, progress=False) as regular:
        expected = [output.outputs[0].text for output in regular.generate(prompts, GREEDY)]
    with LLM(model=str(tiny_folder), enable_prefix_caching=True, progress=False) as cached:
        cached.generate(prompts[0], GREEDY)
        outputs = cached.generate(prompts, GREEDY)
    assert [output.outputs[0].text for output in outputs] == expected
    assert all(output.num_cached_tokens > 16 for output in outputs)


@pytest.mark.parametrize("seed", [None, 7])
def test_prompt_logprobs_are_the_same_with_every_drafter(llms: dict[str, LLM], seed: int | None) -> None:
    shared: dict[str, Any] = {"temperature": 0.0 if seed is None else 0.9, "seed": seed, "ignore_eos": True}
    params = [SamplingParams(max_tokens=20, prompt_logprobs=2, logprobs=1, **shared)] * 2 + [
        SamplingParams(max_tokens=20, n=2, prompt_logprobs=0, **shared),
        SamplingParams(max_tokens=20, **shared),
    ]
    prompts = [*PROMPTS[:3], "In a paceline, in a paceline, in a paceline, in a paceline"]
    first = told(llms["plain"], prompts, params)
    for llm in llms.values():
        assert told(llm, prompts, params) == first
        assert told(llm, prompts, params) == first  # with every prefix in the cache
    for (ids, scores, outputs), own in zip(first, params, strict=True):
        if own.prompt_logprobs is None:
            assert scores is None
            continue
        assert scores[0] is None
        assert [next(iter(entry)) for entry in scores[1:]] == ids[1:]
        assert all(max(entry.values()).rank == 1 for entry in scores[1:] if len(entry) > 1)
        # A text that is given is as likely as one that was written.
        whole = [*ids, *outputs[0][1]]
        (again,) = llms["plain"].generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert again.prompt_logprobs is not None
        tail = [
            entry[token].logprob for entry, token in zip(again.prompt_logprobs[1:], whole[1:], strict=True)
        ]  # type: ignore[index]
        assert tail[: len(ids) - 1] == [
            entry[t].logprob for entry, t in zip(scores[1:], ids[1:], strict=True)
        ]
        if own.logprobs is not None:
            assert sum(tail[len(ids) - 1 :]) == pytest.approx(outputs[0][3], abs=1e-9)


def only_even(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[1::2] = -torch.inf
    return logits


def no_repeats(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    seen = torch.zeros_like(logits)
    seen[output_ids] = -torch.inf
    return logits + seen


@pytest.mark.parametrize("seed", [None, 7])
def test_logits_processors_hold_with_every_drafter(llms: dict[str, LLM], seed: int | None) -> None:
    temperature = 0.0 if seed is None else 0.9
    params = SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=24,
        ignore_eos=True,
        logits_processors=[only_even, no_repeats],
    )
    first = told(llms["plain"], PROMPTS, params)
    assert all(told(llm, PROMPTS, params) == first for llm in llms.values())
    for _, _, ((_, token_ids, *_),) in first:
        assert len(set(token_ids)) == len(token_ids) == 24
        assert not any(token % 2 for token in token_ids)
    assert llms["draft_model"].generate(PROMPTS, params)[0].stats.num_accepted > 0


def test_a_wrong_processor_is_named(tiny: LLM) -> None:
    def forgets(token_ids: list[int], logits: torch.Tensor) -> None:
        logits[0] = 1.0

    def spoils(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits * torch.nan

    for wrong, message in ((forgets, "forgets returned None"), (spoils, "spoils returned NaN")):
        results = tiny.generate(["a", "b"], [SamplingParams(logits_processors=[wrong]), GREEDY])
        assert isinstance(results[0].outputs[0].error, ProcessorError)
        assert message in str(results[0].outputs[0].error)
        assert len(results[1].token_ids) == 12
    with pytest.raises(ConfigError, match="give a list of functions"):
        SamplingParams(logits_processors=[lambda logits: logits])


def test_what_ends_a_text_is_named(tiny: LLM) -> None:
    (free,) = tiny.generate("The rider", GREEDY)
    tokenizer, third = tiny.get_tokenizer(), free.token_ids[2]
    (listed,) = tiny.generate(
        "The rider", SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[third])
    )
    assert (listed.finish_reason, listed.outputs[0].stop_reason) == ("stop", third)
    word = next(free.text[i] for i in range(3, len(free.text)) if free.text[i] in free.text[i:])
    (stopped,) = tiny.generate("The rider", SamplingParams(temperature=0, ignore_eos=True, stop=[word]))
    assert stopped.outputs[0].stop_reason == word
    end = tokenizer.eos_token_id
    assert end is not None
    forced: dict[str, Any] = {"temperature": 0, "allowed_token_ids": [end], "max_tokens": 3}
    (ended,) = tiny.generate("The rider", SamplingParams(**forced))
    assert (ended.text, ended.finish_reason, ended.outputs[0].stop_reason) == ("", "stop", None)
    name = tokenizer.token_text(end)
    shown = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert tiny.generate("a", SamplingParams(**forced, **shown))[0].text == ""
    assert tiny.generate("a", SamplingParams(**forced, **shown, ignore_eos=True))[0].text == name * 3
    assert (
        tiny.generate("a", SamplingParams(**forced, **shown, include_stop_str_in_output=True))[0].text == name
    )
    (silent,) = tiny.generate(
        "The rider", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    )
    assert (silent.text, silent.token_ids) == ("", free.token_ids)


def test_lengths(tiny: LLM) -> None:
    length = tiny.engine.config.max_model_len
    (long,) = tiny.generate([[5] * 400], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(long.token_ids) == length - 400
    ids = [*range(3, 300)] * 3
    for cut, count in ((5, 5), (-1, length - 1)):
        (output,) = tiny.generate([ids], SamplingParams(max_tokens=1, truncate_prompt_tokens=cut))
        assert output.prompt_token_ids == ids[-count:]


def test_numbers_and_names_of_sampling_params() -> None:
    params = SamplingParams(
        max_tokens=np.int64(5), temperature=np.float32(0.5), seed=torch.tensor(3), stop_token_ids=np.array([1, 2]),
        logit_bias={np.int64(3): np.float32(1)}, ignore_eos=np.bool_(True), best_of=None,
    )  # fmt: skip  # type: ignore[call-arg]
    assert (params.max_tokens, params.seed, params.stop_token_ids, params.ignore_eos) == (5, 3, (1, 2), True)
    assert params.logit_bias == {3: 1.0}
    for options, message in (
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"best_of": 4}, "ask for n"),
        ({"use_beam_search": True}, "no beam search"),
        ({"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}}, "two names"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True"),
        ({"max_tokens": np.array([1, 2])}, "max_tokens is array"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({"detokenize": False, "stop": "a"}, "stop strings need the text"),
        ({"output_kind": 1}, "give a RequestOutputKind"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            SamplingParams(**options)


ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"data_parallel_size": 2}, "one device"),
    ({"pipeline_parallel_size": 0}, "use a whole number"),
    ({"tensor_parallel_size": True}, "use a whole number"),
    ({"tensor_parallel_size": 0}, "use a whole number"),
    ({"trust_remote_code": True}, "never run"),
    ({"quantization": "fp8"}, "dtype='int8'"),
    ({"revision": "v2"}, "give its folder"),
    ({"hf_token": "hf_abc"}, "hf_token is '***'; set the variable"),
    ({"task": "embed"}, "only write text"),
    ({"download_dir": "/tmp"}, "HF_HOME"),
    ({"tokenizer": "gpt2"}, "the model's own"),
    ({"enable_lora": True}, "no adapters"),
    ({"gpu_memory_utilization": 5}, "at most 1"),
    ({"gpu_memory_utilization": 0.5, "kv_cache_memory": 0.1}, "exclude each other"),
    ({"max_num_seqs": True}, "max_num_seqs is True"),
    ({"max_model_len": True}, "max_model_len is True"),
    ({"enable_prefix_caching": 1}, "use True or False"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"load_format": "pt"}, "load_format is 'pt'"),
    ({"enforce_egar": True}, "did you mean 'enforce_eager'"),
]


@pytest.mark.parametrize(("options", "message"), ENGINES, ids=[str(o) for o, _ in ENGINES])
def test_engine_options_that_are_refused(tiny_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(model=str(tiny_folder), progress=False, **options)


def test_engine_options_that_are_taken(tiny_folder: Path) -> None:
    nothing = {
        "tokenizer": str(tiny_folder),
        "quantization": None,
        "revision": None,
        "swap_space": 0,
        "task": "generate",
    }
    meant = {"dtype": torch.float32, "load_format": "safetensors", "max_num_seqs": np.int64(3), "seed": 5}
    said = []
    for more in ({"enforce_eager": True, "device": "cpu", "gpu_memory_utilization": 0.5}, {}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            llm = LLM(model=str(tiny_folder), progress=False, **nothing, **meant, **more)
        named = ["enforce_eager, gpu_memory_utilization: tunes vLLM alone"] if more else []
        assert [str(each.message).split(", and")[0] for each in caught] == named
        with llm:
            assert (llm.options.dtype, llm.options.max_num_seqs) == ("float32", 3)
            said.append([output.token_ids for output in llm.generate(PROMPTS, SamplingParams(max_tokens=8))])
    assert said[0] == said[1], "the same seed, the same texts"
    assert len({tuple(ids) for ids in said[0]}) == len(PROMPTS)


def test_what_is_not_here_says_so(tiny: LLM) -> None:
    for name in ("encode", "embed", "classify", "score", "beam_search"):
        with pytest.raises(AttributeError, match=f"no '{name}'; "):
            getattr(tiny, name)
    with pytest.raises(ConfigError, match="no adapters"):
        tiny.generate("a", lora_request=object())  # type: ignore[arg-type]


def test_progress(tiny: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.generate(PROMPTS, GREEDY)
    assert capfd.readouterr().err == ""
    tiny.generate(PROMPTS, GREEDY, use_tqdm=True)
    assert re.search(r"Processed prompts.*4/4", capfd.readouterr().err)
    from tqdm import tqdm

    tiny.generate(PROMPTS, GREEDY, use_tqdm=tqdm)
    assert re.search(r"Processed prompts.*4/4", capfd.readouterr().err)


def test_close_gives_everything_back(tiny_folder: Path) -> None:
    threads = set(threading.enumerate())
    llm = LLM(str(tiny_folder), progress=False)
    stream = llm.stream("a", GREEDY)
    next(stream)
    held = [
        weakref.ref(part) for part in (llm.engine, llm.engine.executor.memory, llm.engine.executor.decoder)
    ]
    llm.close()
    llm.close()
    assert [part() for part in held] == [None] * 3
    assert set(threading.enumerate()) <= threads
    assert list(stream) == []
    for call in (llm.generate, llm.chat, llm.stream, llm.stream_chat):
        with pytest.raises(RequestError, match="closed; make a new one"):
            call("a")
    with pytest.raises(RequestError, match="closed"):
        llm.get_tokenizer()


def test_streams_that_are_not_read_hold_up_no_one(tiny_folder: Path) -> None:
    """They fill every seat; others have their turn when those have written what they were asked for, no more."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(str(tiny_folder), max_num_seqs=2, progress=False) as llm:
        paused = [llm.stream(prompt, params) for prompt in PROMPTS[:2]]
        for stream in paused:
            next(stream)
        (answer,) = llm.generate(PROMPTS[2], params)
        assert len(answer.token_ids) == 30
        assert all(len(inbox.request.output) <= 30 for inbox in llm._inboxes.values())
        rest = [list(stream) for stream in paused]
        expected = [output.token_ids for output in llm.generate(PROMPTS[:2], params)]
        assert [chunks[-1].result.token_ids for chunks in rest] == expected  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Any:
    args = AsyncEngineArgs(model=str(tiny_folder), max_num_seqs=4, progress=False)
    made = AsyncLLM.from_engine_args(args)
    yield made
    made.shutdown()
    made.shutdown()


def is_idle(engine: AsyncLLM) -> bool:
    return not engine._calls and not engine.llm.engine.has_work and not engine.llm._inboxes


async def until_idle(engine: AsyncLLM) -> None:
    for _ in range(6000):
        if is_idle(engine):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine goes on")


def test_async_streaming(engine: AsyncLLM) -> None:
    expected = {p: engine.llm.generate(p, GREEDY)[0] for p in PROMPTS}

    async def deltas(prompt: str, number: int) -> tuple[str, list[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        text, ids = "", []
        async for output in engine.generate(request_id=f"d{number}", prompt=prompt, sampling_params=params):
            for completion in output.outputs:
                text, ids = text + completion.text, ids + completion.token_ids
            if output.finished:
                assert output.outputs[0].finish_reason == "length"
        return text, ids

    async def cumulative(prompt: str, number: int) -> tuple[str, list[int]]:
        last = None
        async for output in engine.generate(prompt, GREEDY, f"c{number}"):
            assert last is None or output.outputs[0].text.startswith(last.outputs[0].text)
            last = output
        assert last is not None
        assert (last.finished, last.request_id, last.prompt) == (True, f"c{number}", prompt)
        return last.outputs[0].text, last.outputs[0].token_ids

    async def final(prompt: str) -> tuple[str, list[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, n=2, output_kind=RequestOutputKind.FINAL_ONLY
        )
        (output,) = [output async for output in engine.generate(prompt, params)]
        assert [completion.index for completion in output.outputs] == [0, 1]
        return output.outputs[1].text, output.outputs[1].token_ids

    async def main() -> None:
        calls = [f(p, i) for i, p in enumerate(PROMPTS) for f in (deltas, cumulative)]
        found = await asyncio.gather(*calls, *map(final, PROMPTS))
        wanted = [(expected[p].text, expected[p].token_ids) for p in PROMPTS]
        assert found == [pair for pair in wanted for _ in range(2)] + wanted
        await until_idle(engine)

    asyncio.run(main())


def slowly(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    time.sleep(0.01)
    return logits


def test_async_abort_and_cancel(engine: AsyncLLM) -> None:
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logits_processors=[slowly])

    async def main() -> None:
        stream = engine.generate("The line", endless, "one")
        assert not (await anext(stream)).finished
        with pytest.raises(RequestError, match="which is being answered"):
            await anext(engine.generate("a", endless, "one"))
        await engine.abort("one")
        last = [output async for output in stream][-1]
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
        assert 0 < len(last.outputs[0].token_ids) < 400
        await until_idle(engine)

        started = asyncio.Event()

        async def read() -> None:
            async for _ in engine.generate("The line", endless, "two"):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(engine)
        assert engine.llm.engine.executor.kv.num_used == 0

    asyncio.run(main())


def test_async_errors_reach_who_asked(engine: AsyncLLM) -> None:
    async def main() -> None:
        impossible = SamplingParams(allowed_token_ids=[40], bad_words=[engine.llm.tokenizer.token_text(40)])
        for prompt, params, message in (
            ("", GREEDY, "the prompt is empty"),
            ([999_999], GREEDY, "prompt holds token id"),
            ("a", {"temperature": 0}, "give a SamplingParams"),
            ("a", impossible, "no token to choose"),
        ):
            with pytest.raises(PacelineError, match=message):
                await anext(engine.generate(prompt, params))  # type: ignore[arg-type]
        await until_idle(engine)

    asyncio.run(main())


def test_async_shutdown_refuses_who_still_waits(tiny_folder: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(tiny_folder), progress=False) as engine:
            stream = engine.generate("The line", SamplingParams(max_tokens=None, ignore_eos=True))
            await anext(stream)
        with pytest.raises(RequestError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(RequestError, match="closed"):
            await anext(engine.generate("a"))
        assert not engine._thread.is_alive()

    threads = set(threading.enumerate())
    asyncio.run(main())
    gc.collect()
    assert set(threading.enumerate()) <= threads


BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_document_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / "docs" / "from_vllm.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert len(blocks) >= 3
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "from_vllm.md", "exec"), scope)
    assert "Paris" in capsys.readouterr().out
