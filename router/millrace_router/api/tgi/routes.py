"""TGI's own routes: generate, as one answer or as a stream, and tokenize."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus

import orjson
from aiohttp import web
from typing_extensions import TypeAliasType

from millrace_router.api.body.reading import read_request, request_of
from millrace_router.api.chat.route import with_errors_in_stream
from millrace_router.api.tgi.answers import (
    BestOfDetailsJson,
    BestOfSequenceJson,
    GenerateResponse,
    SequenceJson,
    StreamDetailsJson,
    StreamResponse,
    plain_frame,
    prefill_json,
    sequence_json,
    stream_json,
)
from millrace_router.api.tgi.lorax import (
    adapter_of,
    complete_details,
    complete_sequence,
    complete_token,
    headers_of,
    rendered,
    times_of,
)
from millrace_router.api.tgi.request import CompatGenerateRequest, GenerateRequest
from millrace_router.api.tgi.tokenizer import (
    TokenizePromptJson,
    TokenizePromptRequest,
    names_prompt,
    tokenize_prompt,
)
from millrace_router.engine.generation import Collected, Generation
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.request import Task
from millrace_router.request.token_stream import Finished, TokenEvent
from millrace_router.server.access_log import watch
from millrace_router.server.bodies import (
    asks_for_stream,
    json_response,
    off_loop,
    read_json,
    receive_json,
)
from millrace_router.server.headers import (
    ANSWER,
    answer_headers,
    names_of,
    note_ignored,
    sse_options,
)
from millrace_router.server.idempotent_route import idempotent
from millrace_router.server.operation import ADMITTING, GENERATING, IDEMPOTENT, Operation
from millrace_router.server.services import SERVICES, Services, scheduling_of
from millrace_router.server.sse import error_event, respond, send_large
from millrace_router.server.sse import event as framed
from millrace_router.server.stream_writer import GenerationStream
from millrace_router.text.tokenizer import TokenSpan

TokenizeResponse = TypeAliasType("TokenizeResponse", list[TokenSpan])
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
)


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    if Task.GENERATE in app[SERVICES].limits.tasks:
        app.router.add_post("/", compat)
    app.router.add_post("/generate", idempotent(generate))
    app.router.add_post(
        "/generate_stream", with_errors_in_stream(idempotent(generate_stream), error_event)
    )
    app.router.add_post("/tokenize", tokenize)


async def generate(request: web.Request) -> web.StreamResponse:
    """`POST /generate`."""
    body = await read_request(request, GenerateRequest)
    answer, collected = await generated(request, body)
    return json_response(answer, headers=_headers(request, body, collected))


async def generate_stream(request: web.Request) -> web.StreamResponse:
    """`POST /generate_stream`."""
    return await _stream(request, await read_request(request, GenerateRequest))


async def compat_generate(request: web.Request) -> web.StreamResponse:
    """`POST /`: as `/generate`, with the answer in a list, or as `/generate_stream`."""
    body = await read_request(request, CompatGenerateRequest)
    if body.parameters.return_full_text is None:
        parameters = body.parameters.model_copy(update={"return_full_text": True})
        body = body.model_copy(update={"parameters": parameters})
    if body.stream:
        return await _stream(request, body)
    answer, collected = await generated(request, body)
    return json_response([answer], headers=_headers(request, body, collected))


compat = with_errors_in_stream(idempotent(compat_generate), error_event, when=asks_for_stream)


async def tokenize(request: web.Request) -> web.StreamResponse:
    """`POST /tokenize`, in TGI's form or in vLLM's."""
    services = request.app[SERVICES]
    await receive_json(request)
    async with services.infer.turn_aside():
        parsed = await read_json(request)
        if names_prompt(parsed):
            return await tokenize_prompt(request, parsed)
        body = await request_of(request, parsed, GenerateRequest)
        tokens = await services.validator.tokenize(body.inputs)
    return await send_large(request, tokens)


async def generated(
    request: web.Request, body: GenerateRequest, place: int = 0
) -> tuple[GenerateResponse, Collected]:
    """Generate to the end, as `/generate` does, for the text at `place` of the request's; raises RouterError."""
    services = request.app[SERVICES]
    collected = await services.infer.generate(await _request_of(request, body, place))
    watch(request, collected)
    answer: GenerateResponse = {"generated_text": _full_text(body, collected)}
    if body.parameters.details or body.parameters.decoder_input_details:
        answer["details"] = _details(services, body, collected)
    return answer, collected


async def _request_of(
    request: web.Request, body: GenerateRequest, place: int = 0
) -> GenerationRequest:
    """Return the request that a body and its headers make; raises RouterError."""
    parameters = body.parameters
    images = request.app[SERVICES].images
    if images.leaves_images(body.inputs):
        note_ignored(request, ("inputs.image",))
    scheduling = scheduling_of(request, parameters.priority)
    adapter = adapter_of(request, parameters)
    generation = await off_loop(request, body.generation)
    generation = await rendered(request, generation, parameters)
    names = names_of(request).part(place)
    return replace(
        generation,
        scheduling=scheduling,
        adapter=adapter,
        unset_seed=names.seed(),
        answer=request.get(ANSWER),
    )


def _full_text(body: GenerateRequest, collected: Collected) -> str:
    prefix = body.inputs if body.parameters.return_full_text else ""
    return prefix + collected.finished.generated_text


def _details(
    services: Services, body: GenerateRequest, collected: Collected
) -> SequenceJson | BestOfDetailsJson:
    sequence = _sequence(services, body, collected)
    if not collected.others:
        return sequence
    others = [
        BestOfSequenceJson(generated_text=_full_text(body, one), **_sequence(services, body, one))
        for one in collected.others
    ]
    return BestOfDetailsJson(**sequence, best_of_sequences=others)


def _sequence(services: Services, body: GenerateRequest, collected: Collected) -> SequenceJson:
    text_of = services.tokenizer.token_text
    prefill = prefill_json(collected.prompt, map(text_of, collected.valid.input_ids))
    sequence = sequence_json(
        collected.tokens,
        collected.finished,
        prefill=prefill,
        cached_tokens=collected.cached_tokens,
    )
    num_prompt_tokens = len(collected.valid.input_ids)
    complete_sequence(
        sequence, collected.tokens, body.parameters, num_prompt_tokens=num_prompt_tokens
    )
    return sequence


def _headers(request: web.Request, body: GenerateRequest, collected: Collected) -> dict[str, str]:
    headers = answer_headers(request.app[SERVICES], [collected], collected.usage)
    own = headers_of(request, body.parameters) | times_of(collected, body.parameters)
    return headers | own


async def _stream(request: web.Request, body: GenerateRequest) -> web.StreamResponse:
    services = request.app[SERVICES]
    async with await services.infer.start(await _request_of(request, body)) as generation:
        watch(request, generation)
        headers = headers_of(request, body.parameters)
        options = sse_options(services, [generation], error_event, headers)
        return await respond(request, [GenerateStream(generation, body)], options)


class GenerateStream(GenerationStream):
    """Frames each token; the last one has the text and, if `details` is set, the details."""

    def __init__(self, generation: Generation, body: GenerateRequest) -> None:
        super().__init__(generation)
        self._body = body
        self._is_lorax = body.parameters.is_lorax

    def token(self, event: TokenEvent) -> None:
        if event.finished is not None:
            self._sink.token(framed(orjson.dumps(self._last(event, event.finished))))
            self._finish()
        elif event.top_tokens or self._is_lorax:
            self._sink.token(framed(orjson.dumps(self._json(event))))
        else:
            self._sink.token(plain_frame(event))

    def _json(self, event: TokenEvent) -> StreamResponse:
        json = stream_json(event)
        if self._is_lorax:
            complete_token(json["token"], event, self._body.parameters)
        return json

    def _last(self, event: TokenEvent, finished: Finished) -> StreamResponse:
        json = self._json(event)
        prefix = self._body.inputs if self._body.parameters.return_full_text else ""
        json["generated_text"] = prefix + finished.generated_text
        if self._body.parameters.details:
            details: StreamDetailsJson = {
                "finish_reason": finished.finish_reason,
                "generated_tokens": finished.generated_tokens,
                "seed": finished.seed,
                "input_length": len(self._generation.valid.input_ids),
                "cached_tokens": self._generation.cached_tokens,
            }
            complete_details(details, self._body.parameters)
            json["details"] = details
        return json
