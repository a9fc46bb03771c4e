"""Text to token ids and back, on the Rust tokenizer of a model folder. Knows nothing of requests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import orjson
from tokenizers import Encoding
from tokenizers import Tokenizer as RustTokenizer

from millrace_router.text.byte_decoder import ByteDecoder
from millrace_router.text.token_length import longest_token

TOKENIZER_FILE = "tokenizer.json"
Result = TypeVar("Result")
SPANS_AT_ONCE = 1024
"""How many are rendered before another thread may run."""


class TokenizerError(Exception):
    """The text cannot be tokenized, or the folder holds no usable tokenizer."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A token and the part of the text it covers: `start` and `stop` count UTF-8 bytes."""

    id: int
    text: str
    start: int
    stop: int


class Tokenizer:
    """Encodes and decodes; `encode_async` does so off the event loop, the rest where it is called.

    A truncation or padding that the tokenizer's file asks for is switched off: limits are the validator's business.
    """

    def __init__(self, rust: RustTokenizer, *, validation_workers: int = 2) -> None:
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self._workers = ThreadPoolExecutor(validation_workers, thread_name_prefix="tokenize")
        added = rust.get_added_tokens_decoder()
        self.special_ids = {token.content: id_ for id_, token in added.items() if token.special}
        """Control tokens by their text."""
        self._special_ids = frozenset(self.special_ids.values())
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self._whole_texts: dict[int, str | None] = {}
        self._pieces = ByteDecoder.of(rust)
        self.longest_token = longest_token(rust)
        """The most bytes of a text that one token stands for, if that is known."""
        self.vocab_size: int = rust.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, folder: Path, *, validation_workers: int = 2) -> Tokenizer:
        """Read `tokenizer.json` from `folder`.

        Raises:
            TokenizerError: there is none, or it is not readable.

        """
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist: the model needs a fast tokenizer")
        try:
            rust = RustTokenizer.from_file(str(path))
        # The binding raises Exception itself.
        except Exception as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        return cls(rust, validation_workers=validation_workers)

    @property
    def has_pieces(self) -> bool:
        """Whether `token_bytes` is to be had: every token adds the same bytes wherever it stands."""
        return self._pieces is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`.

        Raises:
            TokenizerError: the text is not valid Unicode, or the model knows no token for a part of it.

        """
        encode = self._rust.encode_batch_fast
        return tuple(_first_of(encode, text, special=add_special_tokens).ids)

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Do as `encode`, in one of the worker threads."""
        encode = functools.partial(self.encode, text, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._workers, encode)

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Token ids of `text` with what they cover; special tokens that were added cover nothing."""
        encoding = _first_of(self._rust.encode_batch, text, special=add_special_tokens)
        byte_at: Sequence[int] = range(len(text) + 1)
        if not text.isascii():
            byte_at = list(accumulate((len(char.encode()) for char in text), initial=0))
        return [
            TokenSpan(id_, text[start:stop], byte_at[start], byte_at[stop])
            for id_, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    async def spans_json_async(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """`encode_with_offsets` as a JSON array, made in one of the worker threads from start to end."""

        def render() -> bytes:
            spans = self.encode_with_offsets(text, add_special_tokens=add_special_tokens)
            return _spans_json(spans)

        return await asyncio.get_running_loop().run_in_executor(self._workers, render)

    def encode_with_starts(self, text: str) -> list[tuple[int, int]]:
        """Token ids of `text`, special tokens included, each with the character where it begins; raises TokenizerError.

        A special token that was added begins where the token before it does.
        """
        encoding = _first_of(self._rust.encode_batch, text, special=True)
        starts = accumulate((start for start, _ in encoding.offsets), max)
        return list(zip(encoding.ids, starts, strict=True))

    async def in_thread(self, call: Callable[[], Result]) -> Result:
        """Make the call in one of the worker threads."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, call)

    def decode(self, ids: tuple[int, ...] | list[int], *, skip_special_tokens: bool) -> str:
        """Text of `ids` as a whole; ids outside the vocabulary add nothing."""
        text: str = self._rust.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, such as end of sequence."""
        return token_id in self._special_ids

    def token_text(self, token_id: int) -> str:
        """Text of a token in the middle of a text, a leading space included."""
        text = self._texts.get(token_id)
        if text is None:
            alone = self.decode([token_id], skip_special_tokens=False)
            twice = self.decode([token_id, token_id], skip_special_tokens=False)
            text = self._texts[token_id] = twice[len(alone) :]
        return text

    def token_name(self, token_id: int) -> str:
        r"""`token_text`, or `bytes:\xe2\x80` where a token is not made of whole characters, as OpenAI writes it."""
        if (
            self.is_special(token_id)
            or not self.has_pieces
            or self.whole_text(token_id) is not None
        ):
            return self.token_text(token_id)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that the token adds anywhere, b"" outside the vocabulary; see `has_pieces`."""
        piece_bytes = self._bytes.get(token_id)
        if piece_bytes is None:
            assert self._pieces is not None
            piece = self._rust.id_to_token(token_id)
            piece_bytes = b"" if piece is None else self._pieces.decode(piece)
            self._bytes[token_id] = piece_bytes
        return piece_bytes

    def whole_text(self, token_id: int) -> str | None:
        """Text of `token_bytes`, None where that is not made of whole characters."""
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
        """Stop the worker threads once what they are at is done."""
        self._workers.shutdown(wait=False, cancel_futures=True)


def _spans_json(spans: list[TokenSpan]) -> bytes:
    """Render in pieces, because orjson lets no other thread run while it is at one."""
    starts = range(0, len(spans), SPANS_AT_ONCE)
    pieces = (orjson.dumps(spans[start : start + SPANS_AT_ONCE])[1:-1] for start in starts)
    return b"[%b]" % b",".join(pieces)


def _first_of(encode: Callable[..., list[Encoding]], text: str, *, special: bool) -> Encoding:
    """Encode a batch of one: of the binding's methods only those for batches let other threads run meanwhile."""
    try:
        return encode([text], add_special_tokens=special)[0]
    except Exception as error:
        raise TokenizerError(str(error)) from error
