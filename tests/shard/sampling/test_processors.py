"""Masks, biases, the watermark and the ban on ending too soon, each by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace_proto.sampling import Sampling
from millrace_shard.kernels.build import BuildError, load_operators
from millrace_shard.kernels.scores import MaskTable, RowMasks
from millrace_shard.sampling.penalties import BiasTable
from millrace_shard.sampling.watermark import Watermark
from millrace_testing.engines.sampling_driver import sample
from millrace_testing.engines.sampling_reference import Row, is_green

NEGATIVE_INFINITY = float("-inf")
CPU = torch.device("cpu")


def forbid(
    scores: Tensor, masks: RowMasks, *, compiled: bool = True, most_elements: int = 10_000
) -> None:
    """By the compiled operator or in plain torch."""
    if compiled:
        try:
            load_operators()
        except BuildError as error:
            pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millrace_shard.kernels.scores.operators_loaded", lambda: compiled)
        MaskTable(CPU).forbid(scores, masks, most_elements=most_elements)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    vocab=st.integers(1, 100),
    words=st.integers(1, 4),
    seed=st.integers(0, 1000),
    most_elements=st.sampled_from([1, 70, 10_000]),
)
def test_a_mask_bans_tokens_without_a_bit_only_in_its_row(
    compiled: bool, vocab: int, words: int, seed: int, most_elements: int
) -> None:
    random = np.random.default_rng(seed)
    bits = random.integers(-(2**31), 2**31, (3, words)).astype(np.int32)
    rows = random.permutation(5)[:3]
    scores = torch.tensor(random.standard_normal((5, vocab)), dtype=torch.float32)
    expected = scores.clone()
    for row, mask in zip(rows.tolist(), bits.tolist(), strict=True):
        for id_ in range(vocab):
            word = mask[id_ // 32] if id_ // 32 < words else 0
            if not word >> (id_ % 32) & 1:
                expected[row, id_] = NEGATIVE_INFINITY
    masks = RowMasks(rows=rows, bits=torch.from_numpy(bits))
    forbid(scores, masks, compiled=compiled, most_elements=most_elements)
    assert torch.equal(scores, expected)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_a_mask_makes_no_row_finite(compiled: bool) -> None:
    scores = torch.zeros(2, 40)
    scores[0, 5], scores[1, 39] = float("nan"), float("inf")
    masks = RowMasks(rows=np.array([0, 1]), bits=torch.zeros((2, 2), dtype=torch.int32))
    forbid(scores, masks, compiled=compiled)
    assert scores.isnan().nonzero().tolist() == [[0, 5], [1, 39]]


def test_masks_that_are_applied_by_several_threads_are_exact() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(-(2**31), 2**31, (9, 5000)).astype(np.int32)
    scores = torch.zeros(9, 160_000)
    forbid(scores, RowMasks(rows=np.arange(9)[::-1], bits=torch.from_numpy(bits)))
    is_allowed = np.unpackbits(bits[::-1].copy().view(np.uint8), axis=1, bitorder="little")
    assert np.array_equal(scores.numpy() == 0, is_allowed == 1)


def test_a_mask_of_no_row_is_refused() -> None:
    bits = torch.zeros((1, 2), dtype=torch.int32)
    with pytest.raises((RuntimeError, IndexError)):
        forbid(torch.zeros(2, 40), RowMasks(rows=np.array([2]), bits=bits))


def test_a_row_whose_mask_allows_nothing_fails_no_other_row() -> None:
    rows = [
        Row(
            logits=[1.0, 2.0, 3.0],
            prompt=[0],
            generated=[],
            parameters=Sampling(do_sample=bool(i % 2)),
            allowed=frozenset() if i in (1, 2) else None,
        )
        for i in range(4)
    ]
    result = sample(rows, [1] * 4)
    assert result.failed.tolist() == [False, True, True, False]
    assert all(0 <= id_ < 3 for id_ in result.ids.tolist())


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, 1),
        (frozenset({0, 1, 2}), 1),
        (frozenset({0, 2}), 2),
        (frozenset({0}), 0),
        (frozenset({0, 3}), 0),
    ],
    ids=["no-mask", "all", "one-other", "end-alone", "both-ends"],
)
def test_the_end_is_banned_until_enough_is_generated_unless_nothing_else_is_allowed(
    allowed: frozenset[int] | None, expected: int
) -> None:
    logits = [9.0, 3.0, 2.0, 5.0]
    row = Row(
        logits=logits,
        prompt=[1],
        generated=[2, 2],
        parameters=Sampling(),
        min_new_tokens=3,
        eos=(0, 3),
        allowed=allowed,
    )
    result = sample([row])
    assert result.ids.tolist() == [expected]
    assert not result.failed.any()
    long_enough = Row(
        logits=logits,
        prompt=[1],
        generated=[2, 2, 2],
        parameters=Sampling(),
        min_new_tokens=3,
        eos=(0, 3),
        allowed=allowed,
    )
    assert sample([long_enough]).ids.tolist() == [0]


def biased(table: BiasTable, rows: list[int], slots: list[int]) -> list[list[float]]:
    """The biases that the table adds to zeros [4, 5]."""
    scores = torch.zeros(4, 5)
    table.add(scores, np.array(rows), np.array(slots))
    return scores.tolist()


def test_biases_follow_their_slots_to_any_rows() -> None:
    table = BiasTable(CPU)
    table.put(7, ((0, 1.5), (4, -2.0)))
    table.put(2, ((3, 8.0),))
    none = [0.0] * 5
    first, second = [1.5, 0.0, 0.0, 0.0, -2.0], [0.0, 0.0, 0.0, 8.0, 0.0]
    for _ in range(2):
        assert biased(table, [0, 3], [7, 2]) == [first, none, none, second]
        assert biased(table, [1, 2], [2, 7]) == [none, second, first, none]
        # A sequence with several positions in a step has a row for each.
        assert biased(table, [0, 1, 3], [7, 7, 2]) == [first, first, none, second]
    table.put(7, ((1, 1.0),))
    assert biased(table, [0, 3], [7, 2]) == [[0.0, 1.0, 0.0, 0.0, 0.0], none, none, second]


def test_biases_are_forgotten_with_their_sequences() -> None:
    table = BiasTable(CPU)
    ways: list[Callable[[], None]] = [
        lambda: table.drop(np.array([5, 1])),
        table.clear,
        lambda: table.put(1, ()),
    ]
    for forget in ways:
        table.put(1, ((0, 1.0),))
        assert biased(table, [0], [1])[0][0] == 1.0
        forget()
        with pytest.raises(KeyError):
            biased(table, [0], [1])


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    previous=st.lists(st.integers(0, 2**18), min_size=1, max_size=4),
    vocab=st.integers(1, 300),
    gamma=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.99, 1.0]),
)
def test_green_ids_match_the_definition(previous: list[int], vocab: int, gamma: float) -> None:
    result = Watermark(gamma=gamma).green(torch.tensor(previous), vocab)
    expected = [[is_green(before, id_, gamma) for id_ in range(vocab)] for before in previous]
    assert result.tolist() == expected


@pytest.mark.parametrize("gamma", [0.1, 0.5, 0.9])
def test_green_ids_are_a_share_of_the_vocabulary_and_others_after_each_token(gamma: float) -> None:
    """Counts and overlaps within five standard deviations of what independent coins give."""
    num_lists, vocab = 200, 20_000
    green = Watermark(gamma=gamma).green(torch.arange(num_lists), vocab).double()
    width = 5 * math.sqrt(vocab * gamma * (1 - gamma))
    assert (green.sum(1) - gamma * vocab).abs().max() < width
    overlaps = green @ green.T
    overlaps.fill_diagonal_(gamma**2 * vocab)
    width = 5 * math.sqrt(vocab * gamma**2 * (1 - gamma**2))
    assert (overlaps - gamma**2 * vocab).abs().max() < width
    per_id = green.sum(0)
    assert (per_id - gamma * num_lists).abs().max() < 6 * math.sqrt(num_lists * gamma * (1 - gamma))


def test_a_watermark_is_detectable_with_gamma() -> None:
    """200 tokens drawn from flat scores: the share of green ones is far above gamma, without it near."""
    shares = []
    for marked in (True, False):
        ids = [1]
        for _ in range(200):
            row = Row(
                logits=[0.0] * 50,
                prompt=[1],
                generated=ids[1:],
                parameters=Sampling(do_sample=True, seed=3, watermark=marked),
                gamma=0.25,
                delta=2.0,
            )
            ids.append(int(sample([row]).ids))
        green = sum(is_green(a, b, 0.25) for a, b in pairwise(ids))
        shares.append(green / 200)
    # By the scores it is e**2 / (e**2 + 3), 0.71.
    assert shares[0] > 0.6
    assert 0.15 < shares[1] < 0.35
