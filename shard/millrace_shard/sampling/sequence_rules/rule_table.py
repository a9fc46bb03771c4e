"""The rules of all sequences, by slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from millrace_proto.sampling import SequenceRules
from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload
from millrace_shard.sampling.sampling_rows import SamplingRows, is_too_short
from millrace_shard.sampling.sequence_rules.bans import (
    NEGATIVE_INFINITY,
    AllowedTokens,
    BadWords,
)
from millrace_shard.sampling.sequence_rules.dry_penalty import DryPenalty


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
        """Replace the rules of `slot`."""
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
        """Remove all rules."""
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
                position, _ = self._place(rows, row)
                rules.dry.apply(line, tokens, position, int(rows.positions[row]))
            if rules.allowed is not None:
                rules.allowed.apply(line)
            if rules.bad_words is not None:
                position, num_prompt = self._place(rows, row)
                rules.bad_words.apply(line, tokens, position, num_prompt)
            if rules.stop_ids is not None and is_short[row]:
                line[rules.stop_ids] = NEGATIVE_INFINITY

    def _place(self, rows: SamplingRows, row: int) -> tuple[Tensor, Tensor]:
        """Return the number of tokens before a row's, and of those in the prompt, each [] on the device."""
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
