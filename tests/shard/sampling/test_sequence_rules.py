"""Rules of sequences against the logits processors of transformers, and rows that have no possible token left."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    TemperatureLogitsWarper,
)

from millrace_proto.sampling import Dry, Sampling, SequenceRules
from millrace_shard.sampling.warpers import keep_top_n_sigma
from millrace_testing.engines.sampling_driver import sample, sampler_for
from millrace_testing.engines.sampling_reference import Row

VOCAB = 8
ids = st.integers(0, VOCAB - 1)
passages = st.lists(st.lists(ids, min_size=1, max_size=3), min_size=1, max_size=5)
texts = st.lists(ids, max_size=8)


def row_with(rules: SequenceRules, generated: list[int], **other: object) -> Row:
    parameters = Sampling(rules=rules)
    logits = [float(id_ % 5) for id_ in range(VOCAB)]
    return Row(
        logits=logits,
        prompt=[0, 1, 2],
        generated=generated,
        parameters=parameters,
        **other,  # type: ignore[arg-type]
    )


def processed(row: Row) -> list[float]:
    """The scores that the sampler chooses from."""
    sampler, columns = sampler_for([row])
    logits = torch.tensor([row.logits])
    sampler._processors.apply(logits, columns, sampler.groups_of(columns.parameters), None)
    return [float(score) for score in logits[0]]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(passages, texts)
def test_bad_words_match_transformers(words: list[list[int]], generated: list[int]) -> None:
    """Which looks at the prompt, too: it gets the generated tokens alone."""
    rules = SequenceRules(bad_words=tuple(map(tuple, words)))
    row = row_with(rules, generated)
    theirs = NoBadWordsLogitsProcessor(words)(
        torch.tensor([generated], dtype=torch.long), torch.tensor([row.logits])
    )
    assert processed(row) == theirs[0].tolist()


@given(st.integers(0, 5), st.lists(ids, max_size=6), st.sets(ids, min_size=1))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_stop_tokens_wait_for_the_minimum(least: int, generated: list[int], stop: set[int]) -> None:
    row = row_with(SequenceRules(stop_ids=tuple(stop)), generated, min_new_tokens=least)
    theirs = MinNewTokensLengthLogitsProcessor(3, least, sorted(stop))(
        torch.tensor([row.prompt + generated]), torch.tensor([row.logits])
    )
    assert processed(row) == theirs[0].tolist()


def test_dry_raises_a_known_text() -> None:
    """0 1 2 0 1: the token 2 would repeat a passage of two; with more repeated it falls faster."""
    dry = Dry(multiplier=1.0, base=2.0, allowed_length=1, window=0)
    row = row_with(SequenceRules(dry=dry), [0, 1])
    lowered = [before - after for before, after in zip(row.logits, processed(row), strict=True)]
    assert lowered == [0, 0, 2, 0, 0, 0, 0, 0]
    row = row_with(SequenceRules(dry=dry), [0, 1, 2, 0, 1, 2, 0, 1])
    lowered = [before - after for before, after in zip(row.logits, processed(row), strict=True)]
    assert lowered == [0, 0, 2.0**7, 0, 0, 0, 0, 0]


def test_dry_of_a_long_loop_stays_finite() -> None:
    dry = Dry(multiplier=3e38, base=1e30, allowed_length=0, window=0)
    scores = processed(row_with(SequenceRules(dry=dry), [3] * 200))
    assert all(map(math.isfinite, scores))
    assert min(scores) == scores[3] == torch.finfo(torch.float32).min


def test_a_row_without_a_possible_token_fails_no_other_row() -> None:
    impossible = SequenceRules(allowed_ids=(1,), bad_words=((1,),))
    rows = [row_with(SequenceRules(allowed_ids=(6,)), []), row_with(impossible, [])]
    sampled = sample(rows)
    assert sampled.failed.tolist() == [False, True]
    assert sampled.ids[0] == 6


def test_top_n_sigma_does_not_depend_on_temperature() -> None:
    scores = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 5
    n = torch.tensor([[0.5], [1.0], [1.5], [3.0]])
    kept = keep_top_n_sigma(scores, n)
    sigma = scores.double().std(-1, correction=0, keepdim=True)
    expected = scores >= scores.amax(-1, keepdim=True) - n.double() * sigma
    assert torch.equal(kept.isfinite(), expected)
    cooled = TemperatureLogitsWarper(2.0)(torch.empty(4, 0), scores)
    assert torch.equal(keep_top_n_sigma(cooled, n).isfinite(), expected)


def test_xtc_is_on_with_the_requested_probability() -> None:
    """The coin and the token come from one number: the share and the draw must still be right."""
    share, count, on, drawn = 0.3, 4000, 0, [0, 0, 0]
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    rows = [
        Row(
            logits=logits,
            prompt=[0],
            generated=[],
            parameters=Sampling(
                do_sample=True, seed=seed, xtc_probability=share, xtc_threshold=0.25
            ),
        )
        for seed in range(count)
    ]
    sampled = sample(rows)
    for id_, logprob in zip(sampled.ids.tolist(), sampled.logprobs.tolist(), strict=True):
        drawn[id_] += 1
        on += not any(math.isclose(logprob, one, abs_tol=1e-4) for one in logits)
    # The best token is the only one that is excluded; without it 0.6 and 0.4 are left.
    expected = [
        (1 - share) * 0.5,
        (1 - share) * 0.3 + share * 0.6,
        (1 - share) * 0.2 + share * 0.4,
    ]
    assert abs(on / count - share) < 4 * math.sqrt(share * (1 - share) / count)
    for result, p in zip(drawn, expected, strict=True):
        assert abs(result / count - p) < 4 * math.sqrt(p * (1 - p) / count)
