"""Traces of requests: the context of each, and its spans once it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web
from multidict import CIMultiDictProxy

from millrace_router.engine.generation import Collected, Generation
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.server.traces.request_spans import Line, Period, moments, part, request_span
from millrace_router.telemetry.trace_context import (
    TRACEPARENT_HEADER,
    TRACESTATE_HEADER,
    TraceContext,
    new_context,
)


class SpanSink(Protocol):
    """Takes spans on their way to a collector."""

    def send(self, span: Mapping[str, Any], /) -> None:
        """Take a span; raises nothing."""

    async def close(self) -> None:
        """Take no more; returns when the collector has them, or after a few seconds."""


class RequestTraces:
    """Makes the spans of requests from their records; nothing of it runs while tokens are generated."""

    def __init__(self, sink: SpanSink, status: ShardStatus, *, model: str) -> None:
        """`model` is the name of the model to clients."""
        self.sink = sink
        self._status = status
        self._model = model

    def begin(self, headers: CIMultiDictProxy[str]) -> TraceContext:
        """Return the context of a new request."""
        return new_context(
            headers.getall(TRACEPARENT_HEADER, ()), headers.getall(TRACESTATE_HEADER, ())
        )

    def ended(
        self,
        request: web.Request,
        line: Line,
        generations: Sequence[Generation | Collected],
        context: TraceContext,
        period: Period,
    ) -> None:
        """Send the spans of a request that ended, with its line of the access log."""
        moment = moments()
        span = request_span(request, line, generations, context, self._model, period, moment)
        outages = self._status.outages_between(*period) if generations else ()
        span["parts"] += [
            part(
                "recovery",
                moment(one.began_at),
                moment(one.ended_at),
                **{"millrace.recovery.reason": one.reason},
            )
            for one in outages
        ]
        self.sink.send(span)
