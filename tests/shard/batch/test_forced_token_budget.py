"""Positions beyond one a decode: what a step fills of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_shard.batch.sequence_table import within_budget
from millrace_testing.engines.steps import ints


@pytest.mark.parametrize(
    ("num_required", "extras", "filled"),
    [
        (32, [0, 3, 0], [0, 0, 0]),
        (31, [3, 2], [1, 0]),
        (27, [0, 2, 4], [0, 2, 3]),
        (27, [0, 2, 3], [0, 2, 3]),
        (32, [7], [0]),
        (32, [8], [8]),
        (32, [3, 3, 2], [3, 3, 2]),
        (31, [7], [1]),
        (31, [8], [8]),
        (16, [3], [0]),
        (16, [4], [4]),
        (1, [16], [16]),
        (512, [7], [0]),
        (512, [8], [8]),
    ],
)
def test_a_tile_is_begun_only_where_it_is_worth_it(
    num_required: int, extras: list[int], filled: list[int]
) -> None:
    assert within_budget(ints(extras), num_required=num_required, tile=16).tolist() == filled


@given(
    extras=st.lists(st.integers(0, 20), max_size=40),
    num_required=st.integers(1, 600),
    tile=st.sampled_from([1, 4, 16]),
)
def test_all_of_them_or_what_the_last_tile_has_room_for(
    extras: list[int], num_required: int, tile: int
) -> None:
    filled = within_budget(ints(extras), num_required=num_required, tile=tile)
    assert (filled >= 0).all()
    assert (filled <= ints(extras)).all()
    waiting = sum(extras) - int(filled.sum())
    if waiting:
        tiles = -(-num_required // tile)
        assert num_required + int(filled.sum()) == tiles * tile
        assert tile > 1
        beyond = num_required + sum(extras) - tiles * tile
        assert beyond < tile / 2
        assert beyond < num_required // 4
        served = np.flatnonzero(filled < ints(extras))
        assert not filled[served[0] + 1 :].any(), "a row before one that is served waits"
