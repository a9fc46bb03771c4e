"""Spans of requests, from the records of their moments; no text, no token and no key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

from aiohttp import web
from multidict import CIMultiDictProxy

from millrace_router.engine.generation import Collected, Generation, Timings
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.request.request import ValidRequest
from millrace_router.telemetry.trace_context import (
    TRACEPARENT_HEADER,
    TRACESTATE_HEADER,
    TraceContext,
    new_context,
)

CHAT_PATHS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
PROVIDER = "millrace"
LARGEST_INTEGER = 2**63 - 1
"""Of an attribute."""
TGI_NAMES = ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token")
"""TGI's attributes, in seconds; the access log has them under the same names."""
COPIED = (
    ("key_name", "enduser.id"),
    ("adapter", "millrace.adapter"),
    ("prompt_tokens", "gen_ai.usage.input_tokens"),
    ("generated_tokens", "gen_ai.usage.output_tokens"),
    ("cached_tokens", "gen_ai.usage.cache_read.input_tokens"),
    ("total_time", "gen_ai.latency.e2e"),
    ("queue_time", "gen_ai.latency.time_in_queue"),
    ("time_to_first_token", "gen_ai.latency.time_to_first_token"),
    *((name, name) for name in TGI_NAMES),
)
"""Fields of the access log, and attributes: of the GenAI conventions, vLLM's latencies and TGI's."""

Span = dict[str, Any]
Line = dict[str, str | float | int | bool]
Generations = Sequence[Generation | Collected]
Period = tuple[float, float]
"""Begin and end by `time.monotonic`."""
Moment = Callable[[float], int]
"""Turns a time of `time.monotonic` into nanoseconds since 1970."""


def request_span(
    request: web.Request,
    line: Line,
    generations: Generations,
    context: TraceContext,
    model: str,
    period: Period,
    moment: Moment,
) -> Span:
    """Make the span of a request that has ended, with its `line` of the access log, and those below it.

    `model` is the name of the model to clients; `period` is when the request ran.
    """
    resource = request.match_info.route.resource
    route = None if resource is None else resource.canonical
    status = int(line["status"])
    # TGI answers failures of the shards with 424.
    failed = status >= 500 or status == HTTPStatus.FAILED_DEPENDENCY
    failed = failed or ("error_type" in line and status == HTTPStatus.OK)
    attributes: dict[str, Any] = {
        "http.request.method": request.method,
        "http.response.status_code": status,
        "url.scheme": request.scheme,
        **{name: line[field] for field, name in COPIED if field in line},
    }
    if route is not None:
        attributes["http.route"] = route
    if "error_type" in line or status >= 400:
        attributes["error.type"] = line.get("error_type", str(status))
    if generations:
        attributes |= _of_generations(request.path, generations, model)
    return {
        **_place(context),
        "name": request.method if route is None else f"{request.method} {route}",
        "start": moment(period[0]),
        "end": moment(period[1]),
        "failed": failed,
        "attributes": attributes,
        "parts": list(_phases(generations, moment)),
    }


def part(name: str, start: int, end: int, **attributes: str | int) -> Span:
    """Make a child of a request's span."""
    return {"name": name, "start": start, "end": max(start, end), "attributes": attributes}


def moments() -> Moment:
    """Make the conversion; all moments of a request need the same."""
    wall, now = time.time_ns(), time.monotonic()
    return lambda at: wall - int((now - at) * 1e9)


def _place(context: TraceContext) -> Span:
    parent = {} if context.parent is None else {"traceparent": context.parent}
    if context.state is not None:
        parent["tracestate"] = context.state
    return {"trace_id": context.trace_id, "span_id": context.span_id, "parent": parent}


def _of_generations(path: str, generations: Generations, model: str) -> dict[str, Any]:
    valid = generations[0].valid
    name = model if valid.adapter is None else valid.adapter.name
    attributes = {
        "gen_ai.operation.name": "chat" if path in CHAT_PATHS else "text_completion",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": name,
        "gen_ai.response.model": name,
        "gen_ai.request.max_tokens": valid.max_new_tokens,
        **_sampling(valid),
    }
    if len(generations) > 1:
        attributes["gen_ai.request.choice.count"] = len(generations)
    if reasons := [str(one.finish_reason) for one in generations if one.finish_reason]:
        attributes["gen_ai.response.finish_reasons"] = reasons
    return attributes


def _sampling(valid: ValidRequest) -> dict[str, Any]:
    """The parameters that are in use."""
    sampling = valid.sampling
    attributes: dict[str, Any] = {"gen_ai.request.temperature": sampling.temperature}
    if not sampling.samples:
        return {"gen_ai.request.temperature": 0.0}
    attributes["seed"] = str(sampling.seed)
    if sampling.seed <= LARGEST_INTEGER:
        attributes["gen_ai.request.seed"] = sampling.seed
    if sampling.top_p < 1.0:
        attributes["gen_ai.request.top_p"] = sampling.top_p
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    return attributes


def _phases(generations: Generations, moment: Moment) -> Iterator[Span]:
    """Queue, prefill and decode of each choice, as far as it came."""
    for index, one in enumerate(generations):
        choice = {"millrace.choice": index} if len(generations) > 1 else {}
        yield from _phases_of(one, one.times, moment, choice)


def _phases_of(
    one: Generation | Collected, times: Timings, moment: Moment, choice: dict[str, int]
) -> Iterator[Span]:
    queued = times.arrived_at + times.validation
    batched, end = queued + times.queue, times.arrived_at + times.total
    yield part("queue", moment(queued), moment(batched), **choice)
    if not times.inference:
        return
    first = end if times.first_token is None else times.arrived_at + times.first_token
    prompt = {"gen_ai.usage.input_tokens": len(one.valid.input_ids)}
    cached = {"gen_ai.usage.cache_read.input_tokens": one.cached_tokens}
    yield part("prefill", moment(batched), moment(first), **choice, **prompt, **cached)
    if times.first_token is not None:
        answer = {"gen_ai.usage.output_tokens": one.generated_tokens}
        yield part("decode", moment(first), moment(end), **choice, **answer)


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
