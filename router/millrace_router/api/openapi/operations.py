"""The table of routes in the OpenAPI document: the requests and the possible answers of each."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus

from typing_extensions import TypeAliasType

from millrace_router.api.admin.routes import (
    AdaptersJson,
    LoadedAdaptersJson,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
)
from millrace_router.api.anthropic.protocol import (
    CountTokensJson,
    MessageEventJson,
    MessagesAnswerJson,
)
from millrace_router.api.anthropic.request import CountTokensRequest, MessagesRequest
from millrace_router.api.openai.protocol import (
    ChatCompletionChunkJson,
    ChatCompletionJson,
    ChatTokenizeResponseJson,
    ChunkJson,
    CompletionFinalJson,
    ModelInfoJson,
    ModelJson,
)
from millrace_router.api.openai.request import ChatCompletionRequest, CompletionRequest
from millrace_router.api.openapi.operation import (
    ADMITTING,
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
from millrace_router.api.openapi.server_operations import SERVER_OPERATIONS
from millrace_router.api.responses.protocol import (
    DeletedResponseJson,
    InputItemsJson,
    InputTokensJson,
    ResponseEventJson,
    ResponseJson,
)
from millrace_router.api.responses.request import ResponsesRequest
from millrace_router.api.tgi.answers import GenerateResponse, StreamResponse
from millrace_router.api.tgi.estimate import EstimateJson
from millrace_router.api.tgi.request import CompatGenerateRequest, GenerateRequest
from millrace_router.api.tgi.tokenizer import (
    DetokenizeJson,
    DetokenizeRequest,
    TokenizePromptJson,
    TokenizePromptRequest,
    TokenizerInfoJson,
)
from millrace_router.request.adapter import ADAPTER_TOKEN_HEADER
from millrace_router.text.tokenizer import TokenSpan

TokenizeResponse = TypeAliasType("TokenizeResponse", list[TokenSpan])

TOKENIZER_OPERATIONS = (
    Operation(
        method="post",
        path="/tokenize",
        id="tokenize",
        summary="Tokenize `inputs`, whose places count bytes of UTF-8, or as vLLM a `prompt`",
        body=GenerateRequest | TokenizePromptRequest,
        answer=TokenizeResponse | TokenizePromptJson,
        failures=ADMITTING,
        foreign=(HTTPStatus.NOT_FOUND,),
    ),
    Operation(
        method="post",
        path="/detokenize",
        id="detokenize",
        summary="Turn token ids into text",
        body=DetokenizeRequest,
        answer=DetokenizeJson,
        failures=ADMITTING,
    ),
    Operation(
        method="get",
        path="/tokenizer_info",
        id="tokenizer_info",
        summary="Special tokens of the model, and its chat template",
        answer=TokenizerInfoJson,
    ),
    Operation(
        method="post",
        path="/chat_tokenize",
        id="get_chat_tokenize",
        summary="Turn a chat into a prompt, and tokenize it",
        body=ChatCompletionRequest,
        answer=ChatTokenizeResponseJson,
        failures=ADMITTING,
        foreign=(HTTPStatus.NOT_FOUND,),
    ),
)


CHANGING = (*READING, HTTPStatus.NOT_FOUND)

_vllm = partial(Operation, method="post", is_admin=True, openai=True, answer=bytes)
_sglang = partial(
    Operation,
    method="post",
    is_admin=True,
    openai=True,
    answer=LoadedAdaptersJson,
    failures=CHANGING,
    failure=LoadedAdaptersJson,
)

ADAPTER_OPERATIONS = (
    _vllm(
        path="/v1/load_lora_adapter",
        id="load_lora_adapter",
        summary="Let requests name a LoRA adapter, or give a name new files",
        body=LoadLoraAdapterRequest,
        failures=(*CHANGING, HTTPStatus.SERVICE_UNAVAILABLE),
    ),
    _vllm(
        path="/v1/unload_lora_adapter",
        id="unload_lora_adapter",
        summary="Take the name of a LoRA adapter away",
        body=UnloadLoraAdapterRequest,
        failures=CHANGING,
    ),
    _sglang(
        path="/load_lora_adapter",
        id="sglang_load_lora_adapter",
        summary="The same as `/v1/load_lora_adapter`, in SGLang's form",
        body=LoadLoraAdapterRequest,
    ),
    _sglang(
        path="/unload_lora_adapter",
        id="sglang_unload_lora_adapter",
        summary="The same as `/v1/unload_lora_adapter`, in SGLang's form",
        body=UnloadLoraAdapterRequest,
    ),
    Operation(
        method="get",
        is_admin=True,
        path="/adapters",
        id="adapters",
        summary="The LoRA adapters that the operator named, and their versions",
        answer=AdaptersJson,
        failures=(HTTPStatus.NOT_FOUND,),
        openai=True,
    ),
)


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
