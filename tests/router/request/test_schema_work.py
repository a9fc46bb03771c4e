"""Schemas of hostile shapes, each as large as one may be, are read or refused with bounded work: calls are counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
from bench.router.hostile_schemas import SHAPES, largest

from millrace_router.errors import ToolError, ValidationError
from millrace_router.request.grammar import RawGrammar
from millrace_router.request.request import GrammarKind
from millrace_router.tool_calls.formats.registry import format_of
from millrace_router.tool_calls.parsing.call_format import chat_grammar
from millrace_router.tool_calls.tool import Tool, ToolChoice

MOST_CALLS = 1_500_000
"""Calls of functions, each of which takes up to half a microsecond; comparing pairs took tens of millions."""


def num_calls(call: Callable[[], object]) -> int:
    """How many functions `call` calls, whether it is refused or not."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}
        if count > 2 * MOST_CALLS:
            sys.setprofile(None)
            raise AssertionError("too many calls")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with suppress(ValidationError, ToolError):
            call()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("shape", SHAPES)
def test_a_schema_of_any_shape_is_read_in_bounded_work(shape: str) -> None:
    raw = RawGrammar(GrammarKind.JSON_SCHEMA, largest(SHAPES[shape]))
    assert num_calls(raw.read) < MOST_CALLS


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4"])
@pytest.mark.parametrize(
    "shape", [shape for shape in SHAPES if "types of" in shape or "many with" in shape]
)
def test_parameters_of_any_shape_are_read_in_bounded_work(shape: str, name: str) -> None:
    parameters = {"type": "object", **largest(SHAPES[shape])}
    tool = Tool(name="f", description=None, parameters=parameters, strict=False)
    call_format, choice = format_of(None, name), ToolChoice("required")
    assert num_calls(lambda: chat_grammar(call_format, [tool], choice, None)) < MOST_CALLS
