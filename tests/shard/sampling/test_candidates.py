"""Rows worked out on their likeliest tokens alone, against the same over the whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace_proto.sampling import Sampling
from millrace_shard.batch.sequence import PARAMETERS, Sequence
from millrace_shard.sampling import warpers as warpers_module
from millrace_shard.sampling.warpers import (
    NUM_CANDIDATES,
    CandidateWarpers,
    apply_temperature,
    find_candidates,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
)

NEGATIVE_INFINITY = float("-inf")


@pytest.mark.parametrize("size", [5, 256, 257, 16_384, 16_385, 16_447, 50_257, 128_000])
def test_candidates_are_the_greatest_scores_under_their_ids(size: int) -> None:
    scores = torch.randn(3, size, generator=torch.Generator().manual_seed(size)).bfloat16().float()
    scores[1] = scores[1].sort().values
    scores[2, : size // 2] = NEGATIVE_INFINITY
    found = find_candidates(scores, None)
    width = min(size, NUM_CANDIDATES)
    assert torch.equal(found.scores, scores.sort(descending=True).values[:, :width])
    assert torch.equal(scores.gather(1, found.ids), found.scores)
    assert all(len(set(ids)) == width for ids in found.ids.tolist())
    assert found.are_all == (size == width)


def test_the_first_is_as_likely_as_in_the_whole_row_at_its_temperature() -> None:
    scores = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(2)) * 3
    temperature = torch.tensor([[1.0], [0.3], [2.0], [1e-30]])
    found = find_candidates(scores, temperature)
    scaled = (scores - scores.amax(-1, keepdim=True)).double() / temperature
    assert found.best_probability is not None
    expected = scaled.softmax(-1).amax(-1)
    torch.testing.assert_close(found.best_probability[:, 0].double(), expected, rtol=1e-5, atol=0)


def parameters_of(kinds: list[Sampling]) -> np.ndarray:
    columns = np.zeros(len(kinds), dtype=PARAMETERS)
    for i, kind in enumerate(kinds):
        ids = np.zeros(1, dtype=np.int64)
        columns[i] = Sequence(slot=0, request_id=0, input_ids=ids, parameters=kind).columns()
    return columns


def over_the_vocabulary(scores: Tensor, kind: Sampling) -> Tensor:
    """One row [1, V], by the warpers of whole rows."""

    def column(value: float) -> Tensor:
        return torch.tensor([[value]], dtype=torch.float32)

    scores = apply_temperature(scores, column(kind.temperature))
    if kind.top_k:
        scores = keep_top_k(scores, torch.tensor([[kind.top_k]]), kind.top_k)
    if kind.top_p < 1:
        scores = keep_top_p(scores, column(kind.top_p))
    if kind.typical_p < 1:
        scores = keep_typical(scores, column(kind.typical_p))
    return keep_min_p(scores, column(kind.min_p))


shared = {
    "temperature": st.sampled_from([1.0, 0.6, 1.3]),
    "typical_p": st.sampled_from([1.0, 1.0, 0.5]),
    "min_p": st.sampled_from([0.0, 0.02, 0.3]),
}
by_rank = st.builds(
    Sampling,
    top_k=st.integers(1, 7),
    top_p=st.sampled_from([1.0, 0.93, 0.31]),
    **shared,
)
by_mass = st.builds(Sampling, top_p=st.sampled_from([0.99, 0.83, 0.31]), **shared)
rows_of_scores = st.binary(min_size=50, max_size=50).map(
    lambda row: [(n % 49 - 24) / 3 for n in row]
)
"""Out of bytes, which are drawn far faster than as many numbers."""
tables = st.lists(rows_of_scores, min_size=1, max_size=4)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(tables, st.data())
@pytest.mark.parametrize("kinds", [by_rank, by_mass], ids=["by-rank", "by-mass"])
def test_complete_rows_keep_what_is_kept_over_the_vocabulary(
    kinds: st.SearchStrategy[Sampling], table: list[list[float]], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(kinds, min_size=len(table), max_size=len(table)))
    scores = torch.tensor(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warpers_module, "NUM_CANDIDATES", 8)
        patch.setattr(warpers_module, "BLOCKS", (2,))
        warpers = CandidateWarpers(parameters_of(chosen), torch.device("cpu"))
        has_mass = not chosen[0].top_k
        found = find_candidates(scores, warpers.temperature if has_mass else None)
        left, is_complete = warpers.apply(found)
    for i, kind in enumerate(chosen):
        if is_complete[i]:
            expected = over_the_vocabulary(scores[i : i + 1], kind)[0]
            mine = found.ids[i][left[i] > NEGATIVE_INFINITY]
            assert sorted(mine.tolist()) == (expected > NEGATIVE_INFINITY).nonzero()[:, 0].tolist()


def test_usual_rows_are_complete_and_flat_ones_are_not() -> None:
    peaked = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(3))
    peaked[:, :30] += 12
    flat = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(4)) / 100
    scores = torch.cat([peaked, flat])
    kinds = [Sampling(top_p=0.9), Sampling(min_p=0.1)] * 2
    warpers = CandidateWarpers(parameters_of(kinds), torch.device("cpu"))
    _, is_complete = warpers.apply(find_candidates(scores, warpers.temperature))
    assert is_complete.tolist() == [True, True, False, False]


def test_ties_that_may_go_on_past_the_candidates_are_not_complete() -> None:
    scores = torch.zeros(2, 20_000)
    scores[0, :100] = 5.0
    scores[1, :300] = 5.0
    kinds = [Sampling(top_k=40)] * 2
    warpers = CandidateWarpers(parameters_of(kinds), torch.device("cpu"))
    left, is_complete = warpers.apply(find_candidates(scores, None))
    assert is_complete.tolist() == [True, False]
    assert int((left[0] > NEGATIVE_INFINITY).sum()) == 100


def test_top_p_counts_the_ties_of_top_k_that_lie_past_the_candidates() -> None:
    scores = torch.full((1, 20_000), -20.0)
    scores[0, :2] = torch.tensor([9.0, 8.0])
    scores[0, 2:402] = 1.0
    kind = Sampling(top_k=100, top_p=0.93)
    warpers = CandidateWarpers(parameters_of([kind]), torch.device("cpu"))
    _, is_complete = warpers.apply(find_candidates(scores, None))
    assert is_complete.tolist() == [False]
    assert int((over_the_vocabulary(scores, kind) > NEGATIVE_INFINITY).sum()) == 402
