"""BlockTable against its invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millrace_router.blocks import BlockTable


class BlockTableMachine(RuleBasedStateMachine):
    """Random reservations, growth and releases against a plain model of ownership."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(20, 4)
        self.owned: dict[int, list[int]] = {}
        self.reserved: dict[int, int] = {}
        self.slot = 0

    @rule(num_tokens=st.integers(1, 90))
    def reserve(self, num_tokens: int) -> None:
        needed = -(-num_tokens // 4)
        fits = needed + sum(-(-tokens // 4) for tokens in self.reserved.values()) <= 19
        assert self.table.fits(num_tokens) == fits
        self.slot += 1
        if fits:
            self.table.reserve(self.slot, num_tokens)
            self.owned[self.slot], self.reserved[self.slot] = [], num_tokens
        else:
            with pytest.raises(ValueError, match="cannot reserve"):
                self.table.reserve(self.slot, num_tokens)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.owned)))
        num_tokens = data.draw(st.integers(0, self.reserved[slot]))
        self.owned[slot] += self.table.grow(slot, num_tokens)
        assert len(self.owned[slot]) * 4 >= num_tokens

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.owned)))
        self.table.release(slot)
        del self.owned[slot], self.reserved[slot]

    @invariant()
    def counts_agree(self) -> None:
        blocks = [block for owned in self.owned.values() for block in owned]
        assert len(blocks) == len(set(blocks)), "a block has two owners"
        assert 0 not in blocks
        assert self.table.num_in_use == len(blocks)
        assert self.table.num_reserved == sum(-(-tokens // 4) for tokens in self.reserved.values())


TestBlockTable = BlockTableMachine.TestCase


def test_growth_beyond_the_reservation_is_refused() -> None:
    table = BlockTable(8, 4)
    table.reserve(0, 8)
    table.grow(0, 8)
    with pytest.raises(ValueError, match="beyond its reservation"):
        table.grow(0, 9)


@given(st.integers(-3, 1), st.integers(-1, 4))
def test_an_empty_table_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="no block"):
        BlockTable(num_blocks, block_size)
