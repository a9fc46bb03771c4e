"""The table of routes in the OpenAPI document: the requests and the possible answers of each."""

from __future__ import annotations

from http import HTTPStatus

from typing_extensions import TypeAliasType

from millrace_router.api.anthropic.protocol import (
    CountTokensJson,
    MessageEventJson,
    MessagesAnswerJson,
)
from millrace_router.api.anthropic.request import CountTokensRequest, MessagesRequest
from millrace_router.api.openai.protocol import (
    ChatCompletionChunkJson,
    ChatCompletionJson,
    ChunkJson,
    CompletionFinalJson,
    ModelInfoJson,
    ModelJson,
)
from millrace_router.api.openai.request import ChatCompletionRequest, CompletionRequest
from millrace_router.api.openapi.adapter_operations import ADAPTER_OPERATIONS
from millrace_router.api.openapi.operation import (
    GENERATING,
    IDEMPOTENT,
    MESSAGING,
    NAMING,
    READING,
    SCHEDULING,
    Operation,
)
from millrace_router.api.openapi.platform_operations import PLATFORM_OPERATIONS
from millrace_router.api.openapi.pooling_operations import POOLING_OPERATIONS
from millrace_router.api.openapi.response_operations import RESPONSE_OPERATIONS
from millrace_router.api.openapi.server_operations import SERVER_OPERATIONS
from millrace_router.api.openapi.tokenizer_operations import TOKENIZER_OPERATIONS
from millrace_router.api.tgi.answers import GenerateResponse, StreamResponse
from millrace_router.api.tgi.estimate import EstimateJson
from millrace_router.api.tgi.request import CompatGenerateRequest, GenerateRequest
from millrace_router.request.adapter import ADAPTER_TOKEN_HEADER

Completion = TypeAliasType("Completion", ChunkJson | CompletionFinalJson)
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
        headers=IDEMPOTENT,
    ),
    Operation(
        method="post",
        path="/generate",
        id="generate",
        summary="Generate tokens",
        body=GenerateRequest,
        answer=GenerateResponse,
        failures=GENERATING,
        headers=IDEMPOTENT,
    ),
    Operation(
        method="post",
        path="/generate_stream",
        id="generate_stream",
        summary="Generate a stream of tokens as server-sent events",
        body=GenerateRequest,
        event=StreamResponse,
        failures=GENERATING,
        headers=IDEMPOTENT,
    ),
    *TOKENIZER_OPERATIONS,
    Operation(
        method="post",
        path="/v1/chat/completions",
        id="chat_completions",
        summary="Answer a chat",
        body=ChatCompletionRequest,
        answer=ChatCompletionJson,
        event=ChatCompletionChunkJson,
        has_end=True,
        failures=GENERATING,
        openai=True,
        headers=IDEMPOTENT,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        id="completions",
        summary="Complete one text or a few",
        body=CompletionRequest,
        answer=CompletionFinalJson,
        event=Completion,
        has_end=True,
        failures=GENERATING,
        openai=True,
        headers=IDEMPOTENT,
    ),
    *RESPONSE_OPERATIONS,
    Operation(
        method="post",
        path="/v1/messages",
        id="messages",
        summary="Answer a chat, as Anthropic's API does",
        body=MessagesRequest,
        answer=MessagesAnswerJson,
        event=MessageEventJson,
        failures=(*MESSAGING, *NAMING, HTTPStatus.GONE, HTTPStatus.INTERNAL_SERVER_ERROR),
        anthropic=True,
        headers=IDEMPOTENT,
    ),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        id="messages_count_tokens",
        summary="Count the tokens of a chat, as Anthropic's API does",
        body=CountTokensRequest,
        answer=CountTokensJson,
        failures=MESSAGING,
        anthropic=True,
    ),
    Operation(
        method="post",
        path="/v1/estimate",
        id="estimate",
        summary="What would become of a request, without running it",
        body=GenerateRequest | ChatCompletionRequest | CompletionRequest,
        answer=EstimateJson,
        failures=(*READING, *NAMING, HTTPStatus.SERVICE_UNAVAILABLE),
        headers=(*SCHEDULING, ADAPTER_TOKEN_HEADER),
    ),
    Operation(
        method="get",
        is_open=True,
        path="/v1/models",
        id="openai_get_model_info",
        summary="The model that is served, and the adapters that the client may use",
        answer=ModelInfoJson,
        foreign=(HTTPStatus.NOT_FOUND,),
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        id="get_model",
        summary="The model that is served, or an adapter, by its name",
        answer=ModelJson,
        failures=(HTTPStatus.NOT_FOUND,),
        openai=True,
    ),
    *SERVER_OPERATIONS,
    *ADAPTER_OPERATIONS,
    *PLATFORM_OPERATIONS,
    *POOLING_OPERATIONS,
)
