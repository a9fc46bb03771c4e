"""The W3C's trace context, level 1: which trace a request belongs to, as its client says."""

from __future__ import annotations

import re
from collections.abc import Sequence

TRACEPARENT_HEADER = "traceparent"
_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-[0-9a-f]{2}(?P<more>-.*)?"
)
_NO_TRACE = "0" * 32
_NO_PARENT = "0" * 16


def trace_id_of(given: Sequence[str]) -> str | None:
    """The trace that the values of the header name; None unless there is one value, and valid.

    A version above 00 may say more at its end, which is not looked at.
    """
    if len(given) != 1:
        return None
    match = _TRACEPARENT.fullmatch(given[0])
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["more"]):
        return None
    if match["trace"] == _NO_TRACE or match["parent"] == _NO_PARENT:
        return None
    return match["trace"]
