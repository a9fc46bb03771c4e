"""The description of one route in the OpenAPI document, and the sets of statuses and headers that routes share."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from millrace_router.request.adapter import ADAPTER_TOKEN_HEADER
from millrace_router.request.names import STREAM_HEADER
from millrace_router.request.scheduling import (
    FAIRNESS_HEADER,
    MAX_QUEUE_HEADER,
    PRIORITY_HEADER,
    TENANT_HEADER,
)
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
NAMING = (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)
"""Statuses of a request for an adapter that the client may not use, or that does not exist."""
GENERATING = (
    *ADMITTING,
    *NAMING,
    HTTPStatus.GONE,
    HTTPStatus.FAILED_DEPENDENCY,
    HTTPStatus.INTERNAL_SERVER_ERROR,
)
"""Statuses of a failed generation."""
PREDICTING = (*ADMITTING, *NAMING, HTTPStatus.FAILED_DEPENDENCY, HTTPStatus.INTERNAL_SERVER_ERROR)
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

SCHEDULING = (PRIORITY_HEADER, TENANT_HEADER, FAIRNESS_HEADER, MAX_QUEUE_HEADER)
"""Headers of the scheduling parameters."""
NAMED = (*SCHEDULING, STREAM_HEADER)
"""Headers of routes whose answers have ids, or may be sampled."""
IDEMPOTENT = (*NAMED, ADAPTER_TOKEN_HEADER, KEY_HEADER, LAST_EVENT_HEADER)
"""Headers of generating routes: of the scheduling parameters, of names, of adapters and of idempotency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path; bodies and answers are types for which pydantic makes a JSON schema."""

    method: str
    path: str
    id: str
    """`operationId`: TGI's name if it has the route."""
    summary: str
    body: Any = None
    answer: Any = None
    """Type of the answer; None for an empty answer, bytes for text."""
    text_type: str = PLAIN
    """Media type of text."""
    event: Any = None
    """The JSON of one event of a stream."""
    has_end: bool = False
    """Whether the last event of its streams is `[DONE]`."""
    failures: tuple[HTTPStatus, ...] = ()
    foreign: tuple[HTTPStatus, ...] = ()
    """Failures of TGI that this server does not have, for clients that are made from the document."""
    is_open: bool = False
    """Whether the route works without an API key."""
    is_admin: bool = False
    """Whether the route needs the admin key in place of the API key; it does not exist without one."""
    openai: bool = False
    """Whether failures have OpenAI's envelope."""
    either: bool = False
    """Whether failures have TGI's envelope or OpenAI's, depending on the body."""
    failure: Any = None
    """The JSON of a failure that may have this form, too."""
    anthropic: bool = False
    """Whether failures have Anthropic's envelope."""
    headers: tuple[str, ...] = ()
    """Request headers that the route reads."""

    @property
    def fetches(self) -> bool:
        """Whether the route may fetch an adapter."""
        return self.is_admin or HTTPStatus.FORBIDDEN in self.failures
