"""SageMaker's bodies: those of three other routes, under TGI's names."""

from __future__ import annotations

from typing_extensions import TypeAliasType

from millrace_router.api.chat import ChatCompletionRequest
from millrace_router.api.completion import CompletionRequest
from millrace_router.api.completion_json import ChunkJson, CompletionFinalJson
from millrace_router.api.native import CompatGenerateRequest, GenerateResponse, StreamResponse
from millrace_router.api.openai_json import ChatCompletionChunkJson, ChatCompletionJson

SagemakerRequest = TypeAliasType(
    "SagemakerRequest", CompatGenerateRequest | ChatCompletionRequest | CompletionRequest
)
"""Body of `/invocations`."""
SagemakerResponse = TypeAliasType(
    "SagemakerResponse", list[GenerateResponse] | ChatCompletionJson | CompletionFinalJson
)
"""Answer of `/invocations`, in one piece."""
SagemakerStreamResponse = TypeAliasType(
    "SagemakerStreamResponse",
    StreamResponse | ChatCompletionChunkJson | ChunkJson | CompletionFinalJson,
)
"""One event of a stream of `/invocations`."""
