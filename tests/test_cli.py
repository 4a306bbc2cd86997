"""The command line as a user meets it: what it prints, where, and its exit status. On a tiny random model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline import LLM
from paceline.cli.main import app

VERBS = ("demo", "generate", "chat", "models", "verify")


@pytest.fixture(scope="module")
def tiny(tiny: LLM, tiny_folder: Path) -> str:
    """The folder; the model was loaded once, so no command below is the one that compiles kernels and says
    so.
    """
    return str(tiny_folder)


def invoke(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def generate(tiny: str, *arguments: str, stdin: str | None = None) -> dict[str, Any]:
    done = invoke("generate", *arguments, "--model", tiny, "--json", stdin=stdin)
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("verb", VERBS)
def test_help_teaches_by_example(verb: str) -> None:
    done = invoke(verb, "--help")
    assert done.exit_code == 0
    assert f"paceline {verb}" in done.stdout


def test_version() -> None:
    done = invoke("--version")
    assert (done.exit_code, done.stdout) == (0, "paceline 0.1.0\n")


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["generate", "hi", "--nonsense"], ["generate"], ["demo", "--max-tokens", "many"]],
)
def test_unknown_words_exit_2(arguments: list[str]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--max-tokens", "-3"], "max_tokens is -3"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--top-p", "0"], "top_p is 0"),
        (["--method", "ngrm"], "ngram"),
        (["--method", "ngram", "-k", "0"], "num_speculative_tokens is 0"),
        (["--speculative-config", '{"method": "ngram", "depth": 3}'], "depth"),
        (["--speculative-config", "ngram"], "not JSON"),
        (["--speculative-config", '{"method": "ngram"}', "--method", "ngram"], "exclude each other"),
        (["-k", "3"], "--method"),
        (["--json-schema", "[1]"], "--json-schema"),
        (["--regex", "a", "--choice", "b"], "exclude each other"),
        (["--regex", "("], "regex"),
    ],
)
def test_what_a_user_can_mend_is_one_line(tiny: str, arguments: list[str], named: str) -> None:
    done = invoke("generate", "hello", "--model", tiny, *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "hi", "--model", "no-such-model"], "no-such-model"),
        (["generate", "hi", "--model", str(Path(__file__))], "test_cli.py"),
        (["demo", "--prompt", "99999"], "99999"),
        (["demo", "--method", "none"], "nothing to compare"),
        (["verify", "--methods", "ngram,magic"], "magic"),
        (["verify", "--prompts", "absent.jsonl"], "absent.jsonl"),
        (["verify", "--json", "absent/report.json"], "absent"),
    ],
)
def test_wrong_names_are_named(arguments: list[str], named: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert named in done.stderr


def test_empty_and_overlong_prompts_are_refused(tiny: str) -> None:
    for prompt in ("", "riders " * 2000):
        done = invoke("generate", "-", "--raw", "--model", tiny, stdin=prompt)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")


def test_generate_prints_what_the_api_gives(tiny: str) -> None:
    from paceline import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(tiny) as llm:
        chat = llm.chat([{"role": "user", "content": "Who rides in front?"}], params)[0]
        raw = llm.generate("Who rides in front?", params)[0]
    flags = ("--temperature", "0", "--max-tokens", "12", "--model", tiny)
    assert invoke("generate", "Who rides in front?", *flags).stdout == chat.text + "\n"
    assert invoke("generate", "-", "--raw", *flags, stdin="Who rides in front?").stdout == raw.text + "\n"


def test_json_has_everything_about_the_answer(tiny: str) -> None:
    report = generate(tiny, "hello", "--seed", "4", "--max-tokens", "6", "--logprobs", "2")
    assert set(report) == {"text", "token_ids", "finish_reason", "logprobs", "stats", "timings"}
    assert [entry["token"] for entry in report["logprobs"]] == report["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in report["logprobs"])
    assert report["stats"]["num_tokens"] == len(report["token_ids"]) <= 6
    assert report["timings"]["total_s"] > 0


@pytest.mark.parametrize(
    "config",
    [
        '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}',
        '{"method": "early_exit", "num_speculative_tokens": 2}',
        '{"method": "quantized", "bits": 8, "num_speculative_tokens": 4}',
    ],
)
def test_drafts_do_not_change_a_seeded_answer(tiny: str, config: str) -> None:
    flags = ("the line the line the line", "--seed", "11", "--temperature", "0.6", "--max-tokens", "24")
    plain, auto, drafted = (
        generate(tiny, *flags, *more) for more in (["--method", "none"], [], ["--speculative-config", config])
    )
    assert drafted["token_ids"] == plain["token_ids"] == auto["token_ids"]
    assert plain["stats"]["num_drafted"] == 0
    assert drafted["stats"]["num_drafted"] > 0


def test_many_answers(tiny: str) -> None:
    report = generate(tiny, "hello", "-n", "3", "--seed", "1", "--max-tokens", "5")
    assert len(report["outputs"]) == 3
    assert report["text"] == report["outputs"][0]["text"]
    text = invoke("generate", "hello", "-n", "3", "--seed", "1", "--max-tokens", "5", "--model", tiny).stdout
    assert [f"[{i}]" in text for i in (1, 2, 3, 4)] == [True, True, True, False]


def test_structured_answers(tiny: str, tmp_path: Path) -> None:
    assert generate(tiny, "pick", "--choice", "left", "--choice", "right", "--seed", "1")["text"] in (
        "left",
        "right",
    )
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}'
    )
    for given in (str(schema), schema.read_text()):
        assert isinstance(
            json.loads(generate(tiny, "pick", "--json-schema", given, "--seed", "1")["text"])["ok"], bool
        )


def test_chat_over_a_pipe_keeps_and_forgets_history(tiny: str) -> None:
    flags = ("chat", "--model", tiny, "--temperature", "0", "--max-tokens", "8", "--json")
    done = invoke(*flags, stdin="hello\n\nhello\n/reset\nhello\n/stats\n/nonsense\n/exit\nnot reached\n")
    assert done.exit_code == 0, done.output
    first, second, third = (json.loads(line)["token_ids"] for line in done.stdout.splitlines())
    assert first == third
    assert first != second
    assert "3 answers" in done.stderr
    assert "there is no /nonsense" in done.stderr


def test_chat_goes_on_after_a_question_that_does_not_fit(tiny: str) -> None:
    done = invoke(
        "chat", "--model", tiny, "--max-tokens", "4", "--json", stdin="riders " * 2000 + "\nhello\n"
    )
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == 1
    assert "/reset" in done.stderr


def test_demo_compares_and_says_identical(tiny: str) -> None:
    done = invoke("demo", "--model", tiny, "--prompt", "the line the line the line", "--max-tokens", "32")
    assert done.exit_code == 0, done.output
    assert all(word in done.stdout for word in ("plain", "auto", "speedup", "τ", "yes"))


def test_models_lists_the_default_model() -> None:
    listed = json.loads(invoke("models", "--json").stdout)
    assert listed[0]["name"] == "smollm2-135m-instruct"
    assert set(listed[0]) == {"name", "path", "bytes", "kind", "is_here"}
    assert "smollm2-135m-instruct" in invoke("models").stdout


def test_pipes_get_no_colours_and_errors_go_to_stderr(tiny: str) -> None:
    command = [
        sys.executable,
        "-c",
        "from paceline.cli.entry import main; raise SystemExit(main())",
        "demo",
        "--model",
        tiny,
        "--max-tokens",
        "8",
    ]
    done = subprocess.run(
        [*command, "--prompt", "the line the line"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b[" not in done.stdout
    wrong = subprocess.run([*command, "--temperature", "-1"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    "arguments", [["generate", ""], ["generate", "-"], ["generate", " \n", "--raw"], ["demo", "--prompt", ""]]
)
def test_an_empty_prompt_is_refused_before_a_model_is_read(arguments: list[str]) -> None:
    done = invoke(*arguments, "--model", "no-such-model", stdin="")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: the prompt is empty; write something to answer\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "hi", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["generate"], "Missing argument"),
        (["demo", "--max-tokens", "many"], "--max-tokens"),
        (["verify", "--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_usage_errors_are_one_line_that_leads_to_help(arguments: list[str], named: str) -> None:
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
    assert "--help" in done.stderr


def test_no_verb_shows_the_help() -> None:
    assert "paceline demo" in invoke().stdout


def test_help_names_no_type_for_a_flag() -> None:
    for arguments in ([], ["generate"], ["verify"]):
        text = invoke(*arguments, "--help").stdout
        assert "--help" in text
        assert "<bool>" not in text


def test_demo_json_is_one_object(tiny: str) -> None:
    flags = ("demo", "--model", tiny, "--prompt", "the line the line the line", "--json")
    report = json.loads(invoke(*flags, "--max-tokens", "24").stdout)
    assert set(report) == {"prompt", "method", "plain", "drafted", "tau", "alpha", "speedup", "identical"}
    assert report["identical"] is (report["plain"]["token_ids"] == report["drafted"]["token_ids"])
    assert report["plain"]["text"] == report["drafted"]["text"]
    speeds = [report[name]["tokens_per_second"] for name in ("plain", "drafted")]
    assert report["speedup"] == pytest.approx(speeds[1] / speeds[0], rel=0.01, abs=1e-4)
    short = json.loads(invoke(*flags, "--max-tokens", "1").stdout)
    assert (short["speedup"], short["plain"]["tokens_per_second"]) == (None, None)


def test_demo_of_one_token_says_there_is_nothing_to_time(tiny: str) -> None:
    done = invoke("demo", "--model", tiny, "--prompt", "hello", "--max-tokens", "1")
    assert done.exit_code == 0
    assert "nothing to time" in done.stdout
    assert "0.0" not in done.stdout


def test_demo_explains_colours_only_where_there_are_some(tiny: str, tmp_path: Path) -> None:
    flags = (
        "demo",
        "--model",
        tiny,
        "--method",
        "quantized",
        "-k",
        "4",
        "--prompt",
        "the line the line the line",
        "--max-tokens",
        "24",
    )
    assert "■" not in invoke(*flags).stdout
    invoke(*flags, "--svg", str(tmp_path / "demo.svg"))
    assert "■" in (tmp_path / "demo.svg").read_text()


@pytest.mark.parametrize(("verb", "option"), [("verify", "--json"), ("demo", "--svg")])
def test_a_target_that_is_a_folder_is_refused_before_the_work(tmp_path: Path, verb: str, option: str) -> None:
    done = invoke(verb, "--model", "no-such-model", option, str(tmp_path))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is a folder" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--method", "none", "-k", "4"], "-k is 4"),
        (["--method", "none", "--draft-model", "x"], "--draft-model is x"),
        (["--regex", ""], "--regex is empty"),
        (["--grammar", ""], "--grammar is empty"),
        (["--grammar", "nosuch.lark"], "nosuch.lark: there is no such file"),
        (["--json-schema", "./absent/nosuch.json"], "there is no such file"),
        (["--logit-bias", "five=1"], "'five=1'"),
        (["--logit-bias", "5"], "ID=VALUE"),
        (["--kv-cache-memory", "lots"], "'lots'"),
        (["--kv-cache-memory", "1.5"], "kv_cache_memory is 1.5"),
        (["--max-model-len", "1"], "max_model_len is 1"),
        (["--dtype", "int5"], "dtype is 'int5'"),
        (["--raw", "--system", "Be brief."], "--system"),
        (["--model", "x" * 400], "x" * 297 + "...'"),
        (["--model", "org/" + "x" * 400], "x" * 293 + "..."),
    ],
)
def test_options_that_cannot_be_honoured(tiny: str, arguments: list[str], named: str) -> None:
    done = invoke("generate", "hello", "--model", tiny, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_sampling_options_reach_the_engine(tiny: str) -> None:
    flags = ("hello", "--temperature", "0", "--max-tokens", "8", "--ignore-eos")
    plain = generate(tiny, *flags)["token_ids"]
    assert len(plain) == 8
    assert plain[0] not in generate(tiny, *flags, "--logit-bias", f"{plain[0]}=-inf")["token_ids"]
    assert generate(tiny, *flags, "--stop-token-id", str(plain[0]))["token_ids"] == plain[:1]
    assert (
        len(generate(tiny, *flags, "--stop-token-id", str(plain[0]), "--min-tokens", "3")["token_ids"]) >= 3
    )
    assert generate(tiny, *flags, "--system", "Be brief.")["token_ids"] != plain
    penalties = ("--repetition-penalty", "5", "--presence-penalty", "2", "--frequency-penalty", "2")
    assert len(set(generate(tiny, *flags, *penalties)["token_ids"])) == 8
    word = generate(tiny, *flags, "--max-tokens", "1")["text"].strip()
    assert generate(tiny, *flags, "--max-tokens", "1", "--bad-word", word)["token_ids"] != plain[:1]
    done = invoke(
        "generate",
        "who rides in front? " * 10,
        "--model",
        tiny,
        "--max-model-len",
        "16",
        "--kv-cache-memory",
        "0.01",
    )
    assert "the context holds 16" in done.stderr


def test_chat_stops_at_a_text(tiny: str) -> None:
    flags = ("chat", "--model", tiny, "--temperature", "0", "--max-tokens", "12", "--json")
    text = json.loads(invoke(*flags, stdin="hello\n").stdout)["text"]
    stopped = json.loads(invoke(*flags, "--stop", text[2:4], stdin="hello\n").stdout)
    assert stopped["text"] == text[: text.index(text[2:4])]


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_the_terminal_samples_by_its_own_defaults(verb: str) -> None:
    words = " ".join(invoke(verb, "--help").stdout.replace("│", " ").split())
    assert "[default: 0.7]" in words
    assert "[default: 0.95]" in words


def test_default_sampling_is_what_help_says(tiny: str) -> None:
    flags = ("hello", "--seed", "3", "--max-tokens", "24", "--ignore-eos")
    assert (
        generate(tiny, *flags)["token_ids"]
        == generate(tiny, *flags, "--temperature", "0.7", "--top-p", "0.95")["token_ids"]
    )
    assert (
        generate(tiny, *flags)["token_ids"]
        != generate(tiny, *flags, "--temperature", "1", "--top-p", "1")["token_ids"]
    )


@pytest.mark.parametrize(
    ("device", "said"),
    [("gpu", "choose auto, cpu, cuda or"), ("cuda:x", "choose auto"), ("cuda:99", "cuda:99")],
)
def test_a_device_that_is_not_there_is_named(tiny: str, device: str, said: str) -> None:
    result = invoke("generate", "hello", "--model", tiny, "--device", device)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_cpu_can_be_asked_for(tiny: str) -> None:
    assert (
        invoke(
            "generate", "hello", "--model", tiny, "--device", "cpu", "--exact", "--max-tokens", "2"
        ).exit_code
        == 0
    )
