"""The validation of a text against a JSON Schema, by a third-party validator with exact numbers."""

from __future__ import annotations

import json
import re
from datetime import date
from decimal import Decimal, localcontext

from jsonschema import Draft202012Validator, FormatChecker

EXPONENT_DIGITS = 6
PRECISION = 4000
"""The most digits of a number in any text here."""


def _is_date(value: object) -> bool:
    """A date by RFC 3339, with the year 0000, which Python lacks."""
    if not isinstance(value, str):
        return True
    try:
        date.fromisoformat(value.replace("0000-", "0400-", 1))
    except ValueError:
        return False
    return re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII) is not None


CHECKER = FormatChecker(formats=("email", "ipv4", "ipv6", "uuid"))
CHECKER.checks("date")(_is_date)
CHECKER.checks("date-time")(lambda value: not isinstance(value, str) or _is_date(value[:10]))


def _number(text: str) -> Decimal | float:
    """The exact value; infinite or 0 for an extreme exponent."""
    exponent = text.lower().partition("e")[2]
    return Decimal(text) if len(exponent) < EXPONENT_DIGITS else float(text)


def problem(text: str, schema: object) -> str | None:
    """The violation of `schema` by `text`, found by a third-party validator; None for a valid text.

    Numbers are compared as decimals.
    """
    try:
        instance = json.loads(text, parse_float=_number)
    except ValueError as error:
        return f"no JSON: {error}"
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = Draft202012Validator(exact, format_checker=CHECKER)
    with localcontext(prec=PRECISION):
        wrong = next(iter(validator.iter_errors(instance)), None)
    return None if wrong is None else f"{wrong.json_path}: {wrong.message}"
