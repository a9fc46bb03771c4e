"""The routes of the tokenizer in the OpenAPI document."""

from __future__ import annotations

from http import HTTPStatus

from typing_extensions import TypeAliasType

from millrace_router.api.openai.protocol import ChatTokenizeResponseJson
from millrace_router.api.openai.request import ChatCompletionRequest
from millrace_router.api.openapi.operation import ADMITTING, Operation
from millrace_router.api.tgi.request import GenerateRequest
from millrace_router.api.tgi.tokenizer import (
    DetokenizeJson,
    DetokenizeRequest,
    TokenizePromptJson,
    TokenizePromptRequest,
    TokenizerInfoJson,
)
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
