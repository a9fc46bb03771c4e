"""What is wrong with the shape of a body, in plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
    path = _path(first["loc"], body)
    if first["type"] == "missing":
        path = f"{path}.{first['loc'][-1]}"
    return BodyShapeError(text, field=path.removeprefix("."))


def _path(steps: tuple[int | str, ...], body: object) -> str:
    """Write down the path of a field as far as it is in `body`: other steps are names of alternatives."""
    path, here = "", body
    for step in steps:
        if isinstance(step, int):
            path += f"[{step}]"
            here = here[step] if isinstance(here, list) else None
        elif isinstance(here, dict) and step in here:
            path += f".{step}"
            here = here[step]
    return path
