"""`logit_bias` as clients write it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.api.body.sampling import MAX_BIASES, biases_from
from millrace_router.errors import ValidationError


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        biases_from(given)
    return str(caught.value).removeprefix("Input validation error: ")


def test_biases_are_read_by_token_id() -> None:
    given = {"5": 1, "0": -100, "70000": 0.1, "9": 100.0, "8": 0}
    # The wire has single precision.
    nearest = 0.10000000149011612
    assert biases_from(given) == ((5, 1.0), (0, -100.0), (70000, nearest), (9, 100.0), (8, 0.0))
    assert biases_from({}) == ()


@pytest.mark.parametrize(
    "key",
    ["", "-1", "+1", "05", "00", "1.0", "1e3", "1_0", " 1", "a", "²", "٣", "9" * 11, "9" * 5000],
)
def test_wrong_token_ids_are_refused(key: str) -> None:
    assert refusal({key: 1}) == f"`logit_bias` must have token ids for keys. Given: {key[:20]}"


@pytest.mark.parametrize(
    "value", [None, True, "1", [], {}, 100.1, -101, 10**400, float("nan"), float("inf")]
)
def test_wrong_biases_are_refused(value: object) -> None:
    assert refusal({"3": value}) == (
        "`logit_bias` must have numbers from -100 to 100 for values. Token 3 has another"
    )


def test_there_is_a_greatest_number() -> None:
    assert len(biases_from({str(id_): 1 for id_ in range(MAX_BIASES)})) == MAX_BIASES == 300
    given = {str(id_): "wrong too" for id_ in range(MAX_BIASES + 1)}
    assert refusal(given) == "`logit_bias` must have at most 300 tokens. Given: 301"


@given(st.dictionaries(st.text("0123456789", min_size=1, max_size=4), st.floats(-100, 100)))
def test_no_id_stands_twice(given: dict[str, float]) -> None:
    try:
        ids = [id_ for id_, _ in biases_from(given)]
    except ValidationError:
        assert any(key != str(int(key)) for key in given)
    else:
        assert sorted(ids) == sorted(map(int, given))
        assert len(set(ids)) == len(ids)
