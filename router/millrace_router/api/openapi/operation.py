"""The description of one route."""

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
"""Statuses of a refused body."""
ADMITTING = (*READING, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses of failures on routes that take a permit."""
GENERATING = (
    *ADMITTING,
    HTTPStatus.GONE,
    HTTPStatus.FAILED_DEPENDENCY,
    HTTPStatus.INTERNAL_SERVER_ERROR,
)
"""Statuses of a failed generation."""
PREDICTING = (*ADMITTING, HTTPStatus.FAILED_DEPENDENCY, HTTPStatus.INTERNAL_SERVER_ERROR)
"""Statuses of a failed generation without an idempotency key, which cannot be resumed."""
MESSAGING = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
"""`ADMITTING` in the statuses of Anthropic's API."""

SCHEDULING = (PRIORITY_HEADER, TENANT_HEADER, MAX_QUEUE_HEADER)
"""Headers of the scheduling parameters."""
IDEMPOTENT = (*SCHEDULING, KEY_HEADER, LAST_EVENT_HEADER)
"""Headers of the scheduling parameters and of idempotency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path; bodies and answers are types for which pydantic makes a JSON schema."""

    method: str
    path: str
    id: str
    """TGI's name, if it has the route."""
    summary: str
    body: Any = None
    answer: Any = None
    """None for an empty answer, bytes for text."""
    text_type: str = PLAIN
    """Media type of text."""
    event: Any = None
    """The JSON of one event of a stream."""
    failures: tuple[HTTPStatus, ...] = ()
    is_open: bool = False
    """Needs no API key."""
    openai: bool = False
    """Failures have OpenAI's envelope."""
    either: bool = False
    """Failures have TGI's envelope or OpenAI's, depending on the body."""
    anthropic: bool = False
    """Failures have Anthropic's envelope."""
    headers: tuple[str, ...] = ()
    """Request headers that the route reads."""
