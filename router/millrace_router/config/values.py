"""Values that several groups of flags have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

LogLevel = Literal["trace", "debug", "info", "warning", "error"]
SWITCH_WORDS = {"1": "on", "true": "on", "yes": "on", "0": "off", "false": "off", "no": "off"}
"""Words for on and off in TGI's environment variables."""


def _switch(value: object) -> object:
    word = str(value).strip().lower()
    return SWITCH_WORDS.get(word, word)


OnOff = Annotated[Literal["on", "off"], BeforeValidator(_switch)]


def split_commas(value: object) -> object:
    """Break each comma-separated string; other values are left to pydantic."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple(part for item in value for part in str(item).split(",") if part)
    return value
