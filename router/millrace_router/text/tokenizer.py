"""Text to token ids and back, with the Rust tokenizer of a model folder."""

from __future__ import annotations

import asyncio
import functools
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import orjson
from tokenizers import Encoding, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from millrace_proto.token_bytes import ByteDecoder, NoFixedBytes
from millrace_router.errors import is_failure
from millrace_router.text.control_tokens import CodeEncoder, ControlTokens, Encoded, GuardedText

SEPARATOR = "\U0010ffff"
"""A noncharacter, which Unicode keeps out of texts."""


class TokenTexts:
    """The texts of the tokens 0, 1, …"""

    def __init__(self, texts: Iterable[str]) -> None:
        parts = [text.replace(SEPARATOR, "") + SEPARATOR for text in texts]
        self._whole = "".join(parts)
        self._starts = list(accumulate(map(len, parts), initial=0))

    def having(self, part: str) -> Iterator[int]:
        """Yield the tokens whose text contains `part`, which is not empty."""
        if SEPARATOR in part:
            return
        position = self._whole.find(part)
        while position >= 0:
            token = bisect_right(self._starts, position) - 1
            yield token
            position = self._whole.find(part, self._starts[token + 1])


NFC_SHRINKS = 4
"""Largest ratio of bytes before and after NFC: U+1FBE U+0308 U+0301, 7 bytes, become U+0390, 2 bytes."""
KEEPS_TEXT = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation"})


def longest_token(rust: RustTokenizer) -> int | None:
    """Return the largest number of UTF-8 bytes of text in one token; None if it is not bounded.

    It is bounded for byte-pair models with a token for every byte and without a step that removes text. An unknown
    word, or blanks that a tokenizer skips, can have any length.
    """
    vocab = rust.get_vocab(with_added_tokens=False)
    added = rust.get_added_tokens_decoder().values()
    if not _has_every_byte(rust, vocab) or any(token.lstrip or token.rstrip for token in added):
        return None
    factor = _shrinking(_parts(rust.normalizer, "normalizers"))
    if factor is None or not all(map(_keeps_text, _parts(rust.pre_tokenizer, "pretokenizers"))):
        return None
    lengths = (len(text.encode()) for text in (*vocab, *(token.content for token in added)))
    return factor * max(lengths)


def byte_decoder(rust: RustTokenizer) -> ByteDecoder | None:
    """Read the decoder of `rust`; None if the bytes of a token can depend on its neighbours."""
    try:
        # The pickled decoder is its part of tokenizer.json, without the vocabulary.
        return ByteDecoder(json.loads(rust.decoder.__getstate__()) if rust.decoder else None)
    except NoFixedBytes:
        return None


def _has_every_byte(rust: RustTokenizer, vocab: dict[str, int]) -> bool:
    model = rust.model
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    steps = _parts(rust.pre_tokenizer, "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    return is_byte_level and all(char in vocab for char in pre_tokenizers.ByteLevel.alphabet())


def _shrinking(steps: list[dict[str, Any]]) -> int | None:
    """Return the largest ratio of bytes before and after these steps; None if it is not bounded."""
    factor = 1
    for step in steps:
        if step["type"] == "NFC":
            factor *= NFC_SHRINKS
        elif step["type"] == "Replace" and "String" in step["pattern"]:
            if len(step["content"].encode()) < len(step["pattern"]["String"].encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return factor


def _keeps_text(step: dict[str, Any]) -> bool:
    return (step["type"] == "Split" or step["type"] in KEEPS_TEXT) and step.get(
        "behavior"
    ) != "Removed"


def _parts(component: Any, key: str) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return the steps of a component in order, from its pickled form, which is its part of tokenizer.json."""
    if component is None:
        return []
    return _flat(json.loads(component.__getstate__()), key)


def _flat(step: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [part for nested in step[key] for part in _flat(nested, key)]


TOKENIZER_FILE = "tokenizer.json"
Result = TypeVar("Result")
SPANS_AT_ONCE = 1024
"""Spans that are written as JSON before another thread may run."""

LONG_CHARS = 1 << 16
"""Length above which a text is tokenized in a separate thread, so that it delays no shorter one."""
MAX_PARTS = 8
"""Results of `Tokenizer.ids_with` that are kept."""


class TokenizerError(Exception):
    """The text cannot be tokenized, or the folder has no usable tokenizer."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A token and its part of the text; `start` and `stop` count UTF-8 bytes."""

    id: int
    text: str
    start: int
    stop: int


class Tokenizer:
    """Encodes and decodes; methods that end in `_async` use worker threads, the others the caller's thread.

    Truncation and padding of the tokenizer's file are switched off, since validation applies the limits.
    """

    def __init__(self, rust: RustTokenizer, *, validation_workers: int = 2) -> None:
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self._workers = ThreadPoolExecutor(validation_workers, thread_name_prefix="tokenize")
        self._long_worker = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        added = rust.get_added_tokens_decoder()
        self.special_ids = {token.content: id_ for id_, token in added.items() if token.special}
        """Ids of control tokens by text."""
        self._special_ids = frozenset(self.special_ids.values())
        self.control_tokens = ControlTokens.of(rust)
        """The texts that are control tokens in a prompt, unless it is guarded."""
        self._code_encoder = CodeEncoder(rust, self.control_tokens.stand_ins)
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self._whole_texts: dict[int, str | None] = {}
        self._byte_decoder = byte_decoder(rust)
        self.longest_token = longest_token(rust)
        """The largest number of bytes of text in one token, if it is bounded."""
        self._token_texts: TokenTexts | None = None
        self._ids_with: dict[tuple[str, ...], tuple[int, ...]] = {}
        self.vocab_size: int = rust.get_vocab_size(with_added_tokens=True)
        self.end_ids: frozenset[int] = frozenset()
        """Ids that end a text or a turn by tokenizer_config.json, which may be another one than the shards read."""

    @classmethod
    def load(cls, folder: Path, *, validation_workers: int = 2) -> Tokenizer:
        """Read `tokenizer.json` from `folder`.

        Raises:
            TokenizerError: the file does not exist or cannot be read.

        """
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist: the model needs a fast tokenizer")
        try:
            rust = RustTokenizer.from_file(str(path))
        except BaseException as error:
            if not is_failure(error):
                raise
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        return cls(rust, validation_workers=validation_workers)

    @property
    def has_token_bytes(self) -> bool:
        """Whether `token_bytes` is defined: each token adds the same bytes next to any other tokens."""
        return self._byte_decoder is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`.

        Raises:
            TokenizerError: the text is not valid Unicode, or has a part without a token.

        """
        encode = self._rust.encode_batch_fast
        return tuple(self._encoding(encode, text, special=add_special_tokens).ids)

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Do as `encode` in a worker thread."""
        encode = functools.partial(self.encode, text, add_special_tokens=add_special_tokens)
        return await self.in_thread(encode, num_chars=len(text))

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Token ids of `text` with their parts of it; added special tokens have empty parts."""
        encode = self._rust.encode_batch
        encoding = self._encoding(encode, text, special=add_special_tokens)
        byte_at: Sequence[int] = range(len(text) + 1)
        if not text.isascii():
            byte_at = list(accumulate((len(char.encode()) for char in text), initial=0))
        return [
            TokenSpan(id_, text[start:stop], byte_at[start], byte_at[stop])
            for id_, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    async def spans_json_async(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Do as `encode_with_offsets` and write a JSON array, both in a worker thread."""

        def render() -> bytes:
            spans = self.encode_with_offsets(text, add_special_tokens=add_special_tokens)
            return _spans_json(spans)

        return await self.in_thread(render, num_chars=len(text))

    def encode_with_starts(
        self, text: str, *, add_special_tokens: bool = True
    ) -> list[tuple[int, int]]:
        """Token ids of `text`, each with its first character's position; raises TokenizerError.

        An added special token has the position of the token before it.
        """
        encode = self._rust.encode_batch
        encoding = self._encoding(encode, text, special=add_special_tokens)
        starts = accumulate((start for start, _ in encoding.offsets), max)
        return list(zip(encoding.ids, starts, strict=True))

    def _encoding(
        self, encode: Callable[..., list[Encoding]], text: str, *, special: bool
    ) -> Encoding | Encoded:
        """Encode a batch of one; only the binding's batch methods let other threads run meanwhile."""
        try:
            if isinstance(text, GuardedText):
                return self._code_encoder.encode(text.code, add_special_tokens=special)
            return encode([text], add_special_tokens=special)[0]
        except BaseException as error:
            if not is_failure(error):
                raise
            raise TokenizerError(str(error)) from error

    async def in_thread(self, call: Callable[[], Result], *, num_chars: int = 0) -> Result:
        """Make the call in a worker thread; `num_chars` is the length of the text that it reads."""
        workers = self._workers if num_chars <= LONG_CHARS else self._long_worker
        return await asyncio.get_running_loop().run_in_executor(workers, call)

    def decode(self, ids: tuple[int, ...] | list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`; ids outside the vocabulary add nothing. Raises TokenizerError."""
        try:
            text: str = self._rust.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise TokenizerError(str(error)) from error
        return text

    def id_of(self, text: str) -> int | None:
        """Return the id of the token that is written as `text`, if there is one."""
        return self._rust.token_to_id(text)

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is a control token, such as end of sequence."""
        return token_id in self._special_ids

    def token_text(self, token_id: int) -> str:
        """Return the text of a token in the middle of a text, with its leading space."""
        text = self._texts.get(token_id)
        if text is None:
            alone = self.decode([token_id], skip_special_tokens=False)
            twice = self.decode([token_id, token_id], skip_special_tokens=False)
            text = self._texts[token_id] = twice[len(alone) :]
        return text

    def ids_with(self, parts: tuple[str, ...], vocab_size: int) -> tuple[int, ...]:
        """Return the tokens below `vocab_size` whose text has one of `parts`; the first call takes seconds."""
        matching = self._ids_with.get(parts)
        if matching is None:
            texts = self._all_texts()
            ids = {id_ for part in parts for id_ in texts.having(part)}
            matching = tuple(sorted(id_ for id_ in ids if id_ < vocab_size))
            if len(self._ids_with) >= MAX_PARTS:
                self._ids_with.clear()
            self._ids_with[parts] = matching
        return matching

    def _all_texts(self) -> TokenTexts:
        if self._token_texts is None:
            self._token_texts = TokenTexts(map(self.token_text, range(self.vocab_size)))
        return self._token_texts

    def token_name(self, token_id: int) -> str:
        r"""`token_text`, or `bytes:\xe2\x80` for a token with incomplete characters, as OpenAI writes it."""
        if (
            self.is_special(token_id)
            or not self.has_token_bytes
            or self.whole_text(token_id) is not None
        ):
            return self.token_text(token_id)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token, b"" outside the vocabulary; see `has_token_bytes`."""
        piece_bytes = self._bytes.get(token_id)
        if piece_bytes is None:
            assert self._byte_decoder is not None
            piece = self._rust.id_to_token(token_id)
            piece_bytes = b"" if piece is None else self._byte_decoder.decode(piece)
            self._bytes[token_id] = piece_bytes
        return piece_bytes

    def whole_text(self, token_id: int) -> str | None:
        """Return the text of `token_bytes`; None if it has incomplete characters."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            pass
        try:
            text = self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self._whole_texts[token_id] = text
        return text

    def close(self) -> None:
        """Stop the worker threads after their present calls."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._long_worker.shutdown(wait=False, cancel_futures=True)


def _spans_json(spans: list[TokenSpan]) -> bytes:
    """Write a part at a time, since orjson holds the interpreter during a call."""
    starts = range(0, len(spans), SPANS_AT_ONCE)
    pieces = (orjson.dumps(spans[start : start + SPANS_AT_ONCE])[1:-1] for start in starts)
    return b"[%b]" % b",".join(pieces)
