"""TGI's response headers: counts and durations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from millrace_router.engine.generation import Collected, Generation, Timings, Usage
from millrace_router.errors import RouterError
from millrace_router.server.recording import SseOptions
from millrace_router.server.services import Services


def milliseconds(seconds: float) -> str:
    """Write whole milliseconds, rounded down as in TGI."""
    return str(int(seconds * 1000))


def answer_headers(
    services: Services, generations: Sequence[Generation | Collected], usage: Usage
) -> dict[str, str]:
    """Headers of an answer in one piece; the times are those of all generations together."""
    times = sum_of_times(generations)
    return {
        "x-compute-type": services.compute_type,
        "x-compute-time": repr(times.total),
        "x-compute-characters": _num_characters(generations),
        "x-total-time": milliseconds(times.total),
        "x-validation-time": milliseconds(times.validation),
        "x-queue-time": milliseconds(times.queue),
        "x-inference-time": milliseconds(times.inference),
        "x-time-per-token": milliseconds(times.per_token),
        "x-prompt-tokens": str(usage.prompt_tokens),
        "x-generated-tokens": str(usage.completion_tokens),
        "x-cached-tokens": str(usage.cached_tokens),
        **_predicted(times),
    }


def _num_characters(generations: Sequence[Generation | Collected]) -> str:
    """Count the characters of all prompts, each with its first sample alone; prompts of token ids have none."""
    return str(sum(len(one.inputs) for one in generations if not one.sample))


def _predicted(times: Timings) -> dict[str, str]:
    """Header beside TGI's `x-queue-time`: its prediction from when the request came, if there was one."""
    predicted = times.predicted_queue
    return {} if predicted is None else {"x-predicted-queue-time": milliseconds(predicted)}


def sum_of_times(generations: Sequence[Generation | Collected]) -> Timings:
    """Add up the durations of several generations of one request; the first token is that of the fastest."""
    times = [generation.times for generation in generations]
    predicted = [one.predicted_queue for one in times if one.predicted_queue is not None]
    return Timings(
        total=sum(one.total for one in times),
        validation=sum(one.validation for one in times),
        queue=sum(one.queue for one in times),
        inference=sum(one.inference for one in times),
        per_token=sum(one.per_token for one in times),
        predicted_queue=sum(predicted) if len(predicted) == len(times) else None,
        first_token=min(
            (one.first_token for one in times if one.first_token is not None), default=None
        ),
    )


def sse_options(
    services: Services,
    generations: Sequence[Generation],
    on_error: Callable[[RouterError], bytes],
    headers: Mapping[str, str] | None = None,
) -> SseOptions:
    """Make the options of a stream; `on_error` frames a failure after the first event, `headers` are further ones."""
    return SseOptions(
        headers={
            "x-compute-type": services.compute_type,
            "x-compute-characters": _num_characters(generations),
            **_predicted(sum_of_times(generations)),
            **(headers or {}),
        },
        keep_alive_seconds=services.keep_alive_seconds,
        may_expire=lambda: any(generation.may_expire for generation in generations),
        on_error=on_error,
    )
