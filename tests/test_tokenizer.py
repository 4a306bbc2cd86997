"""Rebuilt tokenizers give the ids of the originals: trained here for every family, and the default model
against transformers.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from paceline.core.errors import ConfigError, ModelFileError, RequestError
from paceline.loaders import hub
from paceline.loaders.checkpoint import open_checkpoint
from paceline.loaders.tokenizer import Tokenizer, TokenizerSource
from paceline.loaders.tokenizer_gguf import SPLITTINGS, rebuild

CORPUS = [
    "",
    " ",
    "The quick brown fox doesn't jump over the lazy dog's back; they'LL see, we've said SO.",
    "def f(x):\n    return {k: v ** 2 for k, v in x.items()}  # squares\n\n\n\tif x != 3.14159e-10: pass\r\n",
    "1 22 333 4444 55555 1234567890 x12y 3.14 ½ ² ٣٤ 1,000,000 $99.99",
    "emoji 🎉👩‍👩‍👧 flags 🇫🇷 é e\u0301 ﬁ ñ Å A\u030a",
    "中文字符和日本語テキスト、한국어 문장. Привет, мир! שלום عربى हिन्दी ไทย",
    "tabs\t\tand   runs    of     spaces\u00a0nbsp\u200bzero\u2003em \r\n\r\n \n x  ",
    "   leading and trailing   ",
    "a<|end|>b<|end|><|start|> c <think>hm</think> d<|en d|>",
    "CamelCaseWords HTTPServer iPhone's O'Neill rock'n'roll ʼn «guillemets» “quotes” …—",
    "!!! ??? ... ((nested)) [x] {y} <z> a/b\\c `code` ^~|+=$ \n/\n//",
]
TRAINING = CORPUS * 3 + [" ".join(f"the{i} and that ing {i * 37} tion's" for i in range(200))]
SPECIAL, PLAIN = ["<|end|>", "<|start|>"], ["<think>", "</think>"]
texts = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\t\r'sS19aZ▁<|>\u00a0é中🎉")), max_size=60
)

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIX"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIX"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _split(*patterns: str) -> Any:
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# Each family as its published tokenizer.json has it: name -> (pre-tokenizer, NFC?, ignore_merges?)
FAMILIES: dict[str, tuple[Any, bool, bool]] = {
    "gpt-2": (_gpt2(), False, False),
    "smollm": (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
        False,
        False,
    ),
    "starcoder": (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
        False,
        False,
    ),
    "llama-bpe": (
        _split(rf"{ENGLISH}|{LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{REST}"),
        False,
        True,
    ),
    "qwen2": (_split(rf"{ENGLISH}|{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{REST}"), True, False),
    "deepseek-r1-qwen": (
        _split(rf"{ENGLISH}|{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{REST}"),
        False,
        False,
    ),
    "tekken": (
        _split(CASED.replace("SUFFIX", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + REST),
        False,
        True,
    ),
    "gpt-4o": (
        _split(CASED.replace("SUFFIX", ENGLISH + "?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + REST),
        False,
        False,
    ),
    "default": (_split(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), False, False),
}


def _train(pre: Any, nfc: bool, ignore_merges: bool) -> Backend:
    backend = Backend(models.BPE(ignore_merges=ignore_merges))
    backend.normalizer = normalizers.NFC() if nfc else None
    backend.pre_tokenizer, backend.decoder = pre, decoders.ByteLevel()
    special = [AddedToken(t, normalized=False, special=True) for t in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TRAINING,
        trainers.BpeTrainer(
            vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t in PLAIN])
    return backend


def _metadata(backend: Backend, pre: str) -> dict[str, Any]:
    model, vocab = json.loads(backend.to_str())["model"], backend.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 4 if t in PLAIN else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|start|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|end|>"],
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedTokenizerFast, Tokenizer]:
    backend = _train(*FAMILIES[request.param])
    source = TokenizerSource(gguf_metadata=_metadata(backend, request.param), bos_id=1, eos_ids=(0,))
    return PreTrainedTokenizerFast(tokenizer_object=backend), Tokenizer(source)


def test_rebuilt_byte_level_on_the_corpus(pair: tuple[PreTrainedTokenizerFast, Tokenizer]) -> None:
    theirs, ours = pair
    for text in CORPUS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_rebuilt_byte_level_on_any_text(pair: tuple[PreTrainedTokenizerFast, Tokenizer], text: str) -> None:
    theirs, ours = pair
    assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("name", sorted(SPLITTINGS))
def test_every_known_splitting_keeps_the_text(name: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": alphabet,
        "tokenizer.ggml.merges": [],
    }
    tokenizer = Tokenizer(TokenizerSource(gguf_metadata=metadata))
    for text in CORPUS:
        kept = unicodedata.normalize("NFC", text) if SPLITTINGS[name].normalizes_nfc else text
        assert tokenizer.decode(tokenizer.encode(text)) == kept


def _spaced(with_prefix: bool) -> tuple[Backend, dict[str, Any]]:
    """A SentencePiece-style tokenizer as its tokenizer.json would be, and the same as GGUF metadata."""
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, limit_alphabet=120)
    learner = Backend(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if with_prefix else "never")
    learner.train_from_iterator(TRAINING, trainer)
    learned = learner.get_vocab()
    spaces = [] if with_prefix else ["▁" * n for n in range(2, 9)]
    by_rank = sorted(
        (t for t in learned if t not in {*spaces, *SPECIAL, *PLAIN}), key=lambda t: (len(t) == 1, learned[t])
    )
    tokens = ["<unk>", *SPECIAL, *PLAIN, *spaces, *(f"<0x{b:02X}>" for b in range(256)), *by_rank]
    num_first = len(tokens) - len(by_rank)
    scores = {t: -float(max(0, i - num_first)) for i, t in enumerate(tokens)}
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = generate_merges(
        vocab,
        {t: 1e9 - vocab[t] if t in spaces else s for t, s in scores.items()},
        skip_tokens={*SPECIAL, *PLAIN, "<unk>"},
    )
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend("▁")] if with_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if with_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", *SPECIAL)])
    backend.add_tokens([AddedToken(t, normalized=False) for t in PLAIN])
    backend.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", vocab["<|start|>"])]
    )
    kinds = {"<unk>": 2, **dict.fromkeys(SPECIAL, 3), **dict.fromkeys([*PLAIN, *spaces], 4)}
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            " " * len(t) if t in spaces else t for t in tokens
        ],  # how gemma files spell them
        "tokenizer.ggml.scores": [-1000.0 if kinds.get(t) == 4 else scores[t] for t in tokens],
        "tokenizer.ggml.token_type": [kinds.get(t, 6 if t.startswith("<0x") else 1) for t in tokens],
        "tokenizer.ggml.bos_token_id": vocab["<|start|>"],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return backend, metadata if with_prefix else metadata | {"tokenizer.ggml.add_space_prefix": False}


@pytest.fixture(scope="module", params=[True, False], ids=["llama", "gemma"])
def spaced(request: pytest.FixtureRequest) -> tuple[Backend, Tokenizer]:
    backend, metadata = _spaced(request.param)
    return backend, Tokenizer(TokenizerSource(gguf_metadata=metadata, bos_id=2))


def test_rebuilt_sentence_piece_on_the_corpus(spaced: tuple[Backend, Tokenizer]) -> None:
    theirs, ours = spaced
    for text in CORPUS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids, text
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.encode("x")[0] == ours.bos_id


@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_rebuilt_sentence_piece_on_any_text(spaced: tuple[Backend, Tokenizer], text: str) -> None:
    theirs, ours = spaced
    ids = ours.encode(text)
    assert ids == theirs.encode(text).ids
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def default() -> Tokenizer:
    return Tokenizer(open_checkpoint("default", progress=False).tokenizer_source())


@pytest.fixture(scope="module")
def reference() -> Any:
    path = hub.resolve("default", progress=False)
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # transformers' reader of GGUF files does not know the name "smollm"; the model's tokenizer.json has this.
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, _gpt2()])
    return theirs


def test_default_model_on_the_corpus(default: Tokenizer, reference: Any) -> None:
    for text in [*CORPUS, "<|im_start|>user\nHi<|im_end|>\n"]:
        ids = default.encode(text)
        assert ids == reference.encode(text), text
        assert (
            default.decode(ids, skip_special=False)
            == reference.decode(ids, clean_up_tokenization_spaces=False)
            == text
        )


@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_default_model_on_any_text(default: Tokenizer, reference: Any, text: str) -> None:
    ids = default.encode(text)
    assert ids == reference.encode(text)
    known = {
        default.token_bytes(i)[0] for i in range(17, 300) if len(default.token_bytes(i)) == 1
    }  # a few rare bytes have no token
    assert b"".join(map(default.token_bytes, ids)) == bytes(b for b in text.encode() if b in known)


def test_default_model_facts(default: Tokenizer) -> None:
    assert default.vocab_size == 49_152
    assert default.eos_ids == {2}
    assert default.special_ids == frozenset(range(17))
    assert default.token_text(2) == "<|im_end|>"
    assert default.token_bytes(default.encode(" the")[0]) == b" the"
    assert default.token_bytes(10**6) == default.token_bytes(-1) == b""


def test_chat_has_one_bos_only(default: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert default.chat(messages) == text
    assert default.encode_chat(messages) == default.encode(text, add_special=False)
    assert default.chat(messages, add_generation_prompt=False) == text.removesuffix("<|im_start|>assistant\n")


def test_no_template_is_an_error_with_a_remedy(pair: tuple[Any, Tokenizer]) -> None:
    with pytest.raises(ConfigError, match="no chat template; use generate"):
        pair[1].chat([{"role": "user", "content": "Hi"}])


def test_json_round_trip(default: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(default.json(), encoding="utf-8")
    again = Tokenizer(TokenizerSource(json_path=path, bos_id=1, eos_ids=(2,)))
    assert [again.encode(t) for t in CORPUS] == [default.encode(t) for t in CORPUS]
    assert again.same_as(default) is None


def test_config_adds_tokens_and_bos(default: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(default.json(), encoding="utf-8")
    config = {
        "added_tokens_decoder": {"49152": {"content": "<extra>", "special": True}},
        "add_bos_token": True,
    }
    bigger = Tokenizer(TokenizerSource(json_path=path, config=config, bos_id=1))
    assert bigger.encode("a<extra>") == [1, *default.encode("a"), 49_152]
    assert 49_152 in bigger.special_ids
    assert bigger.same_as(default) is None


def test_another_tokenizer_is_told_apart(default: Tokenizer, pair: tuple[Any, Tokenizer]) -> None:
    assert default.same_as(pair[1]) == "token 0 is '<|endoftext|>' in one and '<|end|>' in the other"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [0]),
        ({"pre": "llama-bpe"}, [2, 0]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [0]),
        ({"add_bos_token": True, "add_eos_token": True}, [2, 0, 1]),
        ({"add_bos_token": True, "bos_token_id": 99}, [0]),
    ],
)
def test_bos_and_eos_as_the_file_says(change: dict[str, Any], expected: list[int]) -> None:
    metadata = GOOD | {"tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1}
    backend = rebuild(metadata | {f"tokenizer.ggml.{key}": value for key, value in change.items()})
    assert backend.encode("a").ids == expected
    assert backend.encode("a", add_special_tokens=False).ids == [0]


GOOD = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "rwkv"}, "'rwkv'; Paceline reads 'gpt2' and 'llama'"),
        ({"pre": "martian"}, "'martian' is unknown; .*smollm"),
        ({"tokens": None}, "tokens is no list"),
        ({"tokens": ["a", 3]}, "tokens is no list"),
        ({"tokens": ["a", "a"]}, "lists 'a' as 0 and as 1"),
        ({"tokens": ["a" * 5000]}, "over 4096 characters"),
        ({"token_type": [1]}, "1 entries for 3 tokens"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a b c"]}, "which is no pair"),
        ({"merges": ["a z"]}, "do not fit the vocabulary"),
        ({"model": "llama"}, "scores is missing"),
    ],
)
def test_damaged_files_are_named(change: dict[str, Any], words: str) -> None:
    rebuild(GOOD)
    with pytest.raises(ModelFileError, match=words):
        rebuild(GOOD | {f"tokenizer.ggml.{key}": value for key, value in change.items()})


def test_damaged_json_and_bad_text_are_named(default: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path, words in (
        (tmp_path / "tokenizer.json", "not a tokenizer.json"),
        (tmp_path / "none.json", "No such file"),
    ):
        with pytest.raises(ModelFileError, match=words):
            Tokenizer(TokenizerSource(json_path=path))
    with pytest.raises(ModelFileError, match="has no tokenizer"):
        Tokenizer(TokenizerSource())
    with pytest.raises(RequestError, match="cannot encode"):
        default.encode("\ud800")
