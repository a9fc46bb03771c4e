"""Closes the text of a grammar within a number of tokens, by a short way to its end when the rest just suffices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from llguidance import LLMatcher, LLTokenizer
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
            candidates: list[int] = self.ids[bits[self.ids] != 0].tolist()
            return candidates or allowed[:FEW].tolist()
        return sorted(allowed.tolist(), key=self._rank_of)

    def is_progress(self, id_: int) -> bool:
        """Whether the same tokens may follow and yet it leads on: brackets close, or a character goes on."""
        token = self.tokenizer.decode_bytes([id_])
        return not token.strip(b"]}") or b"\x80" <= token[:1] < b"\xc0"

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


Ending = tuple[int, ...]
"""Tokens that complete a text; the last one is an end-of-sequence id."""

MAX_STEPS = 256
MAX_CUTS = 16
SPECIAL_MARK = b"\xff"
"""Before the id of a special token in llguidance's bytes; no text has it."""
MAX_VISITS = 3
"""How often a token is taken where the same tokens are allowed, as long as there are others."""


def leads_to_end(matcher: LLMatcher, ending: Sequence[int]) -> bool:
    """Whether `ending` completes the text of `matcher`; microseconds."""
    return bool(matcher.validate_tokens(list(ending)) == len(ending))


def short_ending(matcher: LLMatcher, tokens: ClosingTokens, *, most: int) -> Ending | None:
    """At most `most` tokens that complete the unfinished text of `matcher`, which stays as it is; None without any.

    A walk takes forced text as it stands, and else the most promising token after which other tokens are allowed than
    before. About a millisecond.
    """
    walk = _Walk(matcher.deep_copy(), tokens)
    while not walk.walker.is_accepting():
        if walk.num_steps >= min(MAX_STEPS, MAX_VISITS * most) or walk.walker.is_stopped():
            return None
        if not (walk.take_forced() or walk.take_best()):
            return None
    ending = (*walk.path, tokens.eos_token_id)
    if not leads_to_end(matcher, ending):
        return None
    ending = _without_loop(matcher, ending, walk.positions)
    return ending if len(ending) <= most else None


def _without_loop(
    matcher: LLMatcher, ending: Ending, positions: Mapping[bytes, Sequence[int]]
) -> Ending:
    """`ending` without the longest stretch that begins and ends where the same tokens are allowed, if it may go."""
    spans = (
        (last - first, first) for some in positions.values() for first in some for last in some
    )
    for length, first in sorted(spans, reverse=True)[:MAX_CUTS]:
        shorter = ending[:first] + ending[first + length :]
        if length > 0 and leads_to_end(matcher, shorter):
            return shorter
    return ending


class _Walk:
    """A path from the state of a matcher."""

    def __init__(self, walker: LLMatcher, tokens: ClosingTokens) -> None:
        self.walker = walker
        self.path: list[int] = []
        self.num_steps = 0
        self.positions: defaultdict[bytes, list[int]] = defaultdict(list)
        """The lengths of the path where a choice was made among the tokens of each mask."""
        self._tokens = tokens
        self._visits: defaultdict[bytes, Counter[int]] = defaultdict(Counter)

    def take_forced(self) -> bool:
        """Take the tokens of text that has to follow, if there is any."""
        text = self._forced_text()
        if not text:
            return False
        ids = self._tokens.tokenizer.greedy_tokenize(text)
        ids = ids[: self.walker.validate_tokens(ids)]
        self.path += ids
        self.num_steps += len(ids)
        return bool(ids) and self.walker.consume_tokens(ids)

    def _forced_text(self) -> str:
        # On a copy: where special tokens have to follow, the call spoils the state of the matcher.
        forced = self.walker.deep_copy().compute_ff_bytes()
        return forced.partition(SPECIAL_MARK)[0].decode(errors="ignore")

    def take_best(self) -> bool:
        """Take the most promising token; False if there is none."""
        mask = self.walker.compute_bitmask()
        visits = self._visits[mask]
        self.positions[mask].append(len(self.path))
        allowed = self._tokens.among(mask)
        if allowed and self._tokens.is_progress(allowed[0]):
            return self._step(allowed[0])
        for id_ in allowed:
            if visits[id_] >= MAX_VISITS or not self._step(id_):
                continue
            if self._has_moved(mask):
                visits[id_] += 1
                return True
            visits[id_] = MAX_VISITS
            if not self._back():
                return False
        # Nothing leads elsewhere, as in the middle of a string of a least length.
        return bool(allowed) and self._step(allowed[0])

    def _step(self, id_: int) -> bool:
        self.num_steps += 1
        self.path.append(id_)
        return self.walker.consume_token(id_)

    def _back(self) -> bool:
        self.path.pop()
        return self.walker.rollback(1)

    def _has_moved(self, before: bytes) -> bool:
        """Whether other tokens are allowed than `before` the last one."""
        walker = self.walker
        return bool(
            walker.is_accepting() or self._forced_text() or walker.compute_bitmask() != before
        )


LEAST_MARGIN, MOST_MARGIN = 8, 64
MARGIN_SHARE = 8
"""A text is closed this share of its tokens early, since one token may lengthen its shortest ending by as many: a comma
begins an item."""
PATIENCE = 16
"""The least tokens until the next look where no ending was within the limit."""


@dataclass(frozen=True, slots=True)
class ClosingState:
    """What is known at a place; a matcher that goes back takes an earlier one."""

    next_look: int = 0
    """The place where the ending is looked at next: each look allows half of the slack to be used up."""
    ending: Ending = ()
    """It led to the end from the last place where it was looked at, or is empty."""
    began: int | None = None
    """The place from which on the text is `ending`; None while the model chooses."""


class Closing:
    """Follows one text. What it does depends only on the tokens and their limit.

    So a text that is computed again, or in other steps, is closed in the same place with the same tokens.
    """

    def __init__(
        self,
        tokens: ClosingTokens,
        limit: int,
        first: Ending | None = None,
        *,
        is_out_of_reach: bool = False,
    ) -> None:
        """A text of at most `limit` tokens.

        `first` is the ending of the empty text, if it is known; with `is_out_of_reach` it is known to exceed the limit.
        """
        self._tokens = tokens
        self.limit = limit
        self._margin = min(max(limit // MARGIN_SHARE, LEAST_MARGIN), MOST_MARGIN)
        next_look = self._later(0) if is_out_of_reach else 0
        self.state = ClosingState(next_look, first or ())

    def next_token(self, position: int) -> int | None:
        """The token that has to come after `position` tokens, which the last look was at; None for any."""
        state = self.state
        return None if state.began is None else state.ending[position - state.began]

    def look(self, matcher: LLMatcher, position: int) -> None:
        """See whether the text of `matcher`, which has `position` tokens, has to be closed now."""
        state = self.state
        if state.began is not None or position < state.next_look:
            return
        if matcher.is_accepting():
            self.state = replace(state, next_look=position + 1)
            return
        left, ending = self.limit - position, state.ending
        if not ending or not leads_to_end(matcher, ending):
            ending = short_ending(matcher, self._tokens, most=left) or ()
        slack = left - len(ending) - self._margin
        if not ending or left < len(ending):
            self.state = ClosingState(self._later(position), ending)
        elif slack <= 0:
            self.state = ClosingState(position, ending, position)
        else:
            self.state = ClosingState(position + max(1, slack // 2), ending)

    def _later(self, position: int) -> int:
        """The place of the next look, after one that found the limit out of reach."""
        return position + max(PATIENCE, (self.limit - position) * 3 // 4)
