"""Rebuilds a `tokenizers.Tokenizer` from the `tokenizer.*` section of a GGUF file.

Invariant: the rebuilt tokenizer gives the ids of the tokenizer.json the file was converted from. Two kinds
exist: `gpt2` (byte-level BPE with listed merges, split by the rule that `tokenizer.ggml.pre` names) and
`llama` (SentencePiece BPE: merges follow from scores).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from paceline.core.errors import ModelFileError

PREFIX = "tokenizer.ggml."
Section = Mapping[str, Any]  # the keys after PREFIX
MAX_VOCAB = 1_000_000
MAX_TOKEN_CHARS = 4_096
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type
SPECIAL = (UNKNOWN, CONTROL)
PADDING_TOKEN = re.compile(r"\[PAD\d+\]")  # fills the vocabulary up to the embedding's rows; no text ever
SPACE = "▁"  # SentencePiece's visible space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = rf"{_CONTRACTIONS}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


class Splitting(NamedTuple):
    """How a byte-level tokenizer cuts text before BPE: pattern after pattern, each match its own piece."""

    patterns: tuple[str, ...]
    normalizes_nfc: bool = False
    ignores_merges: bool = False  # a piece that is a whole token is taken as it is
    adds_bos: bool = False  # when the file does not say


_AS_LLAMA3 = Splitting((_LLAMA3,), ignores_merges=True, adds_bos=True)
_AS_DEEPSEEK3 = Splitting((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3))
_FAMILIES: tuple[tuple[str, Splitting], ...] = (
    ("default", Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("gpt-2 phi-2 jais trillion granite-docling exaone4 gigachat", Splitting((_GPT2,))),
    ("a.x-4.0 mellum modern-bert", Splitting((_GPT2,))),
    ("olmo mpt", Splitting((_GPT2,), normalizes_nfc=True)),
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", Splitting((_DIGIT, _GPT2))),
    ("command-r", Splitting((_DIGIT, _GPT2), normalizes_nfc=True)),
    ("falcon", Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _AS_LLAMA3),
    ("dbrx smaug-bpe glm4 chatglm-bpe", Splitting((_LLAMA3,))),
    ("qwen2", Splitting((_QWEN2,), normalizes_nfc=True)),
    ("deepseek-r1-qwen megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2", Splitting((_QWEN2,))),
    ("qwen35", Splitting((_QWEN35,), normalizes_nfc=True)),
    ("tekken", Splitting((_TEKKEN,), ignores_merges=True, adds_bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", Splitting((_GPT4O,))),
    ("deepseek-coder", Splitting(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", _DIGIT))),
    ("deepseek-v3 hunyuan-dense joyai-llm", _AS_DEEPSEEK3),
    ("bloom poro-chat gpt3-finnish", Splitting((_BLOOM,))),
    ("viking", Splitting((_BLOOM, _DIGIT))),
)
SPLITTINGS = {name: splitting for names, splitting in _FAMILIES for name in names.split()}


class _Vocabulary(NamedTuple):
    """The checked lists of the file; `ids` leaves out empty and padding tokens."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]


def rebuild(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer a GGUF file describes, special tokens and BOS/EOS rules included."""
    section = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    kind = section.get("model")
    if kind not in ("gpt2", "llama"):
        remedy = "Paceline reads 'gpt2' and 'llama', or give the folder with tokenizer.json"
        raise ModelFileError(f"{PREFIX}model is {kind!r}; {remedy}")
    vocabulary = _read_vocabulary(section, is_spaced=kind == "llama")
    tokenizer = _byte_level(section, vocabulary) if kind == "gpt2" else _sentence_piece(section, vocabulary)
    # Control tokens (special) and user-defined ones are found whole in the text, before any splitting.
    typed = [(t, number) for t, number in zip(*vocabulary[:2], strict=True) if t.strip(SPACE)]
    special, plain = ([t for t, number in typed if number in types] for types in (SPECIAL, (USER_DEFINED,)))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
    ends: dict[str, list[tuple[str, int]]] = {}
    for name, is_usual in (("bos", kind == "llama" or _splitting(section).adds_bos), ("eos", False)):
        index = section.get(f"{name}_token_id", -1)
        is_added = section.get(f"add_{name}_token", is_usual) and 0 <= index < len(vocabulary.tokens)
        ends[name] = [(vocabulary.tokens[index], index)] if is_added else []
    if any(ends.values()):
        single = [*(token for token, _ in ends["bos"]), "$A", *(token for token, _ in ends["eos"])]
        both = ends["bos"] + ends["eos"]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=both)
    return tokenizer


def _damaged(problem: str) -> ModelFileError:
    return ModelFileError(f"{PREFIX}{problem}; the file is damaged, fetch it again")


def _read_vocabulary(section: Section, is_spaced: bool) -> _Vocabulary:
    tokens = section.get("tokens")
    is_list = isinstance(tokens, Sequence) and all(isinstance(token, str) for token in tokens)
    if tokens is None or not is_list or not 0 < len(tokens) <= MAX_VOCAB:
        raise _damaged(f"tokens is no list of 1 to {MAX_VOCAB} strings")
    if max(map(len, tokens)) > MAX_TOKEN_CHARS:
        raise _damaged(f"tokens holds a token of over {MAX_TOKEN_CHARS} characters")
    types = list(section.get("token_type") or [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise _damaged(f"token_type has {len(types)} entries for {len(tokens)} tokens")
    if is_spaced:  # Gemma files spell runs of spaces with real spaces; text reaches BPE with visible ones.
        tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    ids: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if not token or (kind == UNUSED and PADDING_TOKEN.fullmatch(token)):
            continue
        if ids.setdefault(token, index) != index:
            raise _damaged(f"tokens lists {token!r} as {ids[token]} and as {index}")
    return _Vocabulary(list(tokens), types, ids)


def _splitting(section: Section) -> Splitting:
    name = section.get("pre") or "default"
    if name not in SPLITTINGS:
        remedy = f"give the folder with tokenizer.json, or a file of one of: {', '.join(sorted(SPLITTINGS))}"
        raise ModelFileError(f"{PREFIX}pre {name!r} is unknown; {remedy}")
    return SPLITTINGS[name]


def _byte_level(section: Section, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    splitting, merges = _splitting(section), section.get("merges")
    if merges is None:
        raise ModelFileError(f"{PREFIX}merges is missing; give the folder with tokenizer.json")
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else () for merge in merges]
    for pair, merge in zip(pairs, merges, strict=True):
        if len(pair) != 2:
            raise _damaged(f"merges holds {merge!r}, which is no pair")
    tokenizer = _bpe(vocabulary, pairs, ignore_merges=splitting.ignores_merges)
    if splitting.normalizes_nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bpe(vocabulary: _Vocabulary, pairs: Sequence[Any], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids, merges=pairs, **options))
    except Exception as error:  # the library raises bare Exception for merges that name no token
        raise _damaged(f"merges do not fit the vocabulary ({error})") from error


def _sentence_piece(section: Section, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    tokens, types, _ = vocabulary
    unknown = section.get("unknown_token_id", types.index(UNKNOWN) if UNKNOWN in types else None)
    unk_token = tokens[unknown] if unknown is not None and unknown < len(tokens) else None
    pairs = _merges_from_scores(section.get("scores"), vocabulary)
    tokenizer = _bpe(vocabulary, pairs, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    visible: list[Any] = [normalizers.Replace(" ", SPACE)]
    readable: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if section.get("add_space_prefix", True):
        visible.insert(0, normalizers.Prepend(SPACE))
        readable.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(visible), decoders.Sequence(readable)
    return tokenizer


def _merges_from_scores(scores: Any, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Each cut of a token into two is a merge: best scores first, runs of spaces before all, ties by id."""
    tokens, types, ids = vocabulary
    if scores is None or len(scores) != len(tokens):
        raise _damaged("scores is missing or of another length than the tokens")
    ranked: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for token, index in ids.items():
        is_spaces = not token.strip(SPACE)
        if types[index] != NORMAL and not is_spaces:
            continue  # control and user-defined tokens are matched whole, never built
        rank = -float("inf") if is_spaces and types[index] == USER_DEFINED else -float(scores[index])
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((rank, index, left, right, (token[:cut], token[cut:])))
    return [pair for *_, pair in sorted(ranked)]
