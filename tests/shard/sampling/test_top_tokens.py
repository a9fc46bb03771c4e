"""Candidates by a plain reading of the rule: the n likeliest, all that tie with the n-th, and no impossible one."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_shard.sampling.sampler import TIE_ROOM, TopTokens

SIZE = 3 * TIE_ROOM
INFINITY = float("inf")
values = st.sampled_from([-INFINITY, -3.0, -2.5, -2.0, -1.0, -0.5])
rows = st.lists(st.lists(values, min_size=SIZE, max_size=SIZE), min_size=1, max_size=4)


def expected(row: list[float], n: int) -> list[int]:
    last = sorted(row, reverse=True)[min(n, len(row)) - 1]
    return [i for i, value in enumerate(row) if value >= last and value > -INFINITY]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(rows, st.lists(st.integers(1, SIZE + 5), min_size=4, max_size=4))
def test_the_rule_holds_however_many_tie(table: list[list[float]], wanted: list[int]) -> None:
    mine = np.array(wanted[: len(table)])
    names = np.arange(len(table)) * 3
    top = TopTokens.of(torch.tensor(table), names, mine)
    found_rows, ids, logprobs = top.chosen(top.best)
    for name, row, n in zip(names, table, mine.tolist(), strict=True):
        found = sorted(ids[found_rows == name].tolist())
        assert found == expected(row, n)
        assert sorted(logprobs[found_rows == name]) == sorted(row[i] for i in found)
    assert len(ids) == sum(len(expected(row, n)) for row, n in zip(table, mine, strict=True))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(rows, st.lists(st.integers(1, SIZE + 5), min_size=4, max_size=4), st.randoms())
def test_the_rule_holds_among_all_that_is_possible(
    table: list[list[float]], wanted: list[int], random: Random
) -> None:
    """Tokens of a row in any order, under their ids."""
    mine = np.array(wanted[: len(table)])
    ids = [random.sample(range(1000), SIZE) for _ in table]
    top = TopTokens.among(torch.tensor(ids), torch.tensor(table), np.arange(len(table)), mine)
    found_rows, found_ids, _ = top.chosen(top.best)
    for i, (row, n) in enumerate(zip(table, mine.tolist(), strict=True)):
        found = sorted(found_ids[found_rows == i].tolist())
        assert found == sorted(ids[i][j] for j in expected(row, n))


@pytest.mark.parametrize("ties", [TIE_ROOM, TIE_ROOM + 1, TIE_ROOM + 2, SIZE])
def test_the_whole_row_is_read_only_when_ties_go_on(
    ties: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def fetch(row: torch.Tensor) -> np.ndarray:
        read.append(len(row))
        return row.numpy()

    monkeypatch.setattr("millrace_shard.sampling.sampler.download_on_side_stream", fetch)
    logprobs = torch.full((1, SIZE), -9.0)
    logprobs[0, -ties:] = -1.0
    top = TopTokens.of(logprobs, np.array([0]), np.array([1]))
    assert top.best.shape == (2, 1, 1 + TIE_ROOM)
    _, ids, _ = top.chosen(top.best)
    assert sorted(ids.tolist()) == list(range(SIZE - ties, SIZE))
    assert read == ([SIZE] if ties > TIE_ROOM else [])
