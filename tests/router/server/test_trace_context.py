"""`traceparent`: the specification's own cases of what is valid."""

from __future__ import annotations

import pytest

from millrace_router.telemetry.trace_context import new_context, trace_id_of

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"

VALID = {
    "sampled": f"00-{TRACE}-{PARENT}-01",
    "not sampled": f"00-{TRACE}-{PARENT}-00",
    "unknown flags": f"00-{TRACE}-{PARENT}-ff",
    "a later version": f"01-{TRACE}-{PARENT}-00",
    "a later version that says more": f"cc-{TRACE}-{PARENT}-01-what-the-future-brings",
}
INVALID = {
    "empty": "",
    "no trace": f"00-{'0' * 32}-{PARENT}-01",
    "no parent": f"00-{TRACE}-{'0' * 16}-01",
    "the forbidden version": f"ff-{TRACE}-{PARENT}-01",
    "capitals": f"00-{TRACE.upper()}-{PARENT}-01",
    "a short trace": f"00-{TRACE[1:]}-{PARENT}-01",
    "a long trace": f"00-{TRACE}0-{PARENT}-01",
    "a short parent": f"00-{TRACE}-{PARENT[1:]}-01",
    "a short version": f"0-{TRACE}-{PARENT}-01",
    "no flags": f"00-{TRACE}-{PARENT}",
    "short flags": f"00-{TRACE}-{PARENT}-1",
    "more than version 00 has": f"00-{TRACE}-{PARENT}-01-more",
    "more without a dash": f"cc-{TRACE}-{PARENT}-01.more",
    "a line end": f"00-{TRACE}-{PARENT}-01\n",
    "other digits": f"00-{TRACE[:-1]}٣-{PARENT}-01",
}


@pytest.mark.parametrize("given", VALID.values(), ids=VALID)
def test_a_valid_one_names_its_trace(given: str) -> None:
    assert trace_id_of([given]) == TRACE


@pytest.mark.parametrize("given", INVALID.values(), ids=INVALID)
def test_an_invalid_one_names_none(given: str) -> None:
    assert trace_id_of([given]) is None


def test_there_is_one_or_none() -> None:
    assert trace_id_of([]) is None
    assert trace_id_of([VALID["sampled"]] * 2) is None


def test_bytes_of_a_later_version_go_nowhere() -> None:
    header = f"01-{TRACE}-{PARENT}-01-" + b"\xff".decode(errors="surrogateescape")
    assert new_context([header], []).parent == f"01-{TRACE}-{PARENT}-01"
