"""TGI's response headers: what was computed, and where the time went."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millrace_router.engine.generation import Generation
from millrace_router.engine.request_record import Timings
from millrace_router.errors import RouterError
from millrace_router.server.recording import Form
from millrace_router.server.services import Services


def milliseconds(seconds: float) -> str:
    """Write whole milliseconds, cut off as TGI does."""
    return str(int(seconds * 1000))


def answer_headers(
    *,
    compute_type: str,
    num_characters: int,
    prompt_tokens: int,
    generated_tokens: int,
    cached_tokens: int,
    times: Timings,
) -> dict[str, str]:
    """Headers of an answer in one piece; `num_characters` and `cached_tokens` count the prompt's."""
    return {
        "x-compute-type": compute_type,
        "x-compute-time": repr(times.total),
        "x-compute-characters": str(num_characters),
        "x-total-time": milliseconds(times.total),
        "x-validation-time": milliseconds(times.validation),
        "x-queue-time": milliseconds(times.queue),
        "x-inference-time": milliseconds(times.inference),
        "x-time-per-token": milliseconds(times.per_token),
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(generated_tokens),
        "x-cached-tokens": str(cached_tokens),
        **_predicted(times),
    }


def stream_headers(*, compute_type: str, num_characters: int, times: Timings) -> dict[str, str]:
    """Headers of a stream, sent before anything is known of its end."""
    return {
        "x-compute-type": compute_type,
        "x-compute-characters": str(num_characters),
        **_predicted(times),
    }


def _predicted(times: Timings) -> dict[str, str]:
    """Beside TGI's `x-queue-time`: what was expected of it when the request came, if anything was."""
    predicted = times.predicted_queue
    return {} if predicted is None else {"x-predicted-queue-time": milliseconds(predicted)}


def sum_of_times(times: Sequence[Timings]) -> Timings:
    """Add up the durations of several generations of one request; the first token is that of the fastest."""
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


def form_of(
    services: Services,
    generations: Sequence[Generation],
    *,
    num_characters: int,
    on_error: Callable[[RouterError], bytes],
) -> Form:
    """Headers tell of prompts of `num_characters` together; `on_error` frames a failure after the first event."""
    return Form(
        headers=stream_headers(
            compute_type=services.compute_type,
            num_characters=num_characters,
            times=sum_of_times([generation.times for generation in generations]),
        ),
        keep_alive_seconds=services.keep_alive_seconds,
        may_expire=lambda: any(generation.may_expire for generation in generations),
        on_error=on_error,
    )
