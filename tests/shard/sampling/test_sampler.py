"""Sampling against a per-row reference, and bit for bit against itself in other batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from millrace_proto.sampling import NO_RULES, Dry, Sampling, SequenceRules
from millrace_shard.batch.sequence import PARAMETERS
from millrace_shard.batch.sequence import Sequence as Admitted
from millrace_shard.sampling.sampler import Sampler, SamplingRows
from millrace_shard.sampling.thresholds import uniforms
from millrace_testing.engines.sampling_driver import (
    WAYS,
    columns,
    going,
    masks_of,
    sample,
    sampler_for,
    top_of,
)
from millrace_testing.engines.sampling_reference import (
    Row,
    inverse_cdf,
    log_probabilities,
    probabilities,
    processed,
    splitmix64,
    warped,
)

VOCAB = 40

ids = st.integers(0, VOCAB - 1)
logits = st.lists(st.integers(-60, 60).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB)
biases = st.dictionaries(ids, st.sampled_from([-100.0, -1.25, 0.75, 3.5, 100.0]), max_size=4)
few_ids = st.lists(ids, max_size=3).map(tuple)
rules = st.builds(
    SequenceRules,
    allowed_ids=st.just(()) | st.lists(ids, min_size=20, max_size=40).map(tuple),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    stop_ids=few_ids,
    dry=st.none()
    | st.builds(
        Dry,
        multiplier=st.sampled_from([0.75, 2.0]),
        base=st.sampled_from([1.75, 0.5]),
        allowed_length=st.integers(0, 3),
        window=st.sampled_from([0, 1, 2, 7]),
        breakers=few_ids,
    ),
)
parameters = st.builds(
    Sampling,
    temperature=st.sampled_from([1.0, 0.5, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 10, 400]),
    top_p=st.sampled_from([1.0, 0.93, 0.41, 0.07]),
    typical_p=st.sampled_from([1.0, 1.0, 0.87, 0.23]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.4, 1.0]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.5, 1.5, 3.0]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.01, 0.1, 0.4]),
    rules=st.just(NO_RULES) | rules,
    do_sample=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.75]),
    frequency_penalty=st.sampled_from([0.0, 1.0, -0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    openai_frequency_penalty=st.sampled_from([0.0, 0.25, -0.75]),
    watermark=st.booleans(),
    bias=biases.map(lambda bias: tuple(bias.items())),
)
rows = st.builds(
    Row,
    logits=logits,
    prompt=st.lists(ids, min_size=1, max_size=9),
    generated=st.lists(ids, max_size=9),
    parameters=parameters,
    min_new_tokens=st.integers(0, 5),
    eos=st.just((0, 39)),
    allowed=st.none()
    | st.frozensets(ids, min_size=1)
    | st.sampled_from([frozenset({0}), frozenset({0, 39}), frozenset({39, 5})]),
    gamma=st.just(0.25),
    delta=st.just(1.5),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(rows, min_size=1, max_size=5))
@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_logprobs_agree_with_the_reference(way: str, batch: list[Row]) -> None:
    """Rows are skipped where the reference's rounding decides which tokens are dropped."""
    with going(way):
        result = sample(batch)
    for row, id_, logprob in zip(batch, result.ids.tolist(), result.logprobs.tolist(), strict=True):
        if not _is_clear_cut(row):
            continue
        scores = warped(row)
        assert logprob == pytest.approx(log_probabilities(scores)[id_], abs=1e-4)
        if row.parameters.do_sample:
            uniform = (splitmix64(row.parameters.seed, row.position) >> 40) / 2**24
            probs = probabilities(scores)
            expected = inverse_cdf(probs, uniform)
            near = {inverse_cdf(probs, max(0.0, uniform + d)) for d in (-1e-6, 1e-6)}
            assert id_ == expected or id_ in near
        else:
            assert scores[id_] == pytest.approx(max(scores), abs=1e-5)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(rows, min_size=1, max_size=5), st.integers(1, 50))
@pytest.mark.parametrize("way", WAYS)
def test_candidates_agree_with_the_reference(way: str, batch: list[Row], n: int) -> None:
    with going(way):
        top = top_of(sample(batch, [n] * len(batch)))
    for i, row in enumerate(batch):
        if not _is_clear_cut(row):
            continue
        expected = log_probabilities(warped(row))
        last = max(sorted(expected, reverse=True)[:n][-1], -1e30)
        result = {id_: logprob for owner, id_, logprob in top if owner == i}
        # The reference's rounding may part equals.
        assert {j for j, q in enumerate(expected) if q >= last + 1e-6} <= result.keys()
        assert result.keys() <= {j for j, q in enumerate(expected) if q >= last - 1e-6}
        assert all(abs(expected[id_] - logprob) < 1e-4 for id_, logprob in result.items())


def _is_clear_cut(row: Row) -> bool:
    """Whether some token is possible, and a slightly different mass or slightly different keys keep the same tokens."""
    if max(processed(row)) == -math.inf:
        return False
    p = row.parameters
    kept = {
        tuple(
            math.isinf(score)
            for score in warped(
                replace(
                    row,
                    parameters=replace(
                        p,
                        top_p=p.top_p if p.top_p == 1 else p.top_p + shift,
                        typical_p=p.typical_p if p.typical_p == 1 else p.typical_p + shift,
                        min_p=p.min_p * (1 - shift) if p.min_p < 1 else 1.0,
                        # Units of 1 / 4096 are coarser than the other roundings.
                        top_n_sigma=p.top_n_sigma * (1 + 300 * shift),
                        xtc_threshold=p.xtc_threshold * (1 + shift),
                    ),
                )
            )
        )
        for shift in (-1e-5, 0.0, 1e-5)
    }
    if len(kept) > 1:
        return False
    scores = sorted(score for score in warped(row) if math.isfinite(score))
    # Tokens whose scores differ only by the reference's rounding may part ways.
    return all(b - a == 0 or b - a > 1e-6 for a, b in pairwise(scores))


KINDS = [
    Sampling(),
    Sampling(do_sample=True, seed=1),
    Sampling(do_sample=True, seed=2, temperature=0.7),
    Sampling(do_sample=True, seed=3, temperature=1.4, top_k=50),
    Sampling(do_sample=True, seed=4, top_k=5000),
    Sampling(do_sample=True, seed=5, top_p=0.9),
    Sampling(do_sample=True, seed=6, temperature=2.5, top_p=0.99),
    Sampling(do_sample=True, seed=7, typical_p=0.3),
    Sampling(do_sample=True, seed=8, temperature=0.9, top_k=40, top_p=0.8, typical_p=0.9),
    Sampling(repetition_penalty=1.3),
    Sampling(frequency_penalty=0.5, presence_penalty=0.5, openai_frequency_penalty=0.1),
    Sampling(do_sample=True, seed=9, repetition_penalty=1.1, top_p=0.5),
    Sampling(do_sample=True, seed=10, min_p=0.05),
    Sampling(do_sample=True, seed=11, temperature=0.4, top_p=0.7, min_p=0.01),
    Sampling(do_sample=True, seed=12, watermark=True, bias=((3, 9.5), (500, -2.0))),
    Sampling(bias=((7, 30.0),), watermark=True),
]


def long_rows(vocab: int) -> list[Row]:
    """A row of each kind; every third has a grammar."""
    generator = torch.Generator().manual_seed(vocab)
    batch = []
    for i, kind in enumerate(KINDS):
        held = torch.randint(vocab, (5 + 7 * i,), generator=generator).tolist()
        values = torch.randn(vocab, generator=generator) * 3
        allowed = torch.randint(vocab, (vocab // 2,), generator=generator).tolist()
        batch.append(
            Row(
                logits=values.bfloat16().float().tolist(),
                prompt=held[:4],
                generated=held[4:],
                parameters=kind,
                allowed=frozenset(allowed) if i % 3 == 2 else None,
            )
        )
    return batch


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab", [50257, 513])
@pytest.mark.parametrize("way", ["as it is", "nothing read back"])
def test_a_row_is_sampled_with_the_same_bits_in_any_batch(way: str, vocab: int) -> None:
    batch = long_rows(vocab)
    wanted = [i % 4 * 3 for i in range(len(batch))]
    with going(way):
        together = sample(batch, wanted)
        backwards = sample(batch[::-1], wanted[::-1])
        for i, row in enumerate(batch):
            alone = sample([row], [wanted[i]])
            assert columns(together, i) == columns(alone, 0), row.parameters
            assert columns(backwards, len(batch) - 1 - i) == columns(alone, 0), row.parameters
            assert not alone.failed.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("way", WAYS)
def test_rows_that_are_not_finite_fail_and_do_not_affect_the_others(way: str, bad: float) -> None:
    good = Row(logits=[0.5, 3.0, 1.0] * 20, prompt=[4], generated=[], parameters=KINDS[8])
    with going(way):
        for kind in (replace(each, bias=each.bias[:1]) for each in KINDS):
            values = [bad] * 60 if bad == -math.inf else [1.0] * 30 + [bad] + [2.0] * 29
            spoiled = Row(logits=values, prompt=[4], generated=[5], parameters=kind)
            # A mask over what is no number hides nothing.
            hidden = replace(spoiled, allowed=frozenset(range(20)))
            result = sample([spoiled, good, hidden], [2, 2, 0])
            assert result.failed.tolist() == [True, False, True]
            assert columns(result, 1) == columns(sample([good], [2]), 0)
            assert all(0 <= id_ < 60 for id_ in result.ids.tolist())
            assert {owner for owner, *_ in top_of(result)} <= {0, 1}


def test_impossible_tokens_in_finite_logits_do_not_fail() -> None:
    row = Row(
        logits=[-math.inf, 2.0, -math.inf, 1.0], prompt=[1], generated=[], parameters=KINDS[0]
    )
    result = sample([row], [4])
    assert result.failed.tolist() == [False]
    assert [id_ for _, id_, _ in top_of(result)] == [1, 3]


@pytest.mark.parametrize("kind", [p for p in KINDS if p.do_sample and not p.bias])
@pytest.mark.parametrize("way", WAYS)
def test_extreme_parameters_never_leave_the_vocabulary(way: str, kind: Sampling) -> None:
    for temperature in (1e-300, 1e-42, 1e-30, 1e30, 1e300):
        hard = Sampling(do_sample=True, seed=kind.seed, temperature=temperature, top_p=1e-300)
        row = Row(logits=[3.0, 9.0, -5.0, -math.inf], prompt=[0], generated=[], parameters=hard)
        with going(way):
            result = sample([row])
        assert result.ids.tolist() == [1]
        assert not result.failed.any()


@pytest.mark.parametrize("way", WAYS)
def test_impossible_tokens_are_never_drawn_at_any_temperature(way: str) -> None:
    scores = [1.0, -math.inf, 2.0, -math.inf] * 10
    batch = [
        Row(
            logits=scores,
            prompt=[0],
            generated=[],
            parameters=Sampling(do_sample=True, seed=seed, temperature=temperature, top_k=top_k),
        )
        for seed in range(40)
        for temperature in (1e-40, 1.0, 1e38)
        for top_k in (0, 7, 39, 40, 10**9)
    ]
    with going(way):
        result = sample(batch)
    assert not result.failed.any()
    assert all(id_ % 2 == 0 for id_ in result.ids.tolist())


def top_ids(scores: list[float], n: int, **fields: object) -> list[int]:
    row = Row(logits=scores, prompt=[0], generated=[], parameters=Sampling(**fields))  # type: ignore[arg-type]
    result = sample([row], [n])
    return [id_ for _, id_, _ in top_of(result)]


@pytest.mark.parametrize("do_sample", [False, True])
def test_ties_at_the_last_candidate_are_all_reported(do_sample: bool) -> None:
    scores = [-1.0, -3.0, -4.0, -2.0, -3.0]
    fields = {"do_sample": do_sample, "seed": 4}
    assert top_ids(scores, 0, **fields) == []
    assert top_ids(scores, 2, **fields) == [0, 3]
    assert top_ids(scores, 3, **fields) == [0, 1, 3, 4]
    assert top_ids(scores, 4, **fields) == [0, 1, 3, 4]
    assert top_ids(scores, 5, **fields) == [0, 1, 2, 3, 4]
    assert top_ids(scores, 50, **fields) == [0, 1, 2, 3, 4]
    assert top_ids(scores, 5, **fields, top_k=2) == [0, 3]
    assert top_ids(scores, 5, **fields, top_k=3) == [0, 1, 3, 4]
    assert top_ids(scores, 5, **fields, top_p=0.5) == [0]


def test_equal_scores_take_the_lowest_id() -> None:
    row = Row(logits=[1.0, 5.0, 5.0, 5.0], prompt=[0], generated=[], parameters=KINDS[0])
    assert sample([row]).ids.tolist() == [1]


FLOAT_MAX = float(torch.finfo(torch.float32).max)
EXTREME: dict[str, dict[str, Any]] = {
    "tiny-repetition": {"repetition_penalty": 1e-38},
    "smaller-than-float32": {"repetition_penalty": 1e-300},
    "huge-repetition": {"repetition_penalty": 1e300},
    "huge-frequency": {"frequency_penalty": FLOAT_MAX},
    "negative-frequency": {"frequency_penalty": -FLOAT_MAX},
    "beyond-float32": {"frequency_penalty": 1e300, "presence_penalty": -1e300},
    "huge-bias": {"bias": ((2, FLOAT_MAX), (3, -FLOAT_MAX)), "presence_penalty": -FLOAT_MAX},
    "against-each-other": {
        "repetition_penalty": 1e-38,
        "frequency_penalty": -FLOAT_MAX,
        "presence_penalty": -FLOAT_MAX,
        "openai_frequency_penalty": FLOAT_MAX,
    },
}


@pytest.mark.parametrize("name", EXTREME)
@pytest.mark.parametrize(
    "others",
    [{}, {"do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "typical_p": 0.9}],
)
def test_penalties_never_make_a_finite_row_fail(name: str, others: dict[str, Any]) -> None:
    scores = [0.0, 5.0, -5.0, 0.0, *[float(i % 7) for i in range(VOCAB - 4)]]
    parameters = Sampling(**EXTREME[name], **others)
    row = Row(
        logits=scores,
        prompt=[0, 1, 2, 1, 1],
        generated=[3, 1, 2, 2, 5, 5],
        parameters=parameters,
    )
    result = sample([row])
    assert result.failed.tolist() == [False]
    assert result.logprobs.isfinite().all()
    # What is not a number to begin with is not made one.
    scores[7] = math.nan
    assert sample([row]).failed.tolist() == [True]


def test_impossible_tokens_stay_impossible_with_any_penalty_or_bias() -> None:
    parameters = Sampling(
        do_sample=True,
        repetition_penalty=1e-30,
        presence_penalty=-1e30,
        watermark=True,
        bias=((1, 1e30),),
    )
    scores = [0.0, -math.inf, 1.0]
    row = Row(logits=scores, prompt=[1], generated=[1], parameters=parameters, gamma=1.0)
    result = sample([row], [3])
    assert [id_ for _, id_, _ in top_of(result)] == [0, 2]
    assert not result.failed.any()


@pytest.mark.parametrize("way", WAYS)
def test_positions_of_one_sequence_are_sampled_as_if_one_by_one(way: str) -> None:
    """Draft tokens in the token table count only for the rows after them."""
    row = replace(long_rows(513)[11], allowed=None)
    kind = replace(row.parameters, presence_penalty=0.5, watermark=True)
    longest = replace(row, parameters=kind)
    starts = [longest.position - back for back in (0, 3, 1, 2)]
    logits = torch.tensor([longest.logits] * 4)
    with going(way):
        sampler, columns_of = sampler_for([longest])
        several = replace(
            columns_of.select(torch.zeros(4, dtype=torch.int64).numpy()),
            positions=torch.tensor(starts).numpy(),
        )
        together = sampler.sample(logits, several)
        for i, position in enumerate(starts):
            cut = replace(longest, generated=longest.generated[: position - len(longest.prompt)])
            assert columns(together, i) == columns(sample([cut]), 0)


def test_a_row_without_a_mask_is_unaffected_by_the_masks_of_others() -> None:
    batch = long_rows(513)
    free = [replace(row, allowed=None) for row in batch]
    assert masks_of(free) is None
    guided, unguided = sample(batch), sample(free)
    for i, row in enumerate(batch):
        if row.allowed is None:
            assert columns(guided, i) == columns(unguided, i)
        else:
            assert int(guided.ids[i]) in row.allowed


NUM_DRAWS = 100_000
SCORES = [0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.2, -0.3, 0.9, -40.0, 1.1]
FIXED: dict[str, Callable[[NDArray[np.int64]], tuple[NDArray[Any], NDArray[Any]]]] = {
    "seeds": lambda i: (i, np.full(len(i), 5)),
    "seeds-far-apart": lambda i: (i * np.int64(0x1234567890ABCD), np.full(len(i), 700)),
    "positions": lambda i: (np.full(len(i), 2**64 - 1, dtype=np.uint64), i + 1),
    "both": lambda i: (i // 50, i % 50 + 1),
}
DISTRIBUTIONS = {
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
    one = Admitted(slot=0, request_id=0, input_ids=np.zeros(1, dtype=np.int64), parameters=kind)
    columns = np.repeat(one.columns(), len(seeds))
    columns["seed"] = seeds
    sampler = Sampler(torch.zeros(1, int(positions.max()) + 1, dtype=torch.int32), ())
    result = []
    for start in range(0, len(seeds), at_once):
        some = slice(start, start + at_once)
        rows = SamplingRows(
            parameters=columns[some],
            positions=positions[some],
            table_rows=np.zeros(len(seeds[some]), dtype=np.int64),
        )
        logits = torch.tensor(scores).repeat(len(seeds[some]), 1)
        result.append(sampler.sample(logits, rows).ids.numpy())
    return np.concatenate(result)


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
    result = draws(SCORES, DISTRIBUTIONS["plain"], seeds.astype(np.uint64), positions)
    check_distribution(result, probabilities(SCORES))


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_draws_follow_the_distribution_that_is_left(kind: str) -> None:
    index = np.arange(NUM_DRAWS, dtype=np.int64)
    row = Row(logits=SCORES, prompt=[0], generated=[], parameters=DISTRIBUTIONS[kind])
    result = draws(SCORES, DISTRIBUTIONS[kind], index.astype(np.uint64), index % 97 + 1)
    check_distribution(result, probabilities(warped(row)))
    with going("nothing read back"):
        again = draws(
            SCORES, DISTRIBUTIONS[kind], index[:10_000].astype(np.uint64), index[:10_000] % 97 + 1
        )
    assert np.array_equal(again, result[:10_000])


def test_draws_from_many_tokens_follow_the_distribution() -> None:
    """The row has several blocks of the cumulative sum, and tokens of very different weight."""
    generator = np.random.default_rng(8)
    scores = (generator.standard_normal(1200) * 2).tolist()
    index = np.arange(NUM_DRAWS, dtype=np.int64)
    result = draws(
        scores, DISTRIBUTIONS["plain"], index.astype(np.uint64) * np.uint64(977), index % 7 + 1
    )
    check_distribution(result, probabilities(scores))


def test_neighbouring_positions_are_independent() -> None:
    """Pairs of consecutive draws of one seed follow the product of the distribution with itself."""
    scores = SCORES[:6]
    seeds = np.repeat(np.arange(NUM_DRAWS // 2, dtype=np.uint64), 2)
    positions = np.tile(np.array([40, 41]), NUM_DRAWS // 2)
    first, second = draws(scores, DISTRIBUTIONS["plain"], seeds, positions).reshape(-1, 2).T
    probs = probabilities(scores)
    check_distribution(first * len(scores) + second, [p * q for p in probs for q in probs])


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_draws_are_the_same_on_any_row_tile_and_batch(kind: str) -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1] * 30, dtype=np.uint64)
    positions = np.arange(120) % 11 + 1
    scores = [math.sin(i) * 4 for i in range(300)]
    result = draws(scores, DISTRIBUTIONS[kind], seeds, positions)
    order = np.random.default_rng(1).permutation(120)
    shuffled = draws(scores, DISTRIBUTIONS[kind], seeds[order], positions[order], at_once=7)
    assert np.array_equal(shuffled, result[order])
    with going("small tiles"):
        assert np.array_equal(draws(scores, DISTRIBUTIONS[kind], seeds, positions), result)


@settings(derandomize=True)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_uniforms_are_splitmix64(seed: int, position: int) -> None:
    result = uniforms(np.array([seed, 3], dtype=np.uint64), np.array([position, 0]))
    assert result.tolist() == [splitmix64(seed, position) >> 40, splitmix64(3, 0) >> 40]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_is_one_of_its_own(seed: int) -> None:
    """None is cut, made signed or taken for "no seed" on its way to the generator."""
    parameters = Sampling(do_sample=True, seed=seed)
    one = Admitted(
        slot=0, request_id=0, input_ids=np.zeros(1, dtype=np.int64), parameters=parameters
    )
    columns = np.repeat(one.columns(), 3)
    assert [int(value) for value in columns["seed"]] == [seed] * 3
    result = uniforms(columns["seed"], np.arange(3))
    assert result.tolist() == [splitmix64(seed, position) >> 40 for position in range(3)]


def test_uniforms_begin_with_the_published_sequence() -> None:
    """The first outputs of splitmix64 for seed 1234567, as its reference program prints them."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    result = uniforms(np.full(3, 1234567, dtype=np.uint64), np.arange(3))
    assert result.tolist() == [value >> 40 for value in published]


META = torch.device("meta")
ALIGNED = [
    Sampling(),
    Sampling(do_sample=True),
    Sampling(do_sample=True, top_p=0.9),
    Sampling(do_sample=True, typical_p=0.9, top_k=2),
    Sampling(do_sample=True, min_p=0.1),
]


class Softmaxes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the bytes of the rows that softmaxes read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.row_bytes: list[int] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default):
            self.row_bytes.append(args[0].stride(0) * args[0].itemsize)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("vocab", [5, 501, 502, 503, 504])
@pytest.mark.parametrize("kind", ALIGNED)
def test_softmax_reads_rows_that_begin_at_16_bytes(
    vocab: int, kind: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    columns = Admitted(slot=0, request_id=0, input_ids=np.zeros(3, np.int64), parameters=kind)
    rows = SamplingRows(
        parameters=np.full(3, columns.columns(), dtype=PARAMETERS),
        positions=np.full(3, 3),
        table_rows=np.arange(3),
    )
    sampler = Sampler(torch.zeros(3, 4, dtype=torch.int32, device=META), ())
    with Softmaxes() as softmaxes:
        sampler.sample(torch.zeros(3, vocab, device=META), rows)
    assert softmaxes.row_bytes
    assert all(size % 16 == 0 for size in softmaxes.row_bytes)


@pytest.mark.parametrize("kind", ALIGNED)
def test_padding_is_never_chosen(kind: Sampling) -> None:
    logits = [[1.0, 0.5, 0.9, 0.2, 1.1], [math.nan] * 5, [-math.inf] * 5, [1.0, math.inf, 0, 0, 0]]
    rows = [Row(logits=each, prompt=[0], generated=[], parameters=kind) for each in logits]
    with going("nothing read back"):
        result = sample(rows, [5] * 4)
    assert result.failed.tolist() == [False, True, True, True]
    assert all(0 <= id_ < 5 for id_ in result.ids.tolist())
    assert all(id_ < 5 for _, id_, _ in top_of(result))
    expected = sample(rows[:1], [5])
    assert result.ids[0] == expected.ids[0]
    assert result.logprobs[0].item() == pytest.approx(expected.logprobs[0].item())
