"""The form of a stream of generations, whatever is said in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millrace_router.errors import RouterError
from millrace_router.generation import Generation
from millrace_router.headers import stream_headers, sum_of_times
from millrace_router.recording import Form
from millrace_router.services import Services


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
