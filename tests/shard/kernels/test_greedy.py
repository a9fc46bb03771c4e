"""The greedy choice, compiled and in plain torch, against torch's own maximum and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels import scores
from millrace_shard.kernels.build import BuildError, load_operators

Choose = Callable[[Tensor], scores.Best]


@pytest.fixture(params=["compiled", "plain"])
def choose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Choose:
    if request.param == "plain":
        monkeypatch.setattr(scores, "operators_loaded", lambda: False)
    else:
        try:
            load_operators()
        except BuildError as error:
            pytest.skip(str(error))
    return scores.choose_greedy


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 49152])
def test_it_is_the_maximum_and_its_log_probability(choose: Choose, size: int) -> None:
    logits = torch.randn(7, size, generator=torch.Generator().manual_seed(size)) * 5
    ids, logprobs, failed = choose(logits)
    assert not failed.any()
    assert torch.equal(ids, logits.argmax(-1))
    expected = logits.double().log_softmax(-1).max(-1).values
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_first_of_equals_is_chosen(choose: Choose) -> None:
    logits = torch.zeros(3, 100)
    logits[1, [40, 99]] = 2.0
    logits[2, [99, 17]] = 3.0
    assert choose(logits)[0].tolist() == [0, 40, 17]


def test_forbidden_tokens_are_never_chosen(choose: Choose) -> None:
    logits = torch.full((1, 40), -math.inf)
    logits[0, 39] = -5.0
    ids, logprobs, _ = choose(logits)
    assert ids.tolist() == [39]
    assert logprobs.tolist() == [0.0]
    assert not logprobs.signbit().any(), (
        "a token that is forced is said to have 0.0, and never -0.0"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 37])
def test_only_the_row_that_is_not_finite_fails(choose: Choose, bad: float, place: int) -> None:
    logits = torch.randn(3, 38)
    expected = choose(logits.clone())
    logits[1, place] = bad
    ids, logprobs, failed = choose(logits)
    assert failed.tolist() == [False, True, False]
    assert not logprobs[1].isfinite()
    assert 0 <= int(ids[1]) < 38
    for row in (0, 2):
        assert ids[row] == expected[0][row]
        assert logprobs[row] == expected[1][row]


def test_rows_have_the_same_bits_in_any_batch(choose: Choose) -> None:
    logits = torch.randn(40, 1003)
    ids, logprobs, _ = choose(logits)
    for row in range(40):
        alone = choose(logits[row : row + 1])
        assert alone[0][0] == ids[row]
        assert alone[1][0] == logprobs[row]
