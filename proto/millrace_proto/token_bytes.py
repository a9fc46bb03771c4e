"""The bytes of each token, for tokenizers where they do not depend on the token's neighbours."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class NoFixedBytes(ValueError):  # noqa: N818
    """A decoder whose tokens have no fixed bytes."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map of characters to bytes: printable Latin-1 maps to itself, U+0100 and following to the other bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    alphabet = {chr(byte): byte for byte in shown}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()

_Step = Callable[[str | bytes], str | bytes]


def _byte_level(piece: str | bytes) -> str | bytes:
    if isinstance(piece, str) and all(char in _ALPHABET for char in piece):
        return bytes([_ALPHABET[char] for char in piece])
    return piece


def _byte_fallback(piece: str | bytes) -> str | bytes:
    if isinstance(piece, str) and (match := _BYTE_PIECE.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece


def _replacement(old: str, new: str) -> _Step:
    return lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece


class ByteDecoder:
    """Applies a tokenizer's decoder to one vocabulary entry, as in the middle of a text."""

    def __init__(self, description: dict[str, Any] | None) -> None:
        """`description` is the decoder of a tokenizer.json; raises NoFixedBytes."""
        self._steps = _steps(_flat(description or {"type": None}))

    def decode(self, piece: str) -> bytes:
        """Return the bytes of `piece`, an entry of the vocabulary."""
        result: str | bytes = piece
        for step in self._steps:
            result = step(result)
        return result if isinstance(result, bytes) else result.encode()


def _flat(description: dict[str, Any]) -> list[dict[str, Any]]:
    if description["type"] != "Sequence":
        return [description]
    return [part for nested in description["decoders"] for part in _flat(nested)]


def _steps(parts: list[dict[str, Any]]) -> list[_Step]:
    steps: list[_Step] = []
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
        # After Fuse, Strip affects the ends of the whole text, not a token in the middle.
        elif not (kind == "Strip" and fused):
            raise NoFixedBytes(f"a decoder of type {kind} gives single tokens no fixed bytes")
    return steps
