"""Sampling against a per-row reference, and bit for bit against itself in other company."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace_sampling_reference import (
    Row,
    inverse_cdf,
    log_probabilities,
    probabilities,
    splitmix64,
    warped,
)
from millrace_shard.randomness import uniforms
from millrace_shard.sampling import Sampled, Sampler, SamplingRows
from millrace_shard.sequence import PARAMETERS, SamplingParameters, Sequence

VOCAB = 40


def sampler_for(rows: list[Row], top_n: list[int] | None = None) -> tuple[Sampler, SamplingRows]:
    """A history table with the rows in reverse, and garbage wherever there is no token."""
    width = max(len(row.prompt) + len(row.generated) for row in rows) + 3
    history = torch.full((len(rows), width), 7, dtype=torch.int32)
    parameters = np.zeros(len(rows), dtype=PARAMETERS)
    for i, row in enumerate(rows):
        ids = row.prompt + row.generated
        history[len(rows) - 1 - i, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        sequence = Sequence(
            slot=0,
            request_id=0,
            input_ids=np.array(ids, dtype=np.int64),
            generated_tokens=len(row.generated),
            parameters=row.parameters,
            top_n_tokens=top_n[i] if top_n else 0,
            min_new_tokens=row.min_new_tokens,
        )
        parameters[i] = sequence.columns()
    positions = np.array([len(row.prompt) + len(row.generated) for row in rows])
    eos = next((row.eos for row in rows if row.eos), ())
    return Sampler(history, eos), SamplingRows(
        parameters=parameters,
        positions=positions,
        history_rows=np.arange(len(rows))[::-1].copy(),
    )


def sample(rows: list[Row], top_n: list[int] | None = None) -> Sampled:
    sampler, columns = sampler_for(rows, top_n)
    return sampler.sample(torch.tensor([row.logits for row in rows]), columns)


ids = st.integers(0, VOCAB - 1)
logits = st.lists(st.integers(-60, 60).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB)
parameters = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([1.0, 0.5, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 10, 400]),
    top_p=st.sampled_from([1.0, 0.93, 0.41, 0.07]),
    typical_p=st.sampled_from([1.0, 0.87, 0.23]),
    do_sample=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.75]),
    frequency_penalty=st.sampled_from([0.0, 1.0, -0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    occurrence_penalty=st.sampled_from([0.0, 0.25, -0.75]),
)
rows = st.builds(
    Row,
    logits=logits,
    prompt=st.lists(ids, min_size=1, max_size=9),
    generated=st.lists(ids, max_size=9),
    parameters=parameters,
    min_new_tokens=st.integers(0, 5),
    eos=st.just((0, 39)),
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.lists(rows, min_size=1, max_size=5))
def test_tokens_and_logprobs_agree_with_the_reference(batch: list[Row]) -> None:
    """Where the reference's rounding decides who is dropped, the probability itself is compared."""
    found = sample(batch)
    for row, id_, logprob in zip(batch, found.ids.tolist(), found.logprobs.tolist(), strict=True):
        scores = warped(row)
        if not _is_clear_cut(row):
            continue
        assert logprob == pytest.approx(log_probabilities(scores)[id_], abs=1e-4)
        if row.parameters.do_sample:
            position = len(row.prompt) + len(row.generated)
            uniform = (splitmix64(row.parameters.seed, position) >> 40) / 2**24
            probs = probabilities(scores)
            expected = inverse_cdf(probs, uniform)
            near = {inverse_cdf(probs, max(0.0, uniform + d)) for d in (-1e-6, 1e-6)}
            assert id_ == expected or id_ in near
        else:
            assert scores[id_] == pytest.approx(max(scores), abs=1e-5)


def _is_clear_cut(row: Row) -> bool:
    """Whether a slightly different mass or slightly different keys keep the same tokens."""
    p = row.parameters
    kept = {
        tuple(
            math.isinf(score)
            for score in warped(
                Row(
                    logits=row.logits,
                    prompt=row.prompt,
                    generated=row.generated,
                    min_new_tokens=row.min_new_tokens,
                    eos=row.eos,
                    parameters=SamplingParameters(
                        temperature=p.temperature,
                        top_k=p.top_k,
                        top_p=p.top_p if p.top_p == 1 else p.top_p + shift,
                        typical_p=p.typical_p if p.typical_p == 1 else p.typical_p + shift,
                        repetition_penalty=p.repetition_penalty,
                        frequency_penalty=p.frequency_penalty,
                        presence_penalty=p.presence_penalty,
                        occurrence_penalty=p.occurrence_penalty,
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


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Where libraries split one long row over threads, they must not do so here."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


KINDS = [
    SamplingParameters(),
    SamplingParameters(do_sample=True, seed=1),
    SamplingParameters(do_sample=True, seed=2, temperature=0.7),
    SamplingParameters(do_sample=True, seed=3, temperature=1.4, top_k=50),
    SamplingParameters(do_sample=True, seed=4, top_k=5000),
    SamplingParameters(do_sample=True, seed=5, top_p=0.9),
    SamplingParameters(do_sample=True, seed=6, temperature=2.5, top_p=0.99),
    SamplingParameters(do_sample=True, seed=7, typical_p=0.3),
    SamplingParameters(do_sample=True, seed=8, temperature=0.9, top_k=40, top_p=0.8, typical_p=0.9),
    SamplingParameters(repetition_penalty=1.3),
    SamplingParameters(frequency_penalty=0.5, presence_penalty=0.5, occurrence_penalty=0.1),
    SamplingParameters(do_sample=True, seed=9, repetition_penalty=1.1, top_p=0.5),
]


def columns(sampled: Sampled, row: int) -> tuple[object, ...]:
    top = [
        (id_, bits(torch.tensor([logprob])))
        for owner, id_, logprob in top_of(sampled)
        if owner == row
    ]
    return sampled.ids[row].item(), bits(sampled.logprobs[row : row + 1]), top


def top_of(sampled: Sampled) -> list[tuple[int, int, float]]:
    """Candidates as (row, id, log probability), ascending."""
    parts = [top.chosen(top.best) for top in sampled.top]
    return sorted(
        candidate
        for part in parts
        for candidate in zip(*(column.tolist() for column in part), strict=True)
    )


def bits(values: Tensor) -> list[int]:
    return [int(value) for value in values.view(torch.int32).tolist()]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab", [50257, 32000, 513])
def test_a_row_is_the_same_bits_alone_and_in_any_company(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    batch = []
    for i, kind in enumerate(KINDS):
        held = torch.randint(vocab, (5 + 7 * i,), generator=generator).tolist()
        values = torch.randn(vocab, generator=generator) * 3
        batch.append(
            Row(
                logits=values.bfloat16().float().tolist(),
                prompt=held[:4],
                generated=held[4:],
                parameters=kind,
            )
        )
    wanted = [i % 4 * 3 for i in range(len(batch))]
    together = sample(batch, wanted)
    backwards = sample(batch[::-1], wanted[::-1])
    for i, row in enumerate(batch):
        alone = sample([row], [wanted[i]])
        assert columns(together, i) == columns(alone, 0), row.parameters
        assert columns(backwards, len(batch) - 1 - i) == columns(alone, 0), row.parameters


def test_draws_follow_the_distribution() -> None:
    """Chi-square with fixed seeds: 4000 draws over 12 tokens stay under the 99.9 % quantile."""
    scores = [0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.2, -0.3, 0.9, -40.0, 1.1]
    batch = [
        Row(
            logits=scores,
            prompt=[1] * (1 + i % 50),
            generated=[],
            parameters=SamplingParameters(do_sample=True, seed=i // 50),
        )
        for i in range(4000)
    ]
    counts = Counter(sample(batch).ids.tolist())
    expected = [4000 * q for q in probabilities(scores)]
    possible = [i for i, e in enumerate(expected) if e > 5]
    statistic = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in possible)
    assert statistic < 29.6
    assert counts[10] == 0
    assert sum(counts.values()) == sum(counts[i] for i in possible)


@settings(derandomize=True)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_uniforms_are_splitmix64(seed: int, position: int) -> None:
    found = uniforms(np.array([seed, 3], dtype=np.uint64), np.array([position, 0]))
    assert found.tolist() == [splitmix64(seed, position) >> 40, splitmix64(3, 0) >> 40]


def test_uniforms_begin_with_the_published_sequence() -> None:
    """The first outputs of splitmix64 for seed 1234567, as its reference program prints them."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = uniforms(np.full(3, 1234567, dtype=np.uint64), np.arange(3))
    assert found.tolist() == [value >> 40 for value in published]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_fail_and_leave_the_others_alone(bad: float) -> None:
    good = Row(logits=[0.5, 3.0, 1.0] * 20, prompt=[4], generated=[], parameters=KINDS[8])
    for kind in KINDS:
        values = [bad] * 60 if bad == -math.inf else [1.0] * 30 + [bad] + [2.0] * 29
        spoiled = Row(logits=values, prompt=[4], generated=[5], parameters=kind)
        found = sample([spoiled, good, spoiled], [2, 2, 0])
        assert found.failed.tolist() == [True, False, True]
        assert columns(found, 1) == columns(sample([good], [2]), 0)
        assert all(0 <= id_ < 60 for id_ in found.ids.tolist())


def test_impossible_tokens_in_finite_logits_are_no_failure() -> None:
    row = Row(
        logits=[-math.inf, 2.0, -math.inf, 1.0], prompt=[1], generated=[], parameters=KINDS[0]
    )
    found = sample([row], [4])
    assert found.failed.tolist() == [False]
    assert [id_ for _, id_, _ in top_of(found)] == [1, 3]


@pytest.mark.parametrize("kind", [p for p in KINDS if p.do_sample])
def test_extreme_parameters_never_leave_the_vocabulary(kind: SamplingParameters) -> None:
    for temperature in (1e-30, 1e30):
        hard = SamplingParameters(
            do_sample=True, seed=kind.seed, temperature=temperature, top_p=1e-6
        )
        found = sample([Row(logits=[3.0, 9.0, -5.0], prompt=[0], generated=[], parameters=hard)])
        assert found.ids.tolist() == [1]
        assert not found.failed.any()


def top_ids(scores: list[float], n: int, **fields: object) -> list[int]:
    row = Row(logits=scores, prompt=[0], generated=[], parameters=SamplingParameters(**fields))  # type: ignore[arg-type]
    found = sample([row], [n])
    return [id_ for _, id_, _ in top_of(found)]


def test_ties_at_the_last_candidate_are_all_reported() -> None:
    scores = [-1.0, -3.0, -4.0, -2.0, -3.0]
    assert top_ids(scores, 0) == []
    assert top_ids(scores, 2) == [0, 3]
    assert top_ids(scores, 3) == [0, 1, 3, 4]
    assert top_ids(scores, 4) == [0, 1, 3, 4]
    assert top_ids(scores, 5) == [0, 1, 2, 3, 4]
    assert top_ids(scores, 50) == [0, 1, 2, 3, 4]
    assert top_ids(scores, 5, top_k=2) == [0, 3]


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
    "against-each-other": {
        "repetition_penalty": 1e-38,
        "frequency_penalty": -FLOAT_MAX,
        "presence_penalty": -FLOAT_MAX,
        "occurrence_penalty": FLOAT_MAX,
    },
}


@pytest.mark.parametrize("name", EXTREME)
@pytest.mark.parametrize(
    "others",
    [{}, {"do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "typical_p": 0.9}],
)
def test_penalties_never_make_a_finite_row_fail(name: str, others: dict[str, Any]) -> None:
    scores = [0.0, 5.0, -5.0, 0.0, *[float(i % 7) for i in range(VOCAB - 4)]]
    parameters = SamplingParameters(**EXTREME[name], **others)
    row = Row(
        logits=scores,
        prompt=[0, 1, 2, 1, 1],
        generated=[3, 1, 2, 2, 5, 5],
        parameters=parameters,
    )
    found = sample([row])
    assert found.failed.tolist() == [False]
    assert found.logprobs.isfinite().all()
    # What is not a number to begin with is not made one.
    scores[7] = math.nan
    assert sample([row]).failed.tolist() == [True]
