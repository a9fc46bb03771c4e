"""Rows worked out on their likeliest tokens alone, against the same over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millrace_proto.sampling import Sampling
from millrace_shard.batch.sequence import PARAMETERS
from millrace_shard.batch.sequence import Sequence as Admitted
from millrace_shard.kernels.scores import RowMasks
from millrace_shard.sampling import sampling_rows
from millrace_shard.sampling import warpers as warpers_module
from millrace_shard.sampling.sampler import TIE_ROOM, Sampler, SamplingRows, TopTokens
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
    result = find_candidates(scores, None)
    width = min(size, NUM_CANDIDATES)
    assert torch.equal(result.scores, scores.sort(descending=True).values[:, :width])
    assert torch.equal(scores.gather(1, result.ids), result.scores)
    assert all(len(set(ids)) == width for ids in result.ids.tolist())
    assert result.are_all == (size == width)


def test_the_first_is_as_likely_as_in_the_whole_row_at_its_temperature() -> None:
    scores = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(2)) * 3
    temperature = torch.tensor([[1.0], [0.3], [2.0], [1e-30]])
    result = find_candidates(scores, temperature)
    scaled = (scores - scores.amax(-1, keepdim=True)).double() / temperature
    assert result.best_probability is not None
    expected = scaled.softmax(-1).amax(-1)
    torch.testing.assert_close(result.best_probability[:, 0].double(), expected, rtol=1e-5, atol=0)


def parameters_of(kinds: list[Sampling]) -> np.ndarray:
    columns = np.zeros(len(kinds), dtype=PARAMETERS)
    for i, kind in enumerate(kinds):
        ids = np.zeros(1, dtype=np.int64)
        columns[i] = Admitted(slot=0, request_id=0, input_ids=ids, parameters=kind).columns()
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
def test_complete_rows_keep_the_same_tokens_as_the_whole_vocabulary(
    kinds: st.SearchStrategy[Sampling], table: list[list[float]], data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(kinds, min_size=len(table), max_size=len(table)))
    scores = torch.tensor(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warpers_module, "NUM_CANDIDATES", 8)
        patch.setattr(warpers_module, "BLOCKS", (2,))
        warpers = CandidateWarpers(parameters_of(chosen), torch.device("cpu"))
        has_mass = not chosen[0].top_k
        result = find_candidates(scores, warpers.temperature if has_mass else None)
        left, is_complete = warpers.apply(result)
    for i, kind in enumerate(chosen):
        if is_complete[i]:
            expected = over_the_vocabulary(scores[i : i + 1], kind)[0]
            mine = result.ids[i][left[i] > NEGATIVE_INFINITY]
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


SIZE = 3 * TIE_ROOM
INFINITY = float("inf")
values = st.sampled_from([-INFINITY, -3.0, -2.5, -2.0, -1.0, -0.5])
rows = st.lists(st.lists(values, min_size=SIZE, max_size=SIZE), min_size=1, max_size=4)


def expected(row: list[float], n: int) -> list[int]:
    last = sorted(row, reverse=True)[min(n, len(row)) - 1]
    return [i for i, value in enumerate(row) if value >= last and value > -INFINITY]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(rows, st.lists(st.integers(1, SIZE + 5), min_size=4, max_size=4))
def test_reported_candidates_follow_the_rule_for_any_number_of_ties(
    table: list[list[float]], wanted: list[int]
) -> None:
    mine = np.array(wanted[: len(table)])
    names = np.arange(len(table)) * 3
    top = TopTokens.of(torch.tensor(table), names, mine)
    found_rows, ids, logprobs = top.chosen(top.best)
    for name, row, n in zip(names, table, mine.tolist(), strict=True):
        result = sorted(ids[found_rows == name].tolist())
        assert result == expected(row, n)
        assert sorted(logprobs[found_rows == name]) == sorted(row[i] for i in result)
    assert len(ids) == sum(len(expected(row, n)) for row, n in zip(table, mine, strict=True))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(rows, st.lists(st.integers(1, SIZE + 5), min_size=4, max_size=4), st.randoms())
def test_reported_candidates_follow_the_rule_among_all_possible_tokens(
    table: list[list[float]], wanted: list[int], random: Random
) -> None:
    """Tokens of a row in any order, under their ids."""
    mine = np.array(wanted[: len(table)])
    ids = [random.sample(range(1000), SIZE) for _ in table]
    top = TopTokens.among(torch.tensor(ids), torch.tensor(table), np.arange(len(table)), mine)
    found_rows, found_ids, _ = top.chosen(top.best)
    for i, (row, n) in enumerate(zip(table, mine.tolist(), strict=True)):
        result = sorted(found_ids[found_rows == i].tolist())
        assert result == sorted(ids[i][j] for j in expected(row, n))


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


META = torch.device("meta")
VOCAB, LENGTH = 2000, 6000
TILE = 1 << 16
"""Elements; 32 rows of the vocabulary, or 10 of the longest sequences."""
KINDS = {
    "top-p": Sampling(do_sample=True, top_p=0.9),
    "typical-p": Sampling(do_sample=True, typical_p=0.9),
    "top-k": Sampling(do_sample=True, top_k=1500),
    "penalties": Sampling(repetition_penalty=1.1, frequency_penalty=0.1),
    "watermark": Sampling(watermark=True),
    "mask": Sampling(do_sample=True),
}


def reference_of(tensor: Tensor) -> Any:
    """A weak reference to the memory of `tensor`."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the greatest number of bytes of tensors on device "meta" at a time, without `held`."""

    def __init__(self, held: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._held = {reference_of(each).cdata for each in held}
        self._storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.device == META:
                reference = reference_of(each)
                if reference.cdata not in self._held:
                    size = each.untyped_storage().nbytes()
                    self._storages[reference.cdata] = reference, size
        self._storages = {
            key: held for key, held in self._storages.items() if not held[0].expired()
        }
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result


def peak(kind: Sampling, num_rows: int, *, masked: bool) -> int:
    """Bytes in addition to the logits while `num_rows` rows of the greatest length are sampled."""
    columns = Admitted(
        slot=0, request_id=0, input_ids=np.zeros(LENGTH, dtype=np.int64), parameters=kind
    ).columns()
    rows = SamplingRows(
        parameters=np.full(num_rows, columns, dtype=PARAMETERS),
        positions=np.full(num_rows, LENGTH),
        table_rows=np.arange(num_rows),
    )
    table = torch.zeros(num_rows, LENGTH, dtype=torch.int32, device=META)
    sampler = Sampler(table, ())
    logits = torch.zeros(num_rows, VOCAB, device=META)
    bits = torch.zeros(num_rows, -(-VOCAB // 32), dtype=torch.int32, device=META)
    masks = RowMasks(rows=np.arange(num_rows), bits=bits) if masked else None
    with Meter([table, logits, bits]) as meter:
        sampler.sample(logits, rows, masks)
    return int(meter.peak)


@pytest.mark.parametrize("name", KINDS)
def test_scratch_memory_does_not_grow_with_the_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_rows, "DEVICE_TILE_ELEMENTS", TILE)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    few, many = (peak(KINDS[name], rows, masked=name == "mask") for rows in (64, 512))
    assert 4 * TILE // 8 < few < 100 * TILE
    # A row's token, log probability and parameters.
    assert many - few < 448 * 200
