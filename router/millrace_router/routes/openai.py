"""OpenAI's chat and model list, in TGI's shapes."""

from __future__ import annotations

import orjson
from aiohttp import web

from millrace_router.access_log import watch
from millrace_router.api.native import GenerateRequest
from millrace_router.api.openai import ChatCompletionRequest
from millrace_router.api.openai_answers import (
    AnswerHead,
    ChoiceText,
    ChunkTemplate,
    Piece,
    chat_answer,
    chat_chunk,
    usage_chunk,
)
from millrace_router.api.openai_json import ModelInfoJson
from millrace_router.bodies import json_response, read_model
from millrace_router.events import TokenEvent
from millrace_router.generation import Generation
from millrace_router.headers import answer_headers, stream_headers
from millrace_router.outlet import Sink
from millrace_router.recording import Form
from millrace_router.routes.asking import counting_refusals, terms_of
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
from millrace_router.sse import DONE, event, respond


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
        body.check()
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
    async with await services.infer.start(
        asked, terms=terms, add_special_tokens=False
    ) as generation:
        watch(request, generation)
        if not body.stream:
            return await _answer(services, body, generation, head)
        form = Form(
            headers=stream_headers(
                compute_type=services.compute_type,
                num_characters=len(prompt),
                times=generation.times,
            ),
            keep_alive_seconds=services.keep_alive_seconds,
            may_expire=lambda: generation.may_expire,
            on_error=stream_error,
        )
        return await respond(request, _Chunks(body, generation, head).feed, form)


async def _answer(
    services: Services, body: ChatCompletionRequest, generation: Generation, head: AnswerHead
) -> web.Response:
    pieces = [piece async for piece in pieces_of(generation, _choice_text(body))]
    usage = usage_of(generation, pieces[-1])
    headers = answer_headers(
        compute_type=services.compute_type,
        num_characters=len(generation.inputs),
        prompt_tokens=usage.prompt_tokens,
        generated_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        times=generation.times,
    )
    return json_response(chat_answer(head, pieces, usage), headers=headers)


class _Chunks:
    """Frames one chunk a token, then usage if asked for, then the end."""

    def __init__(
        self, body: ChatCompletionRequest, generation: Generation, head: AnswerHead
    ) -> None:
        self._body = body
        self._generation = generation
        self._head = head
        self._text = _choice_text(body)
        self._template = ChunkTemplate(lambda text: chat_chunk(head, Piece(text, None, 0, None)))

    def feed(self, sink: Sink) -> None:
        self._sink = sink
        self._generation.listen(self)

    def token(self, token: TokenEvent) -> None:
        piece = self._text.push(token)
        if piece.finish_reason is None and piece.logprobs is None:
            self._sink.send(event(self._template.fill(piece.text)))
            return
        self._sink.send(event(orjson.dumps(chat_chunk(self._head, piece))))
        if piece.finish_reason is not None:
            self._end(piece)

    def fail(self, error: Exception) -> None:
        self._sink.fail(error)

    def _end(self, last: Piece) -> None:
        if self._body.includes_usage:
            usage = event(orjson.dumps(usage_chunk(self._head, usage_of(self._generation, last))))
            self._sink.end(usage, DONE)
        else:
            self._sink.end(DONE)


def _choice_text(body: ChatCompletionRequest) -> ChoiceText:
    return ChoiceText(body.stop_sequences, logprobs=bool(body.logprobs))
