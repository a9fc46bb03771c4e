"""SageMaker's bodies: the bodies of three other routes, with TGI's names."""

from __future__ import annotations

from typing_extensions import TypeAliasType

from millrace_router.api.completions.protocol import ChunkJson, CompletionFinalJson
from millrace_router.api.completions.request import CompletionRequest
from millrace_router.api.openai.chat_request import ChatCompletionRequest
from millrace_router.api.openai.protocol import ChatCompletionChunkJson, ChatCompletionJson
from millrace_router.api.tgi.answers import GenerateResponse, StreamResponse
from millrace_router.api.tgi.request import CompatGenerateRequest

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
