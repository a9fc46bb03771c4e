"""The table of the routes of responses."""

from __future__ import annotations

from http import HTTPStatus

from millrace_router.api.openapi.operation import ADMITTING, GENERATING, IDEMPOTENT, Operation
from millrace_router.api.responses.protocol import (
    DeletedResponseJson,
    InputItemsJson,
    InputTokensJson,
    ResponseEventJson,
    ResponseJson,
)
from millrace_router.api.responses.request import ResponsesRequest

STORED = (HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)
RESPONSE_OPERATIONS = (
    Operation(
        method="post",
        path="/v1/responses",
        id="responses",
        summary="Answer a conversation, or a text",
        body=ResponsesRequest,
        answer=ResponseJson,
        event=ResponseEventJson,
        failures=GENERATING,
        openai=True,
        headers=IDEMPOTENT,
    ),
    Operation(
        method="post",
        path="/v1/responses/input_tokens",
        id="responses_input_tokens",
        summary="Count the tokens of a conversation, or a text",
        body=ResponsesRequest,
        answer=InputTokensJson,
        failures=ADMITTING,
        openai=True,
    ),
    Operation(
        method="get",
        path="/v1/responses/{id}",
        id="get_response",
        summary="A stored response",
        answer=ResponseJson,
        failures=STORED,
        openai=True,
    ),
    Operation(
        method="delete",
        path="/v1/responses/{id}",
        id="delete_response",
        summary="Forget a stored response",
        answer=DeletedResponseJson,
        failures=STORED,
        openai=True,
    ),
    Operation(
        method="get",
        path="/v1/responses/{id}/input_items",
        id="get_response_input_items",
        summary="The items that a stored response is an answer to",
        answer=InputItemsJson,
        failures=STORED,
        openai=True,
    ),
)
