"""Requests: their scheduling parameters, the hashes of their blocks, and numbers of 32 bits."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from millrace_router.errors import QueueTooLong, ValidationError
from millrace_router.request.block_hashes import BlockHashes, child_key, root_key
from millrace_router.request.float32 import rounded, shortest
from millrace_router.request.limits import MILLRACE, TGI, dialect_of
from millrace_router.request.request import SchedulingParameters
from millrace_router.request.scheduling import scheduling_from, tenant_of


def scheduling(priority: int | None = None, **headers: str) -> SchedulingParameters:
    """Scheduling parameters without tenants; `x_priority` stands for `x-priority`."""
    given_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return scheduling_from(given_headers, priority, by_tenant=False)


def test_an_absent_field_has_its_default() -> None:
    assert scheduling() == SchedulingParameters()


@pytest.mark.parametrize(
    ("text", "priority"), [("0", 0), ("10", 10), ("-10", -10), ("+7", 7), ("007", 7), ("-0", 0)]
)
def test_priorities_are_read_from_the_header(text: str, priority: int) -> None:
    assert scheduling(x_priority=text).priority == priority


@pytest.mark.parametrize(
    "text", ["11", "-11", "", " ", "1.0", "1e0", "high", "٣", "1_0", "--1", "9" * 5000, "\udcff"]
)
def test_other_priorities_are_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="`x-priority` must be an integer from"):
        scheduling(x_priority=text)


@given(st.text(max_size=5))
def test_a_priority_is_accepted_just_if_it_is_one(text: str) -> None:
    # Stated apart from the implementation's pattern and range.
    accepted = {
        f"{sign}{zeros}{number}"
        for number in range(11)
        for zeros in ("", "0", "00", "000", "0000")
        for sign in ("", "+", "-")
    }
    if text in accepted:
        assert scheduling(x_priority=text).priority == int(text)
    else:
        with pytest.raises(ValidationError):
            scheduling(x_priority=text)


def test_a_body_s_priority_beats_the_header_s() -> None:
    assert scheduling(-4, x_priority="5").priority == -4
    assert scheduling(0, x_priority="5").priority == 0
    # What does not count is not looked at.
    assert scheduling(1, x_priority="high").priority == 1


@pytest.mark.parametrize("priority", [-11, 11, 10**30])
def test_a_body_s_priority_has_the_same_bounds(priority: int) -> None:
    message = f"`priority` must be an integer from -10 to 10. Given: {priority}"
    with pytest.raises(ValidationError, match=re.escape(message)):
        scheduling(priority)
    assert scheduling(10).priority == 10
    assert scheduling(-10).priority == -10


def test_deadlines_are_seconds() -> None:
    assert scheduling(x_max_queue_ms="1").max_queue_seconds == 0.001
    assert scheduling(x_max_queue_ms="02500").max_queue_seconds == 2.5


@pytest.mark.parametrize("text", ["0", "000", "-1", "+1", "1.5", "", "soon", "9" * 13, "\udcff"])
def test_other_deadlines_are_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="`x-max-queue-ms` must be a positive") as caught:
        scheduling(x_max_queue_ms=text)
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("asked", "allowed", "deadline"),
    [(None, 3.0, 3.0), ("2000", 3.0, 2.0), ("4000", 3.0, 3.0), ("4000", None, 4.0)],
)
def test_the_server_limits_the_wait(
    asked: str | None, allowed: float | None, deadline: float
) -> None:
    headers = {} if asked is None else {"x-max-queue-ms": asked}
    scheduling = scheduling_from(headers, None, by_tenant=False, max_queue_seconds=allowed)
    assert scheduling.max_queue_seconds == deadline


def test_tenants_are_read_only_where_they_count() -> None:
    headers = CIMultiDict({"X-Tenant": "a", "Authorization": "Bearer k", "X-Priority": "3"})
    assert scheduling_from(headers, None, by_tenant=False) == SchedulingParameters(priority=3)
    assert scheduling_from(headers, None, by_tenant=True) == SchedulingParameters(
        priority=3, tenant="a"
    )


def test_a_tenant_is_a_name_or_else_a_key_that_cannot_be_read_back() -> None:
    keys = ["Bearer a", "Bearer b", "Bearer A", "Bearer \udcff"]
    tenants = [tenant_of({"authorization": key}) for key in keys]
    assert len(set(tenants)) == len(keys)
    assert tenants == [tenant_of({"authorization": key}) for key in keys]
    assert all(re.fullmatch("[0-9a-f]{32}", tenant) for tenant in tenants)
    assert tenant_of({"x-tenant": "me", "authorization": keys[0]}) == "me"
    assert tenant_of({"x-tenant": "", "authorization": keys[0]}) == tenants[0]
    assert tenant_of({"authorization": ""}) == tenant_of({}) == ""


@pytest.mark.parametrize(
    ("predicted", "allowed", "said"),
    [
        (0.0042, 0.001, "wait for 0.004 s, and may wait for 0.001 s"),
        (14.25, 10.0, "wait for 14.25 s, and may wait for 10 s"),
        (5000.5, 60.0, "wait for 5000.5 s, and may wait for 60 s"),
    ],
)
def test_a_refusal_names_even_short_waits(predicted: float, allowed: float, said: str) -> None:
    error = QueueTooLong(predicted_seconds=predicted, allowed_seconds=allowed)
    assert str(error).endswith(said)


def test_a_gateway_names_the_tenant_after_the_client_and_before_the_key() -> None:
    gateway = {"x-gateway-inference-fairness-id": "team"}
    key = {"authorization": "Bearer secret"}
    assert tenant_of(gateway) == tenant_of(gateway | key) == "team"
    assert tenant_of(gateway | {"x-tenant": "other"}) == "other"
    assert tenant_of({"x-gateway-inference-fairness-id": ""} | key) == tenant_of(key)
    named = scheduling_from(gateway, None, by_tenant=True, key_name="key")
    assert named.tenant == "key"


token_ids = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 2), max_size=24)


def keys(ids: list[int], size: int, adapter_id: str | None = None) -> list[bytes]:
    return list(BlockHashes(size, adapter_id).first(len(ids) // size, ids, []))


@given(token_ids, token_ids, st.integers(1, 5))
def test_chains_agree_exactly_as_far_as_their_full_blocks_do(
    one: list[int], two: list[int], size: int
) -> None:
    for i, (a, b) in enumerate(zip(keys(one, size), keys(two, size), strict=False), 1):
        assert (a == b) == (one[: i * size] == two[: i * size])


@given(token_ids, token_ids, st.integers(1, 5), st.data())
def test_generated_tokens_continue_the_prompt(
    prompt: list[int], generated: list[int], size: int, data: st.DataObject
) -> None:
    """However far the keys were asked for before, and wherever the prompt ends inside a block."""
    growing = BlockHashes(size)
    number = (len(prompt) + len(generated)) // size
    asked = data.draw(st.integers(0, len(prompt) // size))
    growing.first(asked, prompt, [])
    assert list(growing.first(number, prompt, generated)) == keys(prompt + generated, size)
    assert list(growing.first(asked, prompt, generated)) == keys(prompt, size)[:asked]


def test_equal_tokens_after_different_ones_have_other_keys() -> None:
    """KV depends on all that went before: a block is found by its whole past, not by its own tokens."""
    a, b = keys([1, 2, 7, 8], 2), keys([3, 4, 7, 8], 2)
    assert len({*a, *b}) == 4


def test_bounds_of_tokens_and_of_blocks_do_not_blur() -> None:
    """Ids of any size are written with the same width, so no two lists of them read alike."""
    assert child_key(root_key(), [1, 256]) != child_key(root_key(), [257, 0])
    assert child_key(root_key(), [1, 0]) != child_key(root_key(), [1])
    assert keys([1, 2, 3, 4], 4) != keys([1, 2, 3, 4], 2)[1:]


def test_adapters_share_nothing() -> None:
    ids = [1, 2, 3, 4]
    chains = [keys(ids, 2, adapter) for adapter in (None, "a", "b")]
    assert len({key for chain in chains for key in chain}) == 6


def test_hashes_are_long_enough_to_avoid_collisions() -> None:
    assert {len(key) for key in keys([1, 2, 3, 4], 1)} == {32}


def test_a_block_that_is_not_full_has_no_key() -> None:
    with pytest.raises(ValueError, match="not full"):
        BlockHashes(4).first(2, [1, 2, 3, 4, 5], [6, 7])


def test_a_salt_parts_all_blocks() -> None:
    """Each part counts in its place, and no parts together make another."""
    salts: list[tuple[str, ...]] = [(), ("", "a"), ("a", ""), ("a", "b"), ("b", "a"), ("ab", "")]
    keys = [BlockHashes(2, None, salt).first(2, [1, 2, 3, 4], []) for salt in salts]
    assert len({key for some in keys for key in some}) == 2 * len(salts)
    again = BlockHashes(2, None, ("a", "b")).first(2, [1, 2, 3, 4], [])
    assert list(again) == list(keys[3])


def as_float32(value: float) -> bytes:
    return struct.pack("f", value)


def shortest_by_search(value: float) -> float:
    """The decimal of fewest digits that reads back to the same float32."""
    for digits in range(9):
        text = f"{value:.{digits}e}"
        if as_float32(float(text)) == as_float32(value):
            return float(text)
    raise AssertionError(value)


@settings(max_examples=300, deadline=None, database=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_the_shortest_decimal_equals_the_result_of_a_search(value: float) -> None:
    assert shortest(value) == shortest_by_search(value)


@settings(max_examples=300, deadline=None, database=None)
@given(st.integers(0, 2**32 - 1))
def test_any_bit_pattern_gets_its_shortest_decimal(bits: int) -> None:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    if math.isfinite(value):
        assert shortest(value) == shortest_by_search(value)
    else:
        assert shortest(value) is None


@pytest.mark.parametrize(
    ("widened", "text"),
    [
        (-1.3242188, "-1.3242188"),
        (0.1, "0.1"),
        (16777216.0, "16777216.0"),
        (8388.609, "8388.609"),
        (-0.0, "-0.0"),
        (1.0, "1.0"),
    ],
)
def test_float32_values_are_written_as_the_decimals_that_people_expect(
    widened: float, text: str
) -> None:
    (value,) = struct.unpack("<f", as_float32(widened))
    assert repr(shortest(value)) == text


def test_numbers_are_rounded_to_float32() -> None:
    assert rounded(0.999999999999) == 1.0
    assert rounded(0.1) == struct.unpack("<f", as_float32(0.1))[0]
    with pytest.raises(ValueError, match="out of range"):
        rounded(1e39)


def test_every_switch_is_off_in_one_dialect_and_on_in_the_other() -> None:
    of_the_model = replace(TGI, reads_images=True, lacks_encoder=True)
    assert set(astuple(MILLRACE)) == {False}
    assert set(astuple(of_the_model)) == {True}
    assert not TGI.reads_images
    assert not TGI.lacks_encoder


def test_the_flag_selects_a_dialect() -> None:
    assert dialect_of(strict_tgi=False) is MILLRACE
    assert dialect_of(strict_tgi=True) is TGI
