"""The input of a text tool is read from arguments that come in any pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.tool_calls.free_text.text_reader import TextReader


def read(arguments: str, cuts: list[int]) -> str:
    """The input, from arguments that come in pieces."""
    reader = TextReader()
    bounds = [0, *sorted(cut % (len(arguments) + 1) for cut in cuts), len(arguments)]
    return "".join(reader.push(arguments[begin:end]) for begin, end in pairwise(bounds))


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.booleans(),
    st.lists(st.integers(0, 1000), max_size=20),
)
def test_any_text_comes_as_it_is(text: str, is_ascii: bool, cuts: list[int]) -> None:
    assert read(json.dumps({"input": text}, ensure_ascii=is_ascii), cuts) == text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "a\\ud83d"}', "a\N{REPLACEMENT CHARACTER}"),
        ('{"input": "\\\\ud83d"}', "\\ud83d"),
        ('{\n  "input" :\t"a" }  ', "a"),
        ('{"in', ""),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ("{}", "{}"),
    ],
)
def test_the_edges(arguments: str, said: str) -> None:
    assert read(arguments, []) == read(arguments, list(range(len(arguments)))) == said


@given(st.text('{}"\\:inputud83 a', max_size=40), st.lists(st.integers(0, 1000), max_size=20))
def test_cuts_change_nothing(arguments: str, cuts: list[int]) -> None:
    assert read(arguments, cuts) == read(arguments, [])
