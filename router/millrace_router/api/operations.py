"""The table of routes, as the OpenAPI document tells of them: what each takes, and what it may answer."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from millrace_router.api.chat import ChatCompletionRequest
from millrace_router.api.completion import CompletionRequest
from millrace_router.api.completion_json import ChunkJson, CompletionFinalJson
from millrace_router.api.estimate import EstimateJson
from millrace_router.api.info import InfoJson, QuarantineJson
from millrace_router.api.native import (
    CompatGenerateRequest,
    GenerateRequest,
    GenerateResponse,
    StreamResponse,
)
from millrace_router.api.openai_json import (
    ChatCompletionChunkJson,
    ChatCompletionJson,
    ChatTokenizeResponseJson,
    ModelInfoJson,
)
from millrace_router.idempotency import KEY_HEADER, LAST_EVENT_HEADER
from millrace_router.terms import MAX_QUEUE_HEADER, PRIORITY_HEADER, TENANT_HEADER
from millrace_router.tokenizer import TokenSpan

READING = (
    HTTPStatus.BAD_REQUEST,
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

TERMS = (PRIORITY_HEADER, TENANT_HEADER, MAX_QUEUE_HEADER)
"""On which terms a request is to be served."""
KEYED = (*TERMS, KEY_HEADER, LAST_EVENT_HEADER)
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
    event: Any = None
    """The JSON of one event of a stream."""
    failures: tuple[HTTPStatus, ...] = ()
    is_open: bool = False
    """Nobody is asked for a key."""
    openai: bool = False
    """Failures come in OpenAI's envelope."""
    headers: tuple[str, ...] = ()
    """Headers of the request that are read."""


OPERATIONS = (
    Operation(
        method="post",
        path="/",
        id="compat_generate",
        summary="Generate tokens if `stream == false`, or a stream of tokens if `stream == true`",
        body=CompatGenerateRequest,
        answer=list[GenerateResponse],
        event=StreamResponse,
        failures=GENERATING,
        headers=KEYED,
    ),
    Operation(
        method="post",
        path="/generate",
        id="generate",
        summary="Generate tokens",
        body=GenerateRequest,
        answer=GenerateResponse,
        failures=GENERATING,
        headers=KEYED,
    ),
    Operation(
        method="post",
        path="/generate_stream",
        id="generate_stream",
        summary="Generate a stream of tokens as server-sent events",
        body=GenerateRequest,
        event=StreamResponse,
        failures=GENERATING,
        headers=KEYED,
    ),
    Operation(
        method="post",
        path="/tokenize",
        id="tokenize",
        summary="Tokenize `inputs`; places count bytes of UTF-8",
        body=GenerateRequest,
        answer=list[TokenSpan],
        failures=ADMITTING,
    ),
    Operation(
        method="post",
        path="/chat_tokenize",
        id="get_chat_tokenize",
        summary="Turn a chat into a prompt, and tokenize it",
        body=ChatCompletionRequest,
        answer=ChatTokenizeResponseJson,
        failures=ADMITTING,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions",
        id="chat_completions",
        summary="Answer a chat",
        body=ChatCompletionRequest,
        answer=ChatCompletionJson,
        event=ChatCompletionChunkJson,
        failures=GENERATING,
        openai=True,
        headers=KEYED,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        id="completions",
        summary="Complete one text or a few",
        body=CompletionRequest,
        answer=CompletionFinalJson,
        event=ChunkJson | CompletionFinalJson,
        failures=GENERATING,
        openai=True,
        headers=KEYED,
    ),
    Operation(
        method="post",
        path="/v1/estimate",
        id="estimate",
        summary="What would become of a request, without running it",
        body=GenerateRequest | ChatCompletionRequest | CompletionRequest,
        answer=EstimateJson,
        failures=(*READING, HTTPStatus.SERVICE_UNAVAILABLE),
        headers=TERMS,
    ),
    Operation(
        method="get",
        is_open=True,
        path="/v1/models",
        id="openai_get_model_info",
        summary="The model that is served",
        answer=ModelInfoJson,
    ),
    Operation(
        method="get",
        is_open=True,
        path="/info",
        id="get_model_info",
        summary="The model and every limit",
        answer=InfoJson,
    ),
    *(
        Operation(
            method="get",
            is_open=True,
            path=path,
            id=id_,
            summary="Whether the server can do its work",
            failures=(HTTPStatus.SERVICE_UNAVAILABLE,),
        )
        for path, id_ in (
            ("/", "root"),
            ("/health", "health"),
            ("/ping", "ping"),
            ("/readyz", "ready"),
        )
    ),
    Operation(
        method="get",
        is_open=True,
        path="/livez",
        id="live",
        summary="Whether the router runs, whatever its shards do",
    ),
    Operation(
        method="get",
        path="/v1/quarantine",
        id="quarantine",
        summary="The requests that broke the shards, without their text",
        answer=QuarantineJson,
    ),
    Operation(
        method="get",
        is_open=True,
        path="/metrics",
        id="metrics",
        summary="Metrics in Prometheus' text format",
        answer=bytes,
    ),
    *(
        Operation(
            method="get",
            path=path,
            is_open=True,
            id=id_,
            summary="This document",
            answer=dict[str, Any],
        )
        for path, id_ in (("/api-doc/openapi.json", "openapi"), ("/openapi.json", "openapi_alias"))
    ),
)
