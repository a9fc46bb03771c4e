"""Seeded draws: their distribution, and that a seed and a position are all they depend on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from millrace_proto.sampling import Sampling
from millrace_shard.batch.sequence import Sequence
from millrace_shard.sampling.sampler import Sampler, SamplingRows
from millrace_shard.sampling.thresholds import uniforms
from millrace_testing.engines.sampling_driver import going
from millrace_testing.engines.sampling_reference import Row, probabilities, splitmix64, warped

NUM_DRAWS = 100_000
SCORES = [0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.2, -0.3, 0.9, -40.0, 1.1]
FIXED: dict[str, Callable[[NDArray[np.int64]], tuple[NDArray[Any], NDArray[Any]]]] = {
    "seeds": lambda i: (i, np.full(len(i), 5)),
    "seeds-far-apart": lambda i: (i * np.int64(0x1234567890ABCD), np.full(len(i), 700)),
    "positions": lambda i: (np.full(len(i), 2**64 - 1, dtype=np.uint64), i + 1),
    "both": lambda i: (i // 50, i % 50 + 1),
}
KINDS = {
    "plain": Sampling(do_sample=True),
    "hot": Sampling(do_sample=True, temperature=1.7),
    "top-k": Sampling(do_sample=True, top_k=5),
    "top-p": Sampling(do_sample=True, temperature=0.8, top_p=0.8),
    "typical": Sampling(do_sample=True, typical_p=0.7),
    "min-p": Sampling(do_sample=True, min_p=0.2),
}


def draws(
    scores: list[float],
    kind: Sampling,
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    *,
    at_once: int = 10_000,
) -> NDArray[np.int64]:
    """A token for each seed and position, from the same scores."""
    one = Sequence(slot=0, request_id=0, input_ids=np.zeros(1, dtype=np.int64), parameters=kind)
    columns = np.repeat(one.columns(), len(seeds))
    columns["seed"] = seeds
    sampler = Sampler(torch.zeros(1, int(positions.max()) + 1, dtype=torch.int32), ())
    found = []
    for start in range(0, len(seeds), at_once):
        some = slice(start, start + at_once)
        rows = SamplingRows(
            parameters=columns[some],
            positions=positions[some],
            table_rows=np.zeros(len(seeds[some]), dtype=np.int64),
        )
        logits = torch.tensor(scores).repeat(len(seeds[some]), 1)
        found.append(sampler.sample(logits, rows).ids.numpy())
    return np.concatenate(found)


def check_distribution(found: NDArray[np.int64], probs: list[float]) -> None:
    """Pearson's chi-square stays under its 99.9 % quantile (by Wilson and Hilferty 1931); rare tokens count as one."""
    counts = np.bincount(found, minlength=len(probs))
    expected = np.array(probs) * len(found)
    assert counts[np.array(probs) == 0].sum() == 0
    common = expected >= 5
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, wanted, strict=True) if e > 0)
    freedom = sum(e > 0 for e in wanted) - 1
    part = 2 / (9 * freedom)
    assert statistic < freedom * (1 - part + 3.09 * math.sqrt(part)) ** 3


@pytest.mark.parametrize("fixed", FIXED)
def test_draws_follow_the_distribution_over_seeds_and_over_positions(fixed: str) -> None:
    index = np.arange(NUM_DRAWS, dtype=np.int64)
    seeds, positions = FIXED[fixed](index)
    found = draws(SCORES, KINDS["plain"], seeds.astype(np.uint64), positions)
    check_distribution(found, probabilities(SCORES))


@pytest.mark.parametrize("kind", KINDS)
def test_draws_follow_the_distribution_that_is_left(kind: str) -> None:
    index = np.arange(NUM_DRAWS, dtype=np.int64)
    row = Row(logits=SCORES, prompt=[0], generated=[], parameters=KINDS[kind])
    found = draws(SCORES, KINDS[kind], index.astype(np.uint64), index % 97 + 1)
    check_distribution(found, probabilities(warped(row)))
    with going("nothing read back"):
        again = draws(
            SCORES, KINDS[kind], index[:10_000].astype(np.uint64), index[:10_000] % 97 + 1
        )
    assert np.array_equal(again, found[:10_000])


def test_draws_from_many_tokens_follow_the_distribution() -> None:
    """The row has several blocks of the cumulative sum, and tokens of very different weight."""
    generator = np.random.default_rng(8)
    scores = (generator.standard_normal(1200) * 2).tolist()
    index = np.arange(NUM_DRAWS, dtype=np.int64)
    found = draws(scores, KINDS["plain"], index.astype(np.uint64) * np.uint64(977), index % 7 + 1)
    check_distribution(found, probabilities(scores))


def test_neighbouring_positions_are_independent() -> None:
    """Pairs of consecutive draws of one seed follow the product of the distribution with itself."""
    scores = SCORES[:6]
    seeds = np.repeat(np.arange(NUM_DRAWS // 2, dtype=np.uint64), 2)
    positions = np.tile(np.array([40, 41]), NUM_DRAWS // 2)
    first, second = draws(scores, KINDS["plain"], seeds, positions).reshape(-1, 2).T
    probs = probabilities(scores)
    check_distribution(first * len(scores) + second, [p * q for p in probs for q in probs])


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_the_same_on_any_row_tile_and_batch(kind: str) -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1] * 30, dtype=np.uint64)
    positions = np.arange(120) % 11 + 1
    scores = [math.sin(i) * 4 for i in range(300)]
    found = draws(scores, KINDS[kind], seeds, positions)
    order = np.random.default_rng(1).permutation(120)
    shuffled = draws(scores, KINDS[kind], seeds[order], positions[order], at_once=7)
    assert np.array_equal(shuffled, found[order])
    with going("small tiles"):
        assert np.array_equal(draws(scores, KINDS[kind], seeds, positions), found)


@settings(derandomize=True)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_uniforms_are_splitmix64(seed: int, position: int) -> None:
    found = uniforms(np.array([seed, 3], dtype=np.uint64), np.array([position, 0]))
    assert found.tolist() == [splitmix64(seed, position) >> 40, splitmix64(3, 0) >> 40]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_is_one_of_its_own(seed: int) -> None:
    """None is cut, made signed or taken for "no seed" on its way to the generator."""
    parameters = Sampling(do_sample=True, seed=seed)
    one = Sequence(
        slot=0, request_id=0, input_ids=np.zeros(1, dtype=np.int64), parameters=parameters
    )
    columns = np.repeat(one.columns(), 3)
    assert [int(value) for value in columns["seed"]] == [seed] * 3
    found = uniforms(columns["seed"], np.arange(3))
    assert found.tolist() == [splitmix64(seed, position) >> 40 for position in range(3)]


def test_uniforms_begin_with_the_published_sequence() -> None:
    """The first outputs of splitmix64 for seed 1234567, as its reference program prints them."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = uniforms(np.full(3, 1234567, dtype=np.uint64), np.arange(3))
    assert found.tolist() == [value >> 40 for value in published]
