"""OpenAI's chat and model list, in TGI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import orjson
from aiohttp import web

from millrace_router.access_log import watch
from millrace_router.api.chat import ChatCompletionRequest
from millrace_router.api.native import GenerateRequest
from millrace_router.api.openai_answers import (
    AnswerHead,
    ChoiceText,
    Piece,
    Usage,
    chat_choice,
    chat_chunk,
    usage_chunk,
)
from millrace_router.api.openai_json import (
    ChatCompletionChunkJson,
    ChatCompletionCompleteJson,
    ChatCompletionJson,
    ModelInfoJson,
)
from millrace_router.bodies import json_response, read_model
from millrace_router.generation import Generation
from millrace_router.headers import answer_headers, stream_headers, sum_of_times
from millrace_router.recording import Form
from millrace_router.routes.asking import counting_refusals, terms_of
from millrace_router.routes.choices import Choices
from millrace_router.routes.completions import completions
from millrace_router.routes.keyed import keyed
from millrace_router.routes.openai_edge import (
    fingerprint,
    model_name,
    openai_errors,
    pieces_of,
    render_chat,
    stream_error,
    usage_of,
)
from millrace_router.services import SERVICES, Services
from millrace_router.sse import respond


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    app.router.add_post("/v1/chat/completions", openai_errors(keyed(chat_completions)))
    app.router.add_post("/v1/completions", openai_errors(keyed(completions)))
    app.router.add_get("/v1/models", models)
    app.router.add_post("/chat_tokenize", chat_tokenize)


async def models(request: web.Request) -> web.StreamResponse:
    """`GET /v1/models`: the one that is served."""
    name = request.app[SERVICES].config.model_id
    answer: ModelInfoJson = {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": 0, "owned_by": name}],
    }
    return json_response(answer)


async def chat_tokenize(request: web.Request) -> web.StreamResponse:
    """`POST /chat_tokenize`: the prompt that a chat becomes, and its tokens."""
    services = request.app[SERVICES]
    body = await read_model(request, ChatCompletionRequest)
    with services.infer.permit():
        prompt = await render_chat(services, body)
        tokens = await services.validator.tokenize(prompt, add_special_tokens=False)
    return json_response({"tokenize_response": orjson.Fragment(tokens), "templated_text": prompt})


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    services = request.app[SERVICES]
    body = await read_model(request, ChatCompletionRequest)
    with counting_refusals(services.metrics):
        body.check(services.limits)
        parameters = body.parameters()
        terms = terms_of(request, parameters)
        prompt = await render_chat(services, body)
    asked = GenerateRequest(inputs=prompt, parameters=parameters)
    head = AnswerHead(
        "chat.completion",
        "chatcmpl",
        model=model_name(services, body.model),
        fingerprint=fingerprint(),
    )
    with ExitStack() as cleanup:
        generations = await services.infer.start_samples(
            asked, body.num_choices, terms=terms, add_special_tokens=False
        )
        for generation in generations:
            cleanup.callback(generation.close)
        watch(request, *generations)
        if not body.stream:
            return await _answer(services, body, generations, head)
        form = Form(
            headers=stream_headers(
                compute_type=services.compute_type,
                num_characters=len(prompt),
                times=sum_of_times([generation.times for generation in generations]),
            ),
            keep_alive_seconds=services.keep_alive_seconds,
            may_expire=lambda: any(generation.may_expire for generation in generations),
            on_error=stream_error,
        )
        choices = Choices(
            _Chunks(body, head),
            [(generation, _choice_text(body)) for generation in generations],
            num_samples=len(generations),
        )
        return await respond(request, choices.feed, form)


async def _answer(
    services: Services,
    body: ChatCompletionRequest,
    generations: Sequence[Generation],
    head: AnswerHead,
) -> web.Response:
    """Read one generation after the other: the events of the others wait in their streams."""
    choices: list[ChatCompletionCompleteJson] = []
    usage = Usage(0, 0)
    for index, generation in enumerate(generations):
        pieces = [piece async for piece in pieces_of(generation, _choice_text(body))]
        choices.append(chat_choice(index, pieces))
        usage += usage_of(generation, pieces[-1], sample=index)
    headers = answer_headers(
        compute_type=services.compute_type,
        num_characters=len(generations[0].inputs),
        prompt_tokens=usage.prompt_tokens,
        generated_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        times=sum_of_times([generation.times for generation in generations]),
    )
    answer: ChatCompletionJson = {**head.json(), "choices": choices, "usage": usage.json()}
    return json_response(answer, headers=headers)


class _Chunks:
    """Chunks of a chat, and usage in one of its own if that is asked for."""

    def __init__(self, body: ChatCompletionRequest, head: AnswerHead) -> None:
        self._body = body
        self._head = head

    def chunk(self, index: int, piece: Piece) -> ChatCompletionChunkJson:
        return chat_chunk(self._head, piece, index)

    def last_chunk(self, index: int, piece: Piece, usage: Usage) -> ChatCompletionChunkJson:  # noqa: ARG002
        return chat_chunk(self._head, piece, index)

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunkJson | None:
        return usage_chunk(self._head, usage) if self._body.includes_usage else None


def _choice_text(body: ChatCompletionRequest) -> ChoiceText:
    return ChoiceText(
        body.stop_sequences,
        logprobs=bool(body.logprobs),
        num_candidates=body.top_logprobs or 0,
    )
