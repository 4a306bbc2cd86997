"""Rebuilds a `tokenizers.Tokenizer` from the `tokenizer.*` section of a GGUF file.

Invariant: the rebuilt tokenizer gives the ids of the tokenizer.json the file was converted from. Two kinds
exist: `gpt2` (byte-level BPE with listed merges, split by the rule that `tokenizer.ggml.pre` names) and
`llama` (SentencePiece BPE: merges follow from scores).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ModelFileError

if TYPE_CHECKING:
    import tokenizers

MAX_VOCAB = 1_000_000
MAX_TOKEN_CHARS = 4_096
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type
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
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a byte-level tokenizer cuts text before BPE: one pattern after the other, each match a piece of its
    own.
    """

    patterns: tuple[str, ...]
    normalizes_nfc: bool = False
    ignores_merges: bool = False  # a piece that is a whole token is taken as it is
    adds_bos: bool = False  # when the file does not say


_AS_LLAMA3 = Splitting((_LLAMA3,), ignores_merges=True, adds_bos=True)
_AS_DEEPSEEK3 = Splitting((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3))
_FAMILIES: tuple[tuple[str, Splitting], ...] = (
    ("default", Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    (
        "gpt-2 phi-2 jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert",
        Splitting((_GPT2,)),
    ),
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
SPLITTINGS: Mapping[str, Splitting] = {
    name: splitting for names, splitting in _FAMILIES for name in names.split()
}


def rebuild(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer a GGUF file describes, special tokens and BOS/EOS rules included."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelFileError(
            f"tokenizer.ggml.model is {kind!r}; Paceline reads 'gpt2' and 'llama', or give the folder with tokenizer.json"
        )
    tokens, types = _read_vocab(metadata)
    tokenizer = (
        _byte_level(metadata, tokens, types) if kind == "gpt2" else _sentence_piece(metadata, tokens, types)
    )
    _add_whole_tokens(tokenizer, tokens, types)
    _add_ends(tokenizer, metadata, tokens, bos_by_default=kind == "llama" or _splitting(metadata).adds_bos)
    return tokenizer


def _read_vocab(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if (
        not isinstance(tokens, Sequence)
        or not 0 < len(tokens) <= MAX_VOCAB
        or not all(isinstance(t, str) for t in tokens)
    ):
        raise ModelFileError(
            f"tokenizer.ggml.tokens is no list of 1 to {MAX_VOCAB} strings; the file is damaged, fetch it again"
        )
    if max(map(len, tokens)) > MAX_TOKEN_CHARS:
        raise ModelFileError(
            f"tokenizer.ggml.tokens holds a token of over {MAX_TOKEN_CHARS} characters; the file is damaged, fetch it again"
        )
    types = list(metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens))
    if len(types) != len(tokens):
        raise ModelFileError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens; the file is damaged, fetch it again"
        )
    return list(tokens), types


def _ids(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if not token or (kind == UNUSED and PADDING_TOKEN.fullmatch(token)):
            continue
        if vocab.setdefault(token, index) != index:
            raise ModelFileError(
                f"tokenizer.ggml.tokens lists {token!r} as {vocab[token]} and as {index}; the file is damaged, fetch it again"
            )
    return vocab


def _splitting(metadata: Mapping[str, Any]) -> Splitting:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name not in SPLITTINGS:
        known = ", ".join(sorted(SPLITTINGS))
        raise ModelFileError(
            f"tokenizer.ggml.pre {name!r} is unknown; give the folder with tokenizer.json, or a file of one of: {known}"
        )
    return SPLITTINGS[name]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    splitting, merges = _splitting(metadata), metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelFileError(
            "tokenizer.ggml.merges is missing; the file cannot encode text, give the folder with tokenizer.json"
        )
    pairs = [_pair(merge) for merge in merges]
    tokenizer = Tokenizer(
        _bpe(models.BPE, _ids(tokens, types), pairs, ignore_merges=splitting.ignores_merges)
    )
    if splitting.normalizes_nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: object) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else []
    if len(parts) != 2:
        raise ModelFileError(
            f"tokenizer.ggml.merges holds {merge!r}, which is no pair; the file is damaged, fetch it again"
        )
    return parts[0], parts[1]


def _bpe(model: Any, vocab: dict[str, int], pairs: list[tuple[str, str]], **options: Any) -> Any:
    try:
        return model(vocab=vocab, merges=pairs, **options)
    except Exception as error:  # the library raises bare Exception for merges that name no token
        raise ModelFileError(
            f"tokenizer.ggml.merges do not fit the vocabulary ({error}); the file is damaged, fetch it again"
        ) from error


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    # Gemma files spell runs of spaces as user-defined tokens of real spaces; text reaches BPE with visible
    # ones.
    tokens[:] = [SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
    vocab = _ids(tokens, types)
    unknown = metadata.get(
        "tokenizer.ggml.unknown_token_id", types.index(UNKNOWN) if UNKNOWN in types else None
    )
    model = _bpe(
        models.BPE,
        vocab,
        _merges_from_scores(metadata, tokens, types, vocab),
        unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    visible: list[Any] = [normalizers.Replace(" ", SPACE)]
    readable: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        visible.insert(0, normalizers.Prepend(SPACE))
        readable.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(visible), decoders.Sequence(readable)
    return tokenizer


def _merges_from_scores(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Every cut of a token into two tokens is a merge; the best score merges first, runs of spaces before
    all, ties in id order.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelFileError(
            "tokenizer.ggml.scores is missing or of another length than the tokens; the file is damaged, fetch it again"
        )
    ranked: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for token, index in vocab.items():
        is_spaces = not token.strip(SPACE)
        if types[index] != 1 and not is_spaces:
            continue  # control and user-defined tokens are matched whole, never built
        rank = -float("inf") if is_spaces and types[index] == USER_DEFINED else -float(scores[index])
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((rank, index, left, right, (token[:cut], token[cut:])))
    return [pair for *_, pair in sorted(ranked)]


def _add_whole_tokens(tokenizer: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens (special) and user-defined ones (plain) are found whole in the text, before any
    splitting.
    """
    from tokenizers import AddedToken

    def of_type(*kinds: int) -> list[str]:
        return [t for t, kind in zip(tokens, types, strict=True) if kind in kinds and t.strip(SPACE)]

    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in of_type(UNKNOWN, CONTROL)]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in of_type(USER_DEFINED)])


def _add_ends(
    tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str], bos_by_default: bool
) -> None:
    from tokenizers import processors

    def end(name: str, by_default: bool) -> list[tuple[str, int]]:
        index = metadata.get(f"tokenizer.ggml.{name}_token_id", -1)
        is_added = metadata.get(f"tokenizer.ggml.add_{name}_token", by_default) and 0 <= index < len(tokens)
        return [(tokens[index], index)] if is_added else []

    bos, eos = end("bos", bos_by_default), end("eos", False)
    if bos or eos:
        single = [token for token, _ in bos] + ["$A"] + [token for token, _ in eos]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[*bos, *eos])
