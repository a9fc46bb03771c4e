"""Runs the cases of a client script; prints a line for each and fails if any did."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeGuard, TypeVar

Error = TypeVar("Error", bound=Exception)

CASES = tuple({name: "str", "return": "None"} for name in ("base_url", "url"))
"""Annotations of a case."""
PROMPT = "The mill stands by the river and"
MESSAGES = [{"role": "user", "content": "What does a mill do?"}]
QUESTION = [{"role": "user", "content": "Which way does the wind blow?"}]

WIND_SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "enum": ["river", "sea"]},
        "strong": {"type": "boolean"},
    },
    "required": ["place", "strong"],
    "additionalProperties": False,
}
GRIND_SCHEMA = {
    "type": "object",
    "properties": {"grain": {"type": "string", "enum": ["rye", "wheat"]}},
    "required": ["grain"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A tool as OpenAI's chat has it; `more` goes beside its name."""
    function = {"name": name, "description": f"Asks for {name}.", "parameters": parameters, **more}
    return {"type": "function", "function": function}


WIND = tool("wind", WIND_SCHEMA)
GRIND = tool("grind", GRIND_SCHEMA)
TOOLS = [WIND, GRIND]


def check_wind(arguments: dict[str, Any]) -> None:
    """That the arguments are what `WIND_SCHEMA` describes."""
    assert arguments.keys() == {"place", "strong"}, arguments
    assert arguments["place"] in {"river", "sea"}
    assert isinstance(arguments["strong"], bool)


def check_call(name: str, arguments: dict[str, Any]) -> None:
    """That a call is one of `TOOLS`, with arguments that fit it."""
    if name == "wind":
        check_wind(arguments)
    else:
        assert name == "grind", name
        assert arguments.keys() == {"grain"}, arguments
        assert arguments["grain"] in {"rye", "wheat"}


def check_calls(calls: Sequence[Any]) -> None:
    """That the SDK's calls, of `id` and `function`, are right and their ids unlike each other."""
    assert calls
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        # Mistral's templates want ids of nine letters and digits.
        assert re.fullmatch("call_[0-9a-f]{24}|[0-9A-Za-z]{9}", call.id), call.id
        assert call.type == "function"
        check_call(call.function.name, json.loads(call.function.arguments))


def raised(kind: type[Error], call: Callable[[], object]) -> Error:
    """The error of `kind` that the call ends in; AssertionError when it does not."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def is_case(value: object) -> TypeGuard[FunctionType]:
    """Whether it is a function that takes a base URL and returns nothing."""
    return isinstance(value, FunctionType) and value.__annotations__ in CASES


def run(script: Mapping[str, object]) -> None:
    """Call every case of a script, whose `globals()` these are, with the base URL that is the first argument.

    A second argument names the one case to run.
    """
    base_url, *named = sys.argv[1:]
    failed = 0
    for case in filter(is_case, list(script.values())):
        if named and case.__name__ not in named:
            continue
        try:
            case(base_url)
        except Exception:  # noqa: BLE001
            failed += 1
            sys.stdout.write(f"FAILED {case.__name__}\n{traceback.format_exc()}\n")
        else:
            sys.stdout.write(f"passed {case.__name__}\n")
    sys.exit(1 if failed else 0)
