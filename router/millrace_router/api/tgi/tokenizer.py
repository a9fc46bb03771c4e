"""vLLM's routes for clients without the tokenizer's files, such as lm-eval with a remote tokenizer."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import orjson
from aiohttp import web
from pydantic import Field
from typing_extensions import TypedDict

from millrace_router.api.body.fields import RequestModel, UInt32
from millrace_router.errors import ValidationError
from millrace_router.server.bodies import (
    json_response,
    off_loop,
    read_model,
    receive_json,
    to_model,
)
from millrace_router.server.operation import ADMITTING, Operation
from millrace_router.server.services import SERVICES
from millrace_router.server.sse import send_large
from millrace_router.text.tokenizer import TokenizerError


class TokenizePromptRequest(RequestModel):
    """Body of `/tokenize` with `prompt` in place of `inputs`."""

    prompt: str
    add_special_tokens: bool | None = None
    """Whether the special tokens around every prompt are included; null is true."""


class TokenizePromptJson(TypedDict):
    """Answer of `/tokenize` to a `prompt`."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(RequestModel):
    """Body of `/detokenize`."""

    tokens: Annotated[list[UInt32], Field(fail_fast=True)]


class DetokenizeJson(TypedDict):
    """Answer of `/detokenize`: the text, special tokens included."""

    prompt: str


class TokenizerInfoJson(TypedDict):
    """Answer of `/tokenizer_info`; null for a token that the model does not have."""

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int


OPERATIONS = (
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
)


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    app.router.add_get("/tokenizer_info", tokenizer_info)
    app.router.add_post("/detokenize", detokenize)


async def tokenizer_info(request: web.Request) -> web.StreamResponse:
    """`GET /tokenizer_info`: special tokens, and the chat template."""
    services = request.app[SERVICES]
    tokens = services.template.special_tokens
    answer: TokenizerInfoJson = {
        "bos_token": tokens.get("bos_token"),
        "eos_token": tokens.get("eos_token"),
        "unk_token": tokens.get("unk_token"),
        "pad_token": tokens.get("pad_token"),
        "chat_template": services.template.source,
        "model_max_length": services.limits.max_total_tokens,
    }
    return json_response(answer)


async def detokenize(request: web.Request) -> web.StreamResponse:
    """`POST /detokenize`: the text of token ids."""
    services = request.app[SERVICES]
    tokenizer = services.tokenizer
    await receive_json(request)
    async with services.infer.turn_aside():
        ids = (await read_model(request, DetokenizeRequest)).tokens
        text = await tokenizer.in_thread(
            lambda: tokenizer.decode(ids, skip_special_tokens=False), num_chars=4 * len(ids)
        )
    answer: DetokenizeJson = {"prompt": text}
    return await send_large(request, orjson.dumps(answer))


def names_prompt(body: object) -> bool:
    """Whether a body of `/tokenize` has vLLM's form."""
    return isinstance(body, dict) and "prompt" in body and "inputs" not in body


async def tokenize_prompt(request: web.Request, body: object) -> web.StreamResponse:
    """`POST /tokenize` with a `prompt`, while it has a turn: only token ids; raises RouterError."""
    services = request.app[SERVICES]
    prompt_request = await off_loop(request, partial(to_model, body, TokenizePromptRequest))
    try:
        ids = await services.tokenizer.encode_async(
            prompt_request.prompt,
            add_special_tokens=prompt_request.add_special_tokens is not False,
        )
    except TokenizerError as error:
        raise ValidationError(f"tokenizer error {error}") from error
    answer: TokenizePromptJson = {
        "count": len(ids),
        "max_model_len": services.limits.max_total_tokens,
        "tokens": list(ids),
    }
    return await send_large(request, orjson.dumps(answer))
