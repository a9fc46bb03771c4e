"""Sampling parameters on the device by slot, and choices that read them there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.sequence import PARAMETERS
from millrace_shard.sampling import sampling_rows
from millrace_shard.sampling.sampler import Sampler
from millrace_shard.sampling.sampling_rows import (
    PENALTIES,
    DeviceRows,
    RowIndexes,
    SamplingRows,
    SlotParameters,
)
from millrace_shard.sampling.thresholds import uniforms
from millrace_shard.sampling.warpers import choose_plain

CPU = torch.device("cpu")
NUM_SLOTS = 12


pytestmark = pytest.mark.usefixtures("as_on_cuda")


def some_parameters(random: np.random.Generator, count: int) -> np.ndarray:
    """Neutral but for a temperature, which two of three rows draw at."""
    p = np.zeros(count, dtype=PARAMETERS)
    for name in ("top_p", "typical_p", "repetition_penalty"):
        p[name] = 1
    p["do_sample"] = np.arange(count) % 3 > 0
    p["temperature"] = np.where(p["do_sample"], random.uniform(0.2, 3, count), 1)
    p["seed"] = random.integers(0, 2**63, count)
    return p


def device_rows(p: np.ndarray, slots: Ints, positions: Ints) -> DeviceRows:
    table = SlotParameters(NUM_SLOTS, CPU)
    for slot, row in zip(slots, p, strict=True):
        table.admit(np.array([slot]), row[None])
    return DeviceRows(
        torch.from_numpy(slots),
        torch.from_numpy(positions),
        torch.from_numpy(uniforms(p["seed"], positions)),
        table,
    )


def test_columns_match_the_slots() -> None:
    random = np.random.default_rng(0)
    p = some_parameters(random, 5)
    for name in (*PENALTIES, "min_p"):
        p[name] = random.uniform(0, 2, 5)
    p["top_k"] = [0, 7, 2**40, 1, 3]
    p["num_prompt"] = random.integers(1, 99, 5)
    slots = np.array([11, 0, 4, 9, 2])
    rows = device_rows(p, slots, np.arange(5))
    for chosen in (np.arange(5), np.array([1, 2, 3]), np.array([0, 2, 4])):
        some = rows.select(chosen)
        assert some.slots.tolist() == slots[chosen].tolist()
        for name in ("temperature", "min_p", "num_prompt", "do_sample"):
            assert some.column(name).tolist() == p[name][chosen][:, None].tolist()
        top_k = np.minimum(p["top_k"][chosen], 2**31 - 1)
        assert some.column("top_k").tolist() == top_k[:, None].tolist()
        assert some.penalties().tolist() == [p[name][chosen].tolist() for name in PENALTIES]


def scores_of(random: np.random.Generator, count: int, size: int) -> Tensor:
    """Random rows; rows of equal scores, with ties of the best, with NaN, with one infinity of either sign."""
    scores = torch.from_numpy(random.normal(0, 3, (count, size)).astype(np.float32))
    scores[1] = 0.5
    scores[2, [3, size - 1]] = 40.0
    scores[3, 2] = torch.nan
    scores[4, 5] = torch.inf
    scores[5, 1:] = -torch.inf
    scores[6, 1:] = -torch.inf
    return scores


@pytest.mark.parametrize("size", [64, 515, 1031])
def test_the_choice_has_the_bits_of_the_sampler(size: int) -> None:
    random = np.random.default_rng(size)
    p = some_parameters(random, NUM_SLOTS)
    slots, positions = random.permutation(NUM_SLOTS), random.integers(1, 500, NUM_SLOTS)
    logits = scores_of(random, NUM_SLOTS, size)
    on_device = device_rows(p, slots, positions)
    sampler = Sampler(torch.zeros(NUM_SLOTS, 500, dtype=torch.int32), ())
    rows = SamplingRows(parameters=p, positions=positions, table_rows=slots)
    expected = sampler.sample(logits.clone(), rows)
    result = choose_plain(logits, on_device.words, on_device.uniforms)
    assert result.failed.tolist() == expected.failed.tolist()
    assert 0 < result.failed.sum() < NUM_SLOTS
    good = ~expected.failed
    assert result.ids[good].tolist() == expected.ids[good].tolist()
    bits = result.logprobs.view(torch.int32)
    assert bits[good].tolist() == expected.logprobs.view(torch.int32)[good].tolist()
    assert len(set(result.ids[good].tolist())) > 3


def test_row_numbers_go_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    index = RowIndexes(CPU)
    first = index(np.array([1, 3]))
    assert index(np.array([1, 3])) is first
    assert index(np.array([1, 4])).tolist() == [1, 4]
    monkeypatch.setattr(sampling_rows, "MOST_KEPT", 2)
    assert index(np.array([7])).tolist() == [7]
    assert index(np.array([1, 3])) is not first
