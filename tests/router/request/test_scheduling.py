"""Headers and body set the scheduling parameters of a request."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from millrace_router.errors import QueueTooLong, ValidationError
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


def test_tenants_count_only_where_they_are_asked_for() -> None:
    headers = CIMultiDict({"X-Tenant": "a", "Authorization": "Bearer k", "X-Priority": "3"})
    assert scheduling_from(headers, None, by_tenant=False) == SchedulingParameters(priority=3)
    assert scheduling_from(headers, None, by_tenant=True) == SchedulingParameters(
        priority=3, tenant="a"
    )


def test_a_tenant_is_a_name_or_else_a_key_that_cannot_be_read_back() -> None:
    keys = ["Bearer a", "Bearer b", "bearer a", "Bearer \udcff"]
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
def test_a_refusal_says_how_long_even_where_that_is_short(
    predicted: float, allowed: float, said: str
) -> None:
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
