"""The vocabulary of the model as bytes, which grammars match.

It is read from tokenizer.json. The bytes of a token are those that it adds to the text anywhere but at its start, as in
the detokenizer of the router. The reader of llguidance supports byte-level and byte-fallback decoders only.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from millrace_shard.structured_output.closing import ClosingTokens
from millrace_shard.weights.checkpoint_files import TOKENIZER

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

logger = logging.getLogger(__name__)
Step = Callable[[str | bytes], str | bytes]


class UnknownTokenizer(ValueError):  # noqa: N818
    """A tokenizer whose tokens have no fixed bytes."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model for llguidance."""

    tokenizer: LLTokenizer
    """It has exactly as many tokens as the model has logits; ids without text have empty bytes."""
    size: int
    eos_token_ids: tuple[int, ...]
    """At least one; each of them ends a text and has no text itself."""
    closing: ClosingTokens

    @classmethod
    def of(
        cls, tokens: Sequence[bytes], *, special: Iterable[int], eos_token_ids: Sequence[int]
    ) -> Vocabulary:
        """A vocabulary from the bytes of each id, empty for ids without text; only their names allow `special` ids."""
        ends = tuple(eos_token_ids)
        named = sorted({*special, *ends})
        names = _Tokens(list(tokens), named, ends[0])
        tokenizer = LLTokenizer(TokenizerWrapper(names), eos_token=list(ends))
        closing = ClosingTokens.of(tokens, tokenizer, special=named, eos_token_id=ends[0])
        return cls(tokenizer, len(tokens), ends, closing)


def load_vocabulary(
    folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> Vocabulary | None:
    """The vocabulary of the model in `folder`, or None and a line in the log if it cannot match grammars.

    That is the case without a tokenizer.json, with tokens whose text depends on their neighbours (WordPiece), and
    without an end-of-sequence id. This takes half a second for 128 000 tokens.
    """
    ends = tuple(id_ for id_ in dict.fromkeys(eos_token_ids) if 0 <= id_ < vocab_size)
    try:
        if not ends:
            raise UnknownTokenizer("the model has no end-of-sequence id")
        tokens, special = read_tokens(folder / TOKENIZER, vocab_size)
        return Vocabulary.of(tokens, special=special, eos_token_ids=ends)
    except (UnknownTokenizer, OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("no grammars: %s", error)
        return None


class _Tokens:
    """A tokenizer for `TokenizerWrapper`."""

    def __init__(self, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        """Only grammars that force tokens call this, and `no_forcing` is set for all grammars."""
        raise NotImplementedError("grammars must not split text into tokens")


def read_tokens(path: Path, vocab_size: int) -> tuple[list[bytes], set[int]]:
    """The bytes of every id from the tokenizer.json at `path`, and the special ids. Raises UnknownTokenizer."""
    description = json.loads(path.read_bytes())
    steps = _steps(_flat(description["decoder"] or {"type": None}))
    tokens = [b""] * vocab_size
    for id_, piece in _pieces(description["model"]):
        if id_ < vocab_size:
            tokens[id_] = _apply(steps, piece)
    special = set()
    for added in description.get("added_tokens") or ():
        if added["id"] < vocab_size:
            tokens[added["id"]] = added["content"].encode()
            if added["special"]:
                special.add(added["id"])
    return tokens, special


def _pieces(model: dict[str, Any]) -> list[tuple[int, str]]:
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return [(id_, piece) for piece, id_ in vocab.items()]
    return [(id_, piece) for id_, (piece, _) in enumerate(vocab)]


def _flat(description: dict[str, Any]) -> list[dict[str, Any]]:
    if description["type"] != "Sequence":
        return [description]
    return [part for nested in description["decoders"] for part in _flat(nested)]


def _steps(parts: list[dict[str, Any]]) -> list[Step]:
    steps: list[Step] = []
    fused = False
    for part in parts:
        kind = part["type"]
        if kind == "ByteLevel":
            steps.append(_byte_level)
        elif kind == "ByteFallback":
            steps.append(_byte_fallback)
        elif kind == "Metaspace":
            steps.append(_replacement(part["replacement"], " "))
        elif kind == "Replace" and "String" in part["pattern"]:
            steps.append(_replacement(part["pattern"]["String"], part["content"]))
        elif kind == "Fuse":
            fused = True
        # After Fuse, Strip changes the ends of the whole text only.
        elif not (kind == "Strip" and fused):
            raise UnknownTokenizer(f"a decoder of type {kind} gives single tokens no fixed bytes")
    return steps


def _apply(steps: Sequence[Step], piece: str) -> bytes:
    result: str | bytes = piece
    for step in steps:
        result = step(result)
    return result if isinstance(result, bytes) else result.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map: a printable Latin-1 character is its own byte; U+0100 and up are the other bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    alphabet = {chr(byte): byte for byte in shown}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


ALPHABET = _byte_alphabet()


def _byte_level(piece: str | bytes) -> str | bytes:
    if isinstance(piece, str) and all(char in ALPHABET for char in piece):
        return bytes([ALPHABET[char] for char in piece])
    return piece


def _byte_fallback(piece: str | bytes) -> str | bytes:
    if isinstance(piece, str) and (match := BYTE_PIECE.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece


def _replacement(old: str, new: str) -> Step:
    return lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece
