"""Thresholds by histograms against thresholds by sorting, bit for bit: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace_shard.device import transfers
from millrace_shard.sampling import thresholds
from millrace_shard.sampling.warpers import keep_top_k, keep_top_p, keep_typical
from millrace_testing.project import ROOT

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.cuda import triton_thresholds
from millrace_shard.kernels.cuda.operators import TritonSampling

PROGRAM = ROOT / "tests/support/millrace_testing/engines/compile_sampling.py"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FIND = TritonSampling().find_threshold
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38]
ties = st.integers(-3, 3).map(float)
keys = st.floats(width=32, allow_nan=True) | ties | st.sampled_from(SPECIAL)
probabilities = st.sampled_from([0.0, 2.0**-40, 2.0**-38, 0.25, 1.0]) | st.floats(0, 1, width=32)
rows = st.integers(1, 40).flatmap(
    lambda size: st.lists(
        st.tuples(
            st.lists(keys, min_size=size, max_size=size),
            st.lists(probabilities, min_size=size, max_size=size),
            st.floats(2.0**-30, 1, width=32),
            st.integers(1, 45),
        ),
        min_size=1,
        max_size=4,
    )
)


@pytest.fixture(autouse=True)
def sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    """`thresholds.find_threshold` sorts, as on any device but a CPU."""
    monkeypatch.setattr(transfers, "is_synchronous", lambda _: False)


def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)[:, None]


def check_equal(keys: Tensor, probabilities: Tensor | None, limit: Tensor) -> Tensor:
    """Both ways keep the same keys, and find the same number where the limit is reached; returns the kept ones."""
    result = FIND(keys, probabilities, limit)
    expected = thresholds.find_threshold(keys, probabilities, limit)
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    assert torch.equal(keys < result, keys < expected)
    is_reached = result != -math.inf
    assert torch.equal(result[is_reached].isnan(), expected[is_reached].isnan())
    assert torch.equal(result[is_reached].nan_to_num(1.5), expected[is_reached].nan_to_num(1.5))
    return ~(keys < result)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(rows)
def test_histograms_find_the_threshold_of_a_sort(
    drawn: list[tuple[list[float], list[float], float, int]],
) -> None:
    keys = torch.tensor([row[0] for row in drawn], dtype=torch.float32, device=DEVICE)
    weights = torch.tensor([row[1] for row in drawn], dtype=torch.float32, device=DEVICE)
    check_equal(keys, weights, column([row[2] for row in drawn]))
    check_equal(keys, None, column([row[3] for row in drawn], torch.int64))


def test_equal_keys_are_kept_or_dropped_together() -> None:
    keys = torch.full((2, 5000), -2.5, device=DEVICE)
    keys[1, 4999] = -2.4
    shares = torch.full_like(keys, 1 / 5000)
    kept = check_equal(keys, shares, column([0.5, 1e-4]))
    assert kept.sum(1).tolist() == [5000, 1]
    assert check_equal(keys, None, column([7, 2], torch.int64)).sum(1).tolist() == [5000, 5000]


@pytest.mark.parametrize(("num_rows", "copies"), [(1, 8), (2, 8), (5, 3), (20, 1)])
def test_neighbouring_keys_are_not_added_to_the_same_number(
    num_rows: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rows are few: additions to one number wait for each other. Here all keys are in one bucket."""
    most: list[int] = []
    choose = triton_thresholds.choose

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                most.append(int(args[3].max()))
                choose[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(triton_thresholds, "choose", Spy())
    monkeypatch.setattr(triton_thresholds, "COPIED_ROWS", 16)
    keys = torch.full((num_rows, 128), 2.5, device=DEVICE)
    assert check_equal(keys, None, column([5] * num_rows, torch.int64)).all()
    assert most == [-(-128 // copies), 128, 128]


@pytest.mark.parametrize("share", [2.0**-38, 0.5, 0.75, 0.751, 1.0])
def test_rows_of_one_or_two_tokens_have_exact_thresholds(share: float) -> None:
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-0.0, 0.0]], device=DEVICE)
    shares = torch.tensor([[0.75, 0.25], [0.25, 0.75], [0.5, 0.5]], device=DEVICE)
    kept = check_equal(keys, shares, column([share] * 3))
    assert kept.sum(1).tolist() == ([2, 2, 2] if share > 0.75 else [1, 1, 2])
    assert check_equal(keys[:, :1], shares[:, :1], column([share] * 3)).all()


def test_both_signs_of_nan_are_above_all_numbers() -> None:
    keys = torch.tensor([[1.0, 0.0, math.nan], [1.0, 0.0, -math.nan]], device=DEVICE)
    assert check_equal(keys, None, column([2, 2], torch.int64)).sum(1).tolist() == [2, 2]


def test_shares_are_rounded_up_to_whole_units() -> None:
    keys = torch.tensor([[3.0, 2.0, 1.0]], device=DEVICE)
    units = torch.full_like(keys, 2.0**-38)
    kept = [check_equal(keys, units, column([share])).sum().item() for share in (0.3, 0.5, 0.7)]
    assert kept == [1, 2, 3]


def test_rows_without_a_number_keep_everything() -> None:
    """Such rows fail by themselves, and change no other row."""
    for size in (6, 7):
        scores = torch.randn(3, size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        alone = check_equal(scores[2:], scores[2:].softmax(-1), column([0.6]))
        scores[0, 3], scores[1] = math.nan, -math.inf
        kept = check_equal(scores, scores.softmax(-1), column([0.6] * 3))
        assert kept[:2].all()
        assert torch.equal(kept[2:], alone)
        firsts = check_equal(scores, None, column([1] * 3, torch.int64))
        assert firsts.sum(1).tolist() == [size, size, 1]


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0, 30.0])
def test_rows_that_take_several_programs_have_exact_thresholds(spread: float) -> None:
    size = 2 * triton_thresholds.KEYS_PER_PROGRAM + 77
    scores = torch.randn(4, size, generator=torch.Generator().manual_seed(2)).to(DEVICE) * spread
    for values in (scores, scores.bfloat16().float()):
        check_equal(values, values.softmax(-1), column([1e-6, 0.3, 0.999, 1.0]))
        check_equal(values, None, column([1, 2000, size, size + 1], torch.int64))


@pytest.mark.parametrize("mass", [0.05, 0.6, 0.97, 1.0])
def test_filters_keep_the_same_bits(mass: float) -> None:
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(2, 5000, generator=generator) * spread for spread in (0.01, 4.0)]
    scores = torch.cat(parts).bfloat16().float().to(DEVICE)
    masses, ks = column([mass] * 4), column([int(mass * 5000)] * 4, torch.int64)
    assert torch.equal(keep_top_p(scores, masses, FIND), keep_top_p(scores, masses))
    assert torch.equal(keep_typical(scores, masses, FIND), keep_typical(scores, masses))
    assert torch.equal(keep_top_k(scores, ks, 5000, FIND), keep_top_k(scores, ks, 5000))


def test_a_row_has_the_same_threshold_in_any_batch() -> None:
    scores = torch.randn(7, 300, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    masses = column([0.1 * i for i in range(1, 8)])
    together = FIND(scores, scores.softmax(-1), masses)
    for row in range(7):
        here = slice(row, row + 1)
        assert torch.equal(
            FIND(scores[here], scores[here].softmax(-1), masses[here]), together[here]
        )
    assert FIND(scores[:0], None, column([], torch.int64)).shape == (0, 1)


@pytest.mark.long
def test_the_kernels_of_sampling_compile(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = Counter(tuple(line.split()) for line in done.stdout.splitlines())
    assert kernels == {
        (name, capability): count
        for capability in ("80", "90")
        for name, count in (("weigh", 6), ("choose", 6), ("count", 1), ("penalise_rows", 1))
    }
