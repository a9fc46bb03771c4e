"""Finds a short way from the state of a matcher to the end of its text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from llguidance import LLMatcher

from millrace_shard.structured_output.closing.closing_tokens import ClosingTokens

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
    ending = _without_loop(matcher, ending, walk.places)
    return ending if len(ending) <= most else None


def _without_loop(
    matcher: LLMatcher, ending: Ending, places: Mapping[bytes, Sequence[int]]
) -> Ending:
    """`ending` without the longest stretch that begins and ends where the same tokens are allowed, if it may go."""
    spans = ((last - first, first) for some in places.values() for first in some for last in some)
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
        self.places: defaultdict[bytes, list[int]] = defaultdict(list)
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
        """The text that has to follow, up to a special token."""
        # On a copy: where special tokens have to follow, the call spoils the state of the matcher.
        found = self.walker.deep_copy().compute_ff_bytes()
        return found.partition(SPECIAL_MARK)[0].decode(errors="ignore")

    def take_best(self) -> bool:
        """Take the most promising token; False if there is none."""
        mask = self.walker.compute_bitmask()
        visits = self._visits[mask]
        self.places[mask].append(len(self.path))
        allowed = self._tokens.among(mask)
        if allowed and self._tokens.closes(allowed[0]):
            # Each bracket of many is progress, although the same tokens are allowed behind it.
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
