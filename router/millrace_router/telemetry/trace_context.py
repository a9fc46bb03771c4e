"""The W3C trace context of a request, and its way to the shards."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"
MAX_STATE_LENGTH = 512
PARENT_LENGTH = 55
"""Characters of the four fields that every version has."""
_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_NO_TRACE = "0" * 32
_NO_PARENT = "0" * 16
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The place of a request's span in its trace; ids are hexadecimal."""

    trace_id: str
    span_id: str
    sampled: bool
    parent: str | None = None
    """The client's `traceparent`, without fields of later versions."""
    state: str | None = None
    """The client's `tracestate`."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Headers that make the request's span the parent."""
        flags = f"{_SAMPLED if self.sampled else 0:02x}"
        traceparent = (TRACEPARENT_HEADER, f"00-{self.trace_id}-{self.span_id}-{flags}")
        return (traceparent, (TRACESTATE_HEADER, self.state)) if self.state else (traceparent,)


CURRENT: ContextVar[TraceContext | None] = ContextVar("trace_context", default=None)
"""The context of the request that this task works for; None without tracing."""


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return the gRPC metadata of a call that is made for the current request."""
    context = CURRENT.get()
    return () if context is None else context.metadata


def new_context(parents: Sequence[str], states: Sequence[str]) -> TraceContext:
    """Make the context of a request with these values of the two headers; without a valid one its trace begins here."""
    span_id = secrets.token_hex(8)
    match = _match(parents)
    if match is None:
        return TraceContext(secrets.token_hex(16), span_id, sampled=True)
    state = ",".join(states)
    is_valid = 0 < len(state) <= MAX_STATE_LENGTH and state.isascii() and state.isprintable()
    return TraceContext(
        match["trace"],
        span_id,
        sampled=bool(int(match["flags"], 16) & _SAMPLED),
        # What a later version has behind these fields may be any bytes.
        parent=parents[0][:PARENT_LENGTH],
        state=state if is_valid else None,
    )


def trace_id_of(values: Sequence[str]) -> str | None:
    """Return the trace id in the values of the header; None unless there is exactly one value, and it is valid.

    A version above 00 may have more fields at its end, which are ignored.
    """
    match = _match(values)
    return None if match is None else match["trace"]


def _match(values: Sequence[str]) -> re.Match[str] | None:
    if len(values) != 1:
        return None
    match = _TRACEPARENT.fullmatch(values[0])
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["more"]):
        return None
    if match["trace"] == _NO_TRACE or match["parent"] == _NO_PARENT:
        return None
    return match
