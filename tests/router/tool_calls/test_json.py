"""The end of a JSON value in pieces equals the end that the standard library finds in the whole text."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace_router.tool_calls.parsing.json_scanner import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
NEARLY_JSON = st.text('{}[]",:0123.eE+-\\u/btrfalsn \n\t', max_size=14)


def scan(pieces: list[str]) -> tuple[int | None, bool]:
    """The number of characters of the value if it ends, and whether it is invalid."""
    scanner, num_taken = JsonScanner(), 0
    for piece in pieces:
        num_taken += scanner.push(piece)
        if scanner.ended or scanner.failed:
            break
    return num_taken if scanner.ended else None, scanner.failed


def refuse(name: str) -> None:
    raise ValueError(name)


def end_of(text: str) -> int | None:
    """The standard library's result."""
    try:
        return json.JSONDecoder(parse_constant=refuse).raw_decode(text)[1]
    except ValueError:
        return None


@settings(max_examples=60, deadline=None)
@given(
    VALUES,
    st.sampled_from([None, 1]),
    st.booleans(),
    st.sampled_from([" x", "}", "]", ",1", ":", '"']),
)
def test_a_value_ends_where_it_ends(
    value: object, indent: int | None, ascii_only: bool, behind: str
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert scan([text + behind]) == (len(text), False)
    assert scan(list(text + behind)) == (len(text), False)


@given(st.sampled_from('{["'), NEARLY_JSON)
@example("[", "01]")
@example("[", "1.]")
@example("[", "-]")
@example("[", "1e+]")
@example("[", "1,]")
@example("[", ",1]")
@example("{", '"a":1,}')
@example("{", "}x")
@example("{", '"a" : [ ] , "b":{"c" : -0.5E+3}} {')
@example("[", "truefalse]")
@example('"', '\\u00e9\\n"')
@example('"', '\\x"')
@example('"', "\n")
def test_what_is_json_and_what_is_not(first: str, rest: str) -> None:
    text = first + rest
    end, has_failed = scan(list(text))
    assert end == end_of(text)
    assert (end, has_failed) == scan([text])


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', "[Infinity]", "{'a': 1}", "[nul]", "[+1]", '"\x00"', "nope", "]"]
)
def test_what_python_or_people_write_is_none(text: str) -> None:
    assert scan([text]) == (None, True)


@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_a_beginning_is_neither_ended_nor_wrong(value: object) -> None:
    text = json.dumps([value])
    for stop in range(1, len(text)):
        assert scan([text[:stop]]) == (None, False)
