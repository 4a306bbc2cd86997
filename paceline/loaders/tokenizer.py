"""Text to token ids and back, for both kinds of model file.

Invariant: `decode(ids)` is the UTF-8 text of the tokens' bytes in order (broken bytes become U+FFFD), so that
detokenize.py can do the same one token at a time. Encoding is the `tokenizers` library's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from paceline.core.errors import ConfigError, ModelFileError, RequestError
from paceline.loaders.fields import read_text
from paceline.loaders.tokenizer_gguf import SPACE, rebuild

MAX_JSON_BYTES = 256 * 2**20
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Byte-level BPE writes each byte as one printable character: itself, or the next from U+0100 on.
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
OTHERS = sorted(set(range(256)) - set(PRINTABLE))
BYTE_OF = {chr(b): b for b in PRINTABLE} | {chr(0x100 + i): b for i, b in enumerate(OTHERS)}
TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
SPACED_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where a tokenizer is described. At most one of `json_path` and `gguf_metadata` is set."""

    json_path: Path | None = None
    gguf_metadata: Mapping[str, Any] | None = None  # full keys, such as "tokenizer.ggml.tokens"
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    chat_template: str | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    where: Path | None = field(default=None, compare=False)  # the model's file or folder


class Tokenizer:
    """A model's tokenizer, with its end tokens and chat template."""

    def __init__(self, source: TokenizerSource) -> None:
        try:
            self._read(source)
        except ModelFileError as error:
            where = str(source.where or "")
            raise error if where in str(error) else ModelFileError(f"{where}: {error}") from None

    def _read(self, source: TokenizerSource) -> None:
        if source.json_path is not None:
            backend = _read_json(source.json_path, source.config)
        elif source.gguf_metadata is not None:
            backend = rebuild(source.gguf_metadata)
        else:
            raise ModelFileError("the model has no tokenizer; add its tokenizer.json to the folder")
        backend.no_padding()
        backend.no_truncation()
        self._backend, self._source = backend, source
        decoders = set(_decoder_kinds(json.loads(self.json()).get("decoder") or {}))
        self._is_byte_level = "ByteLevel" in decoders
        if not self._is_byte_level and not decoders <= SPACED_DECODERS:
            known = "only byte-level and SentencePiece ones are read"
            raise ModelFileError(f"the tokenizer's decoder {sorted(decoders)} is unknown; {known}")
        self.strips_leading_space = bool(decoders & {"Strip", "Metaspace"})  # that encoding puts in front
        self.bos_id, self.eos_ids = source.bos_id, frozenset(source.eos_ids)
        added = backend.get_added_tokens_decoder()
        bos_ids = frozenset[int]() if self.bos_id is None else frozenset({self.bos_id})
        self.special_ids = self.eos_ids | bos_ids | {i for i, token in added.items() if token.special}
        vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        size = max(vocab.values(), default=-1) + 1
        if size > 2 * len(vocab) + 65_536:
            raise ModelFileError(f"the tokenizer has {len(vocab)} tokens, ids to {size - 1}; fetch it again")
        self._tokens: list[str | None] = [None] * size
        for token, index in vocab.items():
            self._tokens[index] = token
        self._bytes: dict[int, bytes] = {}  # of the tokens asked for so far

    @property
    def chat_template(self) -> str | None:
        return self._source.chat_template

    @property
    def has_chat_template(self) -> bool:
        return self._source.chat_template is not None

    @property
    def eos_token_id(self) -> int | None:
        """Of several end tokens the first, by transformers' name."""
        return next(iter(self._source.eos_ids), None)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token; the model's may be padded beyond."""
        return len(self._tokens)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(f"cannot encode {text!r:.60}: {error}; give valid Unicode") from error
        wants_bos = add_special and self._source.config.get("add_bos_token") is True
        if wants_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        hidden = self.special_ids if skip_special else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to a text: maybe a part of a character. Ids without a token add nothing."""
        known = self._bytes.get(token)
        if known is None:  # the whole vocabulary at once would delay the first answer by 0.1 s
            name = self.token_name(token) or ""
            byte = BYTE_TOKEN.fullmatch(name)
            if self._is_byte_level:  # but added tokens are spelled as they are: one other character tells
                known = bytes(BYTE_OF[c] for c in name) if all(c in BYTE_OF for c in name) else name.encode()
            else:
                known = bytes([int(byte[1], 16)]) if byte else name.replace(SPACE, " ").encode()
            self._bytes[token] = known
        return known

    def token_text(self, token: int) -> str:
        """The token for display."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_name(self, token: int) -> str | None:
        """The token as the vocabulary spells it ("Ġthe"), or None for an id without a token."""
        return self._tokens[token] if 0 <= token < len(self._tokens) else None

    def json(self) -> str:
        """The whole tokenizer in the tokenizer.json format."""
        return str(self._backend.to_str())

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, template: str | None = None, **variables: Any
    ) -> str:
        """The messages as the model's chat template writes them, or another; `variables`: see
        chat_template.render."""
        from paceline.loaders.chat_template import render

        template = template or self._source.chat_template
        if template is None:
            raise ConfigError("the model has no chat template; use generate with a plain prompt, or pass one")
        bos, eos = self._end_token("bos", self.bos_id), self._end_token("eos", self.eos_token_id)
        return render(template, messages, bos_token=bos, eos_token=eos, **variables)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool = True,
        add_generation_prompt: bool = False, **variables: Any,
    ) -> str | list[int]:  # fmt: skip
        """By transformers' name and defaults."""
        text = self.chat(conversation, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special=False) if tokenize else text

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        # The template writes the BOS itself where the model wants one.
        return self.encode(self.chat(messages, **variables), add_special=False)

    def same_as(self, other: Tokenizer) -> str | None:
        """The first id that means different tokens here and there, in words; None if the shared ids agree."""
        for i, (mine, theirs) in enumerate(zip(self._tokens, other._tokens, strict=False)):
            if mine is not None and theirs is not None and mine != theirs:
                return f"token {i} is {mine!r} in one and {theirs!r} in the other"
        return None

    def _end_token(self, name: str, index: int | None) -> str | None:
        """The config's own spelling first: templates compare with it."""
        stated = self._source.config.get(f"{name}_token")
        stated = stated.get("content") if isinstance(stated, Mapping) else stated
        if isinstance(stated, str):
            return stated
        listed = (self._source.gguf_metadata or {}).get(f"tokenizer.ggml.{name}_token_id", index)
        return self.token_name(listed) if isinstance(listed, int) else None


def _read_json(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    text = read_text(path, MAX_JSON_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{path}: not a tokenizer.json ({error!s:.100}); fetch it again") from error
    listed = config.get("added_tokens_decoder") or {}  # may hold tokens that tokenizer.json lacks
    known = set(backend.get_added_tokens_decoder())
    for index in sorted(int(i) for i in listed if str(i).isdecimal() and int(i) not in known):
        entry = listed[str(index)]
        text = str(entry.get("content", ""))
        flags = {flag: bool(entry.get(flag, False)) for flag in TOKEN_FLAGS}
        backend.add_tokens([tokenizers.AddedToken(text, **flags)])
        if backend.token_to_id(text) != index:
            raise ModelFileError(f"tokenizer_config.json gives {text!r} another id than {path}; fetch them")
    return backend


def _decoder_kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    for part in decoder.get("decoders", ()):
        yield from _decoder_kinds(part)
    if decoder.get("type", "Sequence") != "Sequence":
        yield str(decoder["type"])
