"""Steps of the same rows as the one before, against the layout that is worked out anew; plain decodes likewise."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from millrace_shard.arrays import Ints, no_ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.device_tables import BatchLimits
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.batch.step_layout import MultiTokenRows, StepLayout
from millrace_shard.errors import StepInvalid
from millrace_testing.engines.steps import ints

CPU = torch.device("cpu")
BLOCK_SIZE = 4
MAX_TOKENS = 21
NUM_SLOTS = 5
PLAIN = (1,)
ALLOWANCES = st.sampled_from((PLAIN, PLAIN, (2,), (1, 3), (3, 1, 1)))
"""Positions that slots are allowed, in turn."""
LIMITS = BatchLimits(
    max_batch_size=NUM_SLOTS,
    max_tokens=MAX_TOKENS,
    num_blocks=1000,
    block_size=BLOCK_SIZE,
    vocab_size=50,
    padding_block=999,
    max_draft_tokens=0,
    row_tile=1,
)


def flat(value: Any) -> Any:
    """A dataclass of columns as plain values."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: flat(getattr(value, field.name)) for field in fields}
    if isinstance(value, tuple):
        return [flat(part) for part in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value.tolist() if isinstance(value, np.ndarray) else value


def anew(batch: Batch, step: Forward) -> tuple[StepLayout, MultiTokenRows]:
    step, _ = batch.without_invalid(step)
    rows = batch.sequences.rows(step)
    return batch.sequences.lay_out(
        rows, np.zeros(len(rows.slots), dtype=np.int64)
    ), rows.multi_token


def tables(ragged: dict[str, Any]) -> list[list[int]]:
    """The blocks that are read: those that keys lie in."""
    counts = [-(-context // BLOCK_SIZE) for context in ragged["num_context"]]
    return [row[:count] for row, count in zip(ragged["block_tables"], counts, strict=True)]


class Decoding(RuleBasedStateMachine):
    """Sequences that come, go, grow and decode in any order. Their tokens are whatever the last draw was."""

    @initialize()
    def begin(self) -> None:
        self.batch = Batch(LIMITS, CPU)
        self.lengths: dict[int, int] = {}
        self.num_taken = 0
        self.last = no_ints()

    @rule(slot=st.integers(0, NUM_SLOTS - 1), length=st.integers(1, 6))
    def admit(self, slot: int, length: int) -> None:
        if slot in self.lengths:
            return
        self.take(slot, length)
        step = Forward(chunk_slots=ints([slot]), chunk_tokens=ints([length]))
        assert self.batch.sequences.repeat(step) is None
        layout, _ = anew(self.batch, step)
        self.run(layout, ints([1]))
        self.lengths[slot] = length + 1

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.drop_slot(data.draw(st.sampled_from(sorted(self.lengths))))

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), allowances=ALLOWANCES)
    def decode_some(self, data: st.DataObject, allowances: tuple[int, ...]) -> None:
        """In any order."""
        some = data.draw(st.sets(st.sampled_from(sorted(self.lengths)), min_size=1))
        self.decode(ints(data.draw(st.permutations(sorted(some)))), allowances)

    @precondition(lambda self: self.lengths)
    @rule(steps=st.lists(st.tuples(ALLOWANCES, st.booleans()), min_size=1, max_size=6))
    def decode_all(self, steps: list[tuple[tuple[int, ...], bool]]) -> None:
        for allowances, jumps in steps:
            self.decode(ints(sorted(self.lengths)), allowances, jumps=jumps)

    @precondition(lambda self: self.lengths)
    @rule(times=st.integers(1, 5))
    def decode_without_growing(self, times: int) -> None:
        for _ in range(times):
            self.step(ints(sorted(self.lengths)))

    @precondition(lambda self: len(self.last) > 0)
    @rule()
    def decode_as_before(self) -> None:
        """Sequences that have left."""
        self.step(self.last)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def supplant(self, data: st.DataObject) -> None:
        """Another one in the place of one of the last rows, which has room and has not computed its prompt."""
        self.decode(ints(sorted(self.lengths)), PLAIN)
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        if data.draw(st.booleans()):
            self.clear()
        else:
            self.drop_slot(slot)
        self.take(slot, MAX_TOKENS)
        self.step(self.last)
        self.batch.apply(BatchChange(dropped_slots=ints([slot])))

    @rule()
    def clear(self) -> None:
        self.batch.clear()
        self.lengths.clear()

    def drop_slot(self, slot: int) -> None:
        self.batch.apply(BatchChange(dropped_slots=ints([slot])))
        del self.lengths[slot]

    def decode(self, slots: Ints, allowances: tuple[int, ...], *, jumps: bool = False) -> None:
        """Run decodes, with one more block for each row that needs one."""
        lengths = ints(self.lengths[slot] for slot in slots.tolist())
        self.grow(slots[self.batch.blocks.capacity(slots) < lengths], 1)
        self.step(slots, allowances, jumps=jumps)

    def step(
        self, slots: Ints, allowances: tuple[int, ...] = PLAIN, *, jumps: bool = False
    ) -> None:
        """Run a step; with `jumps`, rows yield as many tokens as allowed."""
        self.last = slots
        wide = no_ints()
        if allowances != PLAIN:
            wide = ints(allowances[slot % len(allowances)] for slot in slots.tolist())
        step = Forward(decode_slots=slots, decode_tokens=wide)
        repeated = self.batch.sequences.repeat(step)
        try:
            expected = anew(self.batch, step)
        except StepInvalid:
            assert repeated is None
            return
        if repeated is not None:
            assert flat(repeated) == flat(expected)
        layout, _ = expected if repeated is None else repeated
        ends = (layout.starts + layout.counts)[layout.yields]
        assert ends.tolist() == [self.lengths[slot] for slot in layout.yield_slots.tolist()]
        counts = layout.max_new_tokens if jumps else np.ones_like(layout.yields)
        self.run(layout, counts)
        for slot, count in zip(layout.yield_slots.tolist(), counts.tolist(), strict=True):
            self.lengths[slot] += count

    def take(self, slot: int, length: int) -> None:
        """Admit a sequence with the blocks that its prompt needs."""
        sequence = Sequence(slot=slot, request_id=1, input_ids=ints(range(length)))
        self.batch.apply(BatchChange(admitted=(sequence,)))
        self.grow(ints([slot]), -(-length // BLOCK_SIZE))

    def run(self, layout: StepLayout, counts: Ints) -> None:
        batch = self.batch
        if not len(layout.slots):
            return
        usual = batch.ragged(layout.slots, layout.starts, layout.counts, layout.logit_rows)
        if layout.is_plain:
            quick = flat(batch.ragged_decodes(layout.slots, layout.starts))
            expected = flat(usual)
            assert tables(quick) == tables(expected)
            for name in ("block_tables", "all_logits"):
                del quick[name], expected[name]
            assert quick == expected
        ids = torch.arange(len(layout.sampled)) + 7
        batch.put(layout, ids, torch.zeros(len(ids), dtype=torch.bool))
        batch.sequences.commit(layout, counts)

    def grow(self, slots: Ints, count: int) -> None:
        blocks = 1 + (np.arange(len(slots) * count) + self.num_taken) % 998
        self.num_taken += len(blocks)
        try:
            self.batch.apply(BatchChange(grown_slots=np.repeat(slots, count), grown_blocks=blocks))
        except StepInvalid:
            # Of blocks that another one owns still, or of more than fit.
            return


@pytest.mark.parametrize("allowed", [(), (1, 5)], ids=["plain", "guided"])
def test_the_same_rows_repeat_while_they_have_room(allowed: tuple[int, ...]) -> None:
    batch = Batch(LIMITS, CPU)
    slots = ints([3, 1])
    admitted = tuple(Sequence(slot=slot, request_id=slot, input_ids=ints([7])) for slot in (3, 1))
    batch.apply(BatchChange(admitted=admitted, grown_slots=slots, grown_blocks=ints([1, 2])))
    prompts = Forward(chunk_slots=slots, chunk_tokens=ints([1, 1]))
    batch.sequences.commit(anew(batch, prompts)[0], np.ones(2, dtype=np.int64))
    decodes = Forward(decode_slots=slots, decode_tokens=ints(allowed))
    batch.sequences.commit(anew(batch, decodes)[0], np.ones(2, dtype=np.int64))
    for position in (2, 3):
        repeated = batch.sequences.repeat(decodes)
        assert repeated is not None
        layout, wide = repeated
        assert layout.starts.tolist() == [position, position]
        assert wide.slots.tolist() == [
            slot for slot, most in zip((3, 1), allowed, strict=False) if most > 1
        ]
        batch.sequences.commit(layout, np.ones(2, dtype=np.int64))
    assert batch.sequences.repeat(decodes) is None
    batch.apply(BatchChange(grown_slots=slots, grown_blocks=ints([3, 4])))
    assert batch.sequences.repeat(decodes) is not None


def test_a_row_that_may_go_on_by_several_tokens_repeats_up_to_its_last_position() -> None:
    batch = Batch(LIMITS, CPU)
    slots = ints([2])
    blocks = ints(range(1, 2 + MAX_TOKENS // BLOCK_SIZE))
    batch.apply(
        BatchChange(
            admitted=(Sequence(slot=2, request_id=1, input_ids=ints([7])),),
            grown_slots=np.repeat(slots, len(blocks)),
            grown_blocks=blocks,
        )
    )
    prompt = Forward(chunk_slots=slots, chunk_tokens=ints([1]))
    batch.sequences.commit(anew(batch, prompt)[0], ints([1]))
    decode = Forward(decode_slots=slots, decode_tokens=ints([5]))
    batch.sequences.commit(anew(batch, decode)[0], ints([1]))
    for _ in range(2, MAX_TOKENS):
        repeated = batch.sequences.repeat(decode)
        assert repeated is not None
        assert flat(repeated) == flat(anew(batch, decode))
        batch.sequences.commit(repeated[0], ints([1]))
    assert batch.sequences.repeat(decode) is None


TestDecoding = Decoding.TestCase
TestDecoding.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
