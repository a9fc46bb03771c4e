"""Tokens of prompts that are cut to a length; the tokenizer's special tokens at their ends stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from millrace_router.pooling.score_template import PairText
from millrace_router.text.tokenizer import Tokenizer

Ids = tuple[int, ...]
Item = TypeVar("Item")


class Side(StrEnum):
    """Where tokens are cut off, in TEI's words."""

    LEFT = "Left"
    RIGHT = "Right"


@dataclass(frozen=True, slots=True)
class Truncation:
    """How prompts are cut."""

    length: int
    """Most tokens, special ones included."""
    side: Side = Side.RIGHT

    def cut(self, items: Sequence[Item], room: int) -> Sequence[Item]:
        """Return `items` without those that are too many for `room`, which is at least 0."""
        if len(items) <= room:
            return items
        return items[:room] if self.side is Side.RIGHT else items[len(items) - room :]


def tokens_of(
    tokenizer: Tokenizer, text: str, truncation: Truncation | None, *, specials: bool = True
) -> Ids:
    """Tokenize `text`, with the tokenizer's special tokens unless they are not wanted; raises TokenizerError."""
    ids = tokenizer.encode(text, add_special_tokens=specials)
    if truncation is None or len(ids) <= truncation.length:
        return ids
    own = tokenizer.encode(text, add_special_tokens=False)
    num_before = next(
        (place for place in range(len(ids)) if ids[place : place + len(own)] == own), 0
    )
    before, after = ids[:num_before], ids[num_before + len(own) :]
    room = max(truncation.length - len(before) - len(after), 1)
    return (*before, *truncation.cut(own, room), *after)


def pair_tokens(
    tokenizer: Tokenizer, around: PairText, document: str, truncation: Truncation | None
) -> Ids:
    """Tokenize a document within its prompt; only the document's tokens are cut. Raises TokenizerError."""
    text = around.before + document + around.after
    if truncation is None:
        return tokenizer.encode(text, add_special_tokens=False)
    tokens = tokenizer.encode_with_starts(text, add_special_tokens=False)
    first, end = len(around.before), len(around.before) + len(document)
    starts = [start for _, start in tokens]
    # A token with the blank before the document is one of it.
    own = [
        place
        for place, (start, following) in enumerate(
            zip(starts, [*starts[1:], len(text)], strict=True)
        )
        if start < end and (start >= first or following > first)
    ]
    room = max(truncation.length - (len(tokens) - len(own)), 1)
    dropped = set(own).difference(truncation.cut(own, room))
    return tuple(id_ for place, (id_, _) in enumerate(tokens) if place not in dropped)
