"""Rules that few sequences have, by slot: tokens that may not come next, and the DRY penalty for repeated passages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace_proto.sampling import Dry, SequenceRules
from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload
from millrace_shard.sampling.penalties import finite
from millrace_shard.sampling.sampling_rows import SamplingRows, is_too_short

NEGATIVE_INFINITY = float("-inf")
NO_ID = -1
"""Stands before the beginning of a passage that is shorter than the longest one."""


class AllowedTokens:
    """The only tokens that a sequence may have."""

    def __init__(self, ids: tuple[int, ...], device: torch.device) -> None:
        self._ids = upload(np.unique(np.array(ids, dtype=np.int64)), device)

    def apply(self, line: Tensor) -> None:
        """Forbid all others in `line` [V] float32, in place."""
        allowed = line[self._ids]
        line.fill_(NEGATIVE_INFINITY)
        line[self._ids] = allowed


class BadWords:
    """Passages that the generated tokens of a sequence may not have."""

    def __init__(self, words: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self._width = max(map(len, words)) - 1
        beginnings = np.full((len(words), self._width), NO_ID, dtype=np.int64)
        for row, word in zip(beginnings, words, strict=True):
            row[self._width - len(word) + 1 :] = word[:-1]
        last, last_index = np.unique([word[-1] for word in words], return_inverse=True)
        self._beginnings = upload(beginnings, device)
        self._last = upload(last.astype(np.int64), device)
        # [distinct last ids, words]: which words end with which id.
        self._ends = upload(last_index[None, :] == np.arange(len(last))[:, None], device)

    def apply(self, line: Tensor, tokens: Tensor, position: Tensor, num_prompt: Tensor) -> None:
        """Forbid in `line` [V] what would complete a passage, in place.

        The first `position` [] of `tokens` [L] int32 are the sequence's; tokens of the prompt do not count.
        """
        positions = position - self._width + torch.arange(self._width, device=line.device)
        recent = tokens[positions.clamp(min=0)].long()
        fits = (self._beginnings == NO_ID) | (
            (self._beginnings == recent) & (positions >= num_prompt)
        )
        completes = (self._ends & fits.all(-1)).any(-1)
        line[self._last] = line[self._last].masked_fill(completes, NEGATIVE_INFINITY)


MAX_LENGTH = 50
"""Longer passages count as this long: the penalty is beyond every score by then."""
FLOAT32 = np.finfo(np.float32)


class DryPenalty:
    """Lowers the tokens that would extend a repeated passage."""

    def __init__(self, dry: Dry, vocab_size: int, device: torch.device) -> None:
        self._window = dry.window
        is_breaker = np.zeros(vocab_size, dtype=np.bool_)
        is_breaker[list(dry.breakers)] = True
        self._is_breaker = upload(is_breaker, device)
        self._penalties = upload(_penalties(dry), device)

    def apply(self, line: Tensor, tokens: Tensor, position: Tensor, most: int) -> None:
        """Change `line` [V] float32 in place; finite scores stay finite.

        The first `position` [] of `tokens` [L] int32 are the sequence's, at most `most`.
        """
        width = min(most, self._window or most)
        positions = position - width + torch.arange(width, device=line.device)
        held = tokens[positions.clamp(min=0)].long()
        # Before the first token there is nothing: it equals no token, and ends every passage.
        can_match = (positions >= 0) & ~self._is_breaker[held]
        lengths = _lengths(held, can_match)
        following = held[1:]
        longest = torch.zeros(len(line), dtype=torch.int64, device=line.device)
        longest.scatter_reduce_(
            0, following, lengths.masked_fill(self._is_breaker[following], 0), "amax"
        )
        line.copy_(finite(line - self._penalties[longest], line))


def _lengths(held: Tensor, can_match: Tensor) -> Tensor:
    """Return how many tokens up to each but the last of `held` [N] equal those up to the last: [N - 1] int64."""
    count = len(held) - 1
    lengths = torch.zeros(count, dtype=torch.int64, device=held.device)
    goes_on = torch.ones(count, dtype=torch.bool, device=held.device)
    for back in range(min(MAX_LENGTH, count)):
        end = len(held) - 1 - back
        # The token `back` positions before each of the positions `back` to `count`.
        equal = (held[: count - back] == held[end]) & can_match[: count - back] & can_match[end]
        goes_on[back:] &= equal
        goes_on[:back] = False
        lengths += goes_on
    return lengths


def _penalties(dry: Dry) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the penalty of each length up to MAX_LENGTH, computed in float64; no passage has none."""
    lengths = np.arange(MAX_LENGTH + 1)
    is_free = lengths < max(1, dry.allowed_length)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        penalties = dry.multiplier * np.float64(dry.base) ** (lengths - dry.allowed_length)
    # Zero times an infinite power is NaN: the penalty is then zero.
    bounded = np.nan_to_num(np.where(is_free, 0.0, penalties), nan=0.0)
    clipped: np.ndarray[tuple[int], np.dtype[np.float32]] = np.clip(bounded, 0, FLOAT32.max).astype(
        np.float32
    )
    return clipped


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Rules on the device."""

    dry: DryPenalty | None
    allowed: AllowedTokens | None
    bad_words: BadWords | None
    stop_ids: Tensor | None
    """[m] int64."""


class RuleTable:
    """Rules by slot, over the token table [slots, length] int32. Only the engine thread uses it."""

    def __init__(self, token_table: Tensor) -> None:
        self._token_table = token_table
        self._device = token_table.device
        self._rules: dict[int, SequenceRules] = {}
        self._prepared: dict[int, _Prepared] = {}

    def put(self, slot: int, rules: SequenceRules) -> None:
        self._prepared.pop(slot, None)
        self._rules.pop(slot, None)
        if rules:
            self._rules[slot] = rules

    def drop(self, slots: Ints) -> None:
        """Remove the rules of `slots`; slots without rules are ignored."""
        for slot in slots.tolist():
            self._rules.pop(slot, None)
            self._prepared.pop(slot, None)

    def clear(self) -> None:
        self._rules.clear()
        self._prepared.clear()

    def apply(self, logits: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        """Apply the rules of the `chosen` rows to `logits` [R, V] float32, in place, one row after the other.

        The order is: the DRY penalty, allowed tokens, passages that are not allowed, stop tokens that come too early.
        """
        is_short = is_too_short(rows) & ~rows.parameters["is_guided"]
        for row in chosen.tolist():
            slot = int(rows.table_rows[row])
            rules = self._of(slot, logits.shape[1])
            line, tokens = logits[row], self._token_table[slot]
            if rules.dry is not None:
                position, _ = self._token_counts(rows, row)
                rules.dry.apply(line, tokens, position, int(rows.positions[row]))
            if rules.allowed is not None:
                rules.allowed.apply(line)
            if rules.bad_words is not None:
                position, num_prompt = self._token_counts(rows, row)
                rules.bad_words.apply(line, tokens, position, num_prompt)
            if rules.stop_ids is not None and is_short[row]:
                line[rules.stop_ids] = NEGATIVE_INFINITY

    def _token_counts(self, rows: SamplingRows, row: int) -> tuple[Tensor, Tensor]:
        """The number of tokens before a row's token, and the length of its prompt, each [] on the device."""
        if rows.device is None:
            num_prompt = rows.parameters["num_prompt"][row]
            both = upload(np.array([rows.positions[row], num_prompt], dtype=np.int64), self._device)
            return both[0], both[1]
        one = rows.device.select(np.array([row]))
        return one.positions[0], one.column("num_prompt")[0, 0]

    def _of(self, slot: int, vocab_size: int) -> _Prepared:
        prepared = self._prepared.get(slot)
        if prepared is None:
            rules = self._rules[slot]
            device = self._device
            stop_ids = np.array(rules.stop_ids, dtype=np.int64)
            prepared = self._prepared[slot] = _Prepared(
                None if rules.dry is None else DryPenalty(rules.dry, vocab_size, device),
                AllowedTokens(rules.allowed_ids, device) if rules.allowed_ids else None,
                BadWords(rules.bad_words, device) if rules.bad_words else None,
                upload(stop_ids, device) if rules.stop_ids else None,
            )
        return prepared
