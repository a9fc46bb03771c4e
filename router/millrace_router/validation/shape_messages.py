"""What is wrong with the shape of a body, in plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError as ShapeError

from millrace_router.errors import BodyShapeError

SENTENCES: Mapping[str, str] = {
    "missing": "is required",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dataclass_type": "must be an object",
    "none_required": "must be null",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "union_tag_invalid": "has the {discriminator} {tag!r}, and must have one of {expected_tags}",
    "union_tag_not_found": "needs the field {discriminator}",
    "extra_forbidden": "is not known",
    "value_error": "is not valid: {error}",
}
"""Sentences by the type of a pydantic error, with its context in gaps."""
ONE_OF_MANY = re.compile(r"\b1 (item|character)s\b")


def shape_error(error: ShapeError, body: object) -> BodyShapeError:
    """Describe where and how `body` differs from the model; the first difference only."""
    first = error.errors(include_url=False, include_input=False)[0]
    sentence = SENTENCES.get(first["type"])
    text = first["msg"] if sentence is None else sentence.format_map(first.get("ctx", {}))
    text = ONE_OF_MANY.sub(r"1 \1", text)
    *steps, last = first["loc"] or ("",)
    is_missing = first["type"] == "missing"
    places = [*_places(steps, body), last] if is_missing else _places(first["loc"], body)
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in places)
    return BodyShapeError(text, field=path.removeprefix("."))


def make_whole(error: ShapeError, body: object) -> bool:
    """Replace whole numbers with a fraction in `body` by the integers that the model needs; returns whether any was.

    Where one in a list is wrong, all of the list are replaced.
    """
    num_replaced = 0
    for one in error.errors(include_url=False):
        value = one["input"]
        if one["type"] != "int_type" or not (isinstance(value, float) and value.is_integer()):
            continue
        inner: Any = body
        places = _places(one["loc"], body)
        lists = []
        for step in places[:-1]:
            inner = inner[step]
            lists += [inner] if isinstance(inner, list) else []
        if places and inner[(last := places[-1])] is value:
            inner[last] = int(value)
            num_replaced += 1
            for outer in lists[:1]:
                outer[:] = map(_whole, outer)
    return num_replaced > 0


def _whole(value: object) -> object:
    """Return a whole number as an integer, a list with its numbers as integers, and another value as it is."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _places(steps: Sequence[int | str], here: object) -> list[int | str]:
    """Return the steps that lead into `here`: the others are names of alternatives.

    A name of an alternative may be a field's, too, such as `messages`: the reading with the most steps is right.
    """
    if not steps:
        return []
    step, rest = steps[0], steps[1:]
    readings = [_places(rest, here)]
    is_item = isinstance(step, int) and isinstance(here, list) and step < len(here)
    if is_item or (isinstance(here, dict) and step in here):
        inner: Any = here
        readings.append([step, *_places(rest, inner[step])])
    return max(readings, key=len)
