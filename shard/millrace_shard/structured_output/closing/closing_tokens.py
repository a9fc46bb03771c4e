"""The tokens that short endings are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

FEW = 64
"""Where a grammar allows no more tokens than this, each of them may be part of an ending."""
PUNCTUATION = b'"[]{}:,'
TAG, CLOSES, QUOTES, CONTINUES, CLOSES_AFTER, DIGITS, WORD, OTHER, OPENS, LAST = range(10)
WITHIN_STRING = (TAG, QUOTES, DIGITS, WORD, OTHER, CONTINUES, CLOSES_AFTER, CLOSES, OPENS, LAST)
"""The kinds where many tokens are allowed: a string has begun, or a thought."""


@dataclass(frozen=True, slots=True, eq=False)
class ClosingTokens:
    """Single characters, JSON's punctuation, and special tokens and tags, which may close thoughts."""

    ids: NDArray[np.int64]
    """The most promising first where many tokens are allowed, as within a string."""
    special: frozenset[int]
    eos_token_id: int
    tokenizer: LLTokenizer
    _ranks: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tokens: Sequence[bytes],
        tokenizer: LLTokenizer,
        *,
        special: Iterable[int],
        eos_token_id: int,
    ) -> ClosingTokens:
        """Find them among `tokens`, the bytes of each id."""
        names = frozenset(special)
        kinds = {
            id_: TAG if id_ in names else _kind(token)
            for id_, token in enumerate(tokens)
            if token
            and (len(token) == 1 or not token.strip(PUNCTUATION) or id_ in names or _is_tag(token))
        }
        order = sorted(
            kinds,
            key=lambda id_: (WITHIN_STRING.index(kinds[id_]), _rank(kinds[id_], tokens[id_], id_)),
        )
        return cls(np.array(order, dtype=np.int64), names, eos_token_id, tokenizer)

    def among(self, mask: bytes) -> list[int]:
        """The ids to choose from where `mask`, a bit for each id, allows them: the most promising first."""
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        if len(allowed) > FEW:
            known: list[int] = self.ids[bits[self.ids] != 0].tolist()
            return known or allowed[:FEW].tolist()
        return sorted(allowed.tolist(), key=self._rank_of)

    def closes(self, id_: int) -> bool:
        """Whether the token is closing brackets alone, which come first where few tokens are allowed."""
        return not self.tokenizer.decode_bytes([id_]).strip(b"]}")

    def _rank_of(self, id_: int) -> tuple[int, int, int]:
        if id_ not in self._ranks:
            token = self.tokenizer.decode_bytes([id_])
            kind = TAG if id_ in self.special else _kind(token)
            self._ranks[id_] = _rank(kind, token, id_)
        return self._ranks[id_]


def _rank(kind: int, token: bytes, id_: int) -> tuple[int, int, int]:
    """Less for a token that is more likely to lead to the end; an empty string is better than one that begins."""
    is_shorter_better = kind in {QUOTES, DIGITS} and token != b'""'
    return kind, len(token) if is_shorter_better else -len(token), id_


def _is_tag(token: bytes) -> bool:
    return (token[:2], token[-1:]) in {(b"</", b">"), (b"[/", b"]")}


def _kind(token: bytes) -> int:
    if _is_tag(token):
        return TAG
    if not token.strip(b'"]}'):
        return QUOTES if token.startswith(b'"') else CLOSES
    if b"\\" in token or token[:1].isspace() or not token[:1].isascii():
        return LAST
    if token.startswith(b","):
        return CONTINUES
    if b"]" in token or b"}" in token:
        return CLOSES_AFTER
    if b"[" in token or b"{" in token:
        return OPENS
    if token.isdigit():
        return DIGITS
    return WORD if token.isalnum() else OTHER
