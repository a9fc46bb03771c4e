"""What the OpenAPI document tells of one route."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from millrace_router.request.scheduling import MAX_QUEUE_HEADER, PRIORITY_HEADER, TENANT_HEADER
from millrace_router.server.idempotency import KEY_HEADER, LAST_EVENT_HEADER

PLAIN = "text/plain"
READING = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
"""How a body can be refused."""
ADMITTING = (*READING, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""How anything that takes a permit can fail."""
GENERATING = (
    *ADMITTING,
    HTTPStatus.GONE,
    HTTPStatus.FAILED_DEPENDENCY,
    HTTPStatus.INTERNAL_SERVER_ERROR,
)
"""How a generation can fail."""
PREDICTING = (*ADMITTING, HTTPStatus.FAILED_DEPENDENCY, HTTPStatus.INTERNAL_SERVER_ERROR)
"""How a generation can fail that has no key, and so cannot be gone on with."""
MESSAGING = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
"""`ADMITTING` with the statuses that Anthropic has."""

SCHEDULING = (PRIORITY_HEADER, TENANT_HEADER, MAX_QUEUE_HEADER)
"""Headers of the scheduling parameters."""
KEYED = (*SCHEDULING, KEY_HEADER, LAST_EVENT_HEADER)
"""What a request that may be sent again can say, besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path; bodies and answers are types that pydantic knows a JSON schema of."""

    method: str
    path: str
    id: str
    """TGI's name, where it has the route."""
    summary: str
    body: Any = None
    answer: Any = None
    """None for an empty one, bytes for text."""
    text_type: str = PLAIN
    """Media type of text."""
    event: Any = None
    """The JSON of one event of a stream."""
    failures: tuple[HTTPStatus, ...] = ()
    is_open: bool = False
    """Nobody is asked for a key."""
    openai: bool = False
    """Failures come in OpenAI's envelope."""
    either: bool = False
    """Failures come in TGI's envelope or in OpenAI's, as the body is of the one or the other."""
    anthropic: bool = False
    """Failures come in Anthropic's envelope."""
    headers: tuple[str, ...] = ()
    """Headers of the request that are read."""
