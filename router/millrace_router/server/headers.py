"""Headers of answers: TGI's counts and durations, and the names of what the server left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog
from aiohttp import web

from millrace_router.engine.generation import Collected, Generation, Timings, Usage
from millrace_router.errors import RouterError
from millrace_router.request.continuation import Answer
from millrace_router.request.names import STREAM_HEADER, Names, new_stream
from millrace_router.server.idempotency import caller_digest
from millrace_router.server.recording import SseOptions
from millrace_router.server.services import Services

IGNORED_HEADER = "x-millrace-ignored"
MAX_TOKENS_HEADER = "x-millrace-max-tokens"
"""The limit of an answer that is lower than the client's."""
MAX_NAMES = 20
"""Names in one header; the number of further ones follows them."""
MAX_NAME_CHARS = 64
IDENTIFIERS = re.compile(r"[A-Za-z_]\w{0,39}(\.[A-Za-z_]\w{0,39})*", re.ASCII)
NO_IDENTIFIER = "a name that is not an identifier"
MAX_LOGGED = 1000
"""Names that are logged, each once: clients make up names."""

NAMES: web.RequestKey[Names] = web.RequestKey("names", Names)
ANSWER: web.RequestKey[Answer] = web.RequestKey("answer", Answer)
"""The answer to a request whose tokens are recorded."""
EXPANDED: web.RequestKey[bytes] = web.RequestKey("expanded", bytes)
"""The `input` of a body as JSON, with what it refers to, which the store does not have any longer."""
_IGNORED: web.RequestKey[dict[str, None]] = web.RequestKey("ignored", dict)
_MAX_TOKENS: web.RequestKey[int] = web.RequestKey("max_tokens", int)
_LOGGED: web.AppKey[set[str]] = web.AppKey("logged_ignored", set)

log = structlog.get_logger(__name__)


def prepare_app(app: web.Application) -> None:
    """Send the headers that are noted with the answers of `app`."""
    app[_LOGGED] = set()
    app.on_response_prepare.append(_add_header)


def note_ignored(request: web.Request, names: Iterable[str]) -> None:
    """Name parts of a request that have no effect, such as `messages.foo`, in its answer, and once each in the log.

    The log has only identifiers: anything else may be a client's text.
    """
    noted = request.setdefault(_IGNORED, {})
    logged = request.app[_LOGGED]
    for name in map(_printable, names):
        noted[name] = None
        shown = name if IDENTIFIERS.fullmatch(name) else NO_IDENTIFIER
        if shown not in logged and len(logged) < MAX_LOGGED:
            logged.add(shown)
            log.warning("request field ignored", field=shown, path=request.path)


def note_max_tokens(request: web.Request, num_tokens: int) -> None:
    """Have the answer say that it ends after `num_tokens`, fewer than the client's limit."""
    request[_MAX_TOKENS] = num_tokens


def noted_headers(request: web.Request) -> dict[str, str]:
    """Return the headers about what a request became: its stream's name, and what of it has no effect."""
    stream = {STREAM_HEADER: request[NAMES].stream} if NAMES in request else {}
    names = list(request.get(_IGNORED, ()))
    if not names:
        return stream
    more = len(names) - MAX_NAMES
    shown = names[:MAX_NAMES] + ([f"+{more}"] if more > 0 else [])
    return {**stream, IGNORED_HEADER: ", ".join(shown)}


async def _add_header(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(noted_headers(request))
    if _MAX_TOKENS in request:
        response.headers[MAX_TOKENS_HEADER] = str(request[_MAX_TOKENS])


def _printable(name: str) -> str:
    """Return a name that may stand in a header: clients choose it."""
    kept = name[:MAX_NAME_CHARS]
    return "".join(
        char if char.isascii() and char.isprintable() and char != "," else "?" for char in kept
    )


def names_of(request: web.Request) -> Names:
    """Return the names of the answer to a request, whose stream its client may have named. Raises ValidationError."""
    names = request.get(NAMES)
    if names is None:
        stream = request.headers.get(STREAM_HEADER)
        name = new_stream() if stream is None else stream
        names = request[NAMES] = Names.of_caller(name, caller_digest(request.headers))
    return names


def milliseconds(seconds: float) -> str:
    """Write whole milliseconds, rounded down as in TGI."""
    return str(int(seconds * 1000))


def answer_headers(
    services: Services, generations: Sequence[Generation | Collected], usage: Usage
) -> dict[str, str]:
    """Headers of an answer in one piece; the times are summed over all generations."""
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
    """Count the characters of all prompts, once for each prompt; prompts of token ids count 0."""
    return str(sum(len(one.inputs) for one in generations if not one.sample))


def _predicted(times: Timings) -> dict[str, str]:
    """Return the header with the queue time that was predicted when the request came; empty without a prediction."""
    predicted = times.predicted_queue
    return {} if predicted is None else {"x-predicted-queue-time": milliseconds(predicted)}


def sum_of_times(generations: Sequence[Generation | Collected]) -> Timings:
    """Add up the durations of several generations of one request; the first token is the fastest one's."""
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
