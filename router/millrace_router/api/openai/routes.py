"""OpenAI's chat and model list, in TGI's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import orjson
from aiohttp import web

from millrace_router.api.openai.adapter_models import adapter_json, adapters_json
from millrace_router.api.openai.answers import AnswerHead
from millrace_router.api.openai.chat_answers import ChatAnswers, OldChatAnswers
from millrace_router.api.openai.chat_request import ChatCompletionRequest
from millrace_router.api.openai.chat_stream import ChatStream
from millrace_router.api.openai.choice_stream import OpenChoices
from millrace_router.api.openai.errors import (
    deltas_of,
    fingerprint,
    model_name,
    openai_errors,
)
from millrace_router.api.openai.prepare import PreparedChat, prepare_chat
from millrace_router.api.openai.prompt_logprobs import prompt_logprobs_json
from millrace_router.api.openai.protocol import ChatCompletionCompleteJson, ModelInfoJson, ModelJson
from millrace_router.api.openai.route_wrappers import counted_again, openai_route, stream_errors
from millrace_router.api.request_fields.reading import read_request
from millrace_router.engine.generation import Generation, Usage
from millrace_router.errors import UnknownModel
from millrace_router.server.access_log import watch
from millrace_router.server.bodies import json_response
from millrace_router.server.headers import answer_headers, sse_options
from millrace_router.server.request_start import counting_refusals, scheduling_of
from millrace_router.server.services import SERVICES, Services
from millrace_router.server.sse import DONE, respond


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    app.router.add_post("/v1/chat/completions", openai_route(chat_completions))
    app.router.add_get("/v1/models", models)
    # Names may have slashes.
    app.router.add_get("/v1/models/{model:.+}", openai_errors(model))
    app.router.add_post("/chat_tokenize", counted_again(chat_tokenize))


async def models(request: web.Request) -> web.StreamResponse:
    """`GET /v1/models`: the one that is served, by each of its names, and the adapters that the client may use."""
    data = [*_models(request.app[SERVICES]), *adapters_json(request)]
    answer: ModelInfoJson = {"object": "list", "data": data}
    return json_response(answer)


async def model(request: web.Request) -> web.StreamResponse:
    """`GET /v1/models/{model}`: the one that is served, or an adapter of it, by its name."""
    asked = request.match_info["model"]
    served = [one for one in _models(request.app[SERVICES]) if one["id"] == asked]
    found = served[0] if served else adapter_json(request, asked)
    if found is None:
        raise UnknownModel(asked)
    return json_response(found)


def _models(services: Services) -> list[ModelJson]:
    return [
        {"id": name, "object": "model", "created": 0, "owned_by": name}
        for name in services.config.served_names
    ]


async def chat_tokenize(request: web.Request) -> web.StreamResponse:
    """`POST /chat_tokenize`: the prompt that a chat becomes, and its tokens."""
    services = request.app[SERVICES]
    body = await read_request(request, ChatCompletionRequest)
    with services.infer.permit():
        chat = await prepare_chat(services, body.chat(services.limits))
        prompt = chat.request.text
        adds = chat.request.adds_special_tokens
        tokens = await services.validator.tokenize(prompt, adds_special_tokens=adds)
    return json_response({"tokenize_response": orjson.Fragment(tokens), "templated_text": prompt})


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    services = request.app[SERVICES]
    body = await read_request(request, ChatCompletionRequest)
    with counting_refusals(services.metrics):
        chat = await prepare_chat(services, body.chat(services.limits))
        scheduling = scheduling_of(request, body.priority)
        adapter = body.adapter(request)
    answers, headers = _answers(services, body), body.lorax_headers(services, adapter)
    with ExitStack() as cleanup:
        generations = await services.infer.start_samples(
            replace(chat.request, scheduling=scheduling, adapter=adapter), body.num_choices
        )
        for generation in generations:
            cleanup.callback(generation.close)
        watch(request, *generations)
        if not body.stream:
            asked = body.prompt_logprobs
            return await _answer(services, chat, generations, answers, headers, asked=asked)
        options = sse_options(services, generations, stream_errors(services), headers)
        choices = OpenChoices(
            len(generations),
            answers.usage_chunk if body.includes_usage else None,
            # TGI's old clients read the end of a stream as JSON.
            end=() if body.is_of_old_client else (DONE,),
        )
        streams = [
            ChatStream(
                index,
                generation,
                chat.text(),
                answers,
                choices,
                is_plain=chat.is_plain,
                continuous_usage=body.continuous_usage,
            )
            for index, generation in enumerate(generations)
        ]
        return await respond(request, streams, options)


def _answers(services: Services, body: ChatCompletionRequest) -> ChatAnswers:
    dialect = services.dialect
    head = AnswerHead(
        "chat.completion",
        "chatcmpl",
        model=model_name(services, body.model),
        fingerprint=fingerprint(services),
        anonymous=dialect.hides_ids,
    )
    kind = OldChatAnswers if body.is_of_old_client else ChatAnswers
    return kind(head, dialect)


async def _answer(
    services: Services,
    chat: PreparedChat,
    generations: Sequence[Generation],
    answers: ChatAnswers,
    headers: Mapping[str, str],
    *,
    asked: int | None,
) -> web.Response:
    """Read one generation after the other: tokens of the others wait in their streams.

    `asked` is the number of candidates beside each token of the prompt, if the answer has them.
    """
    choices: list[ChatCompletionCompleteJson] = []
    usage = Usage()
    for index, generation in enumerate(generations):
        text = chat.text()
        pieces = await deltas_of(generation, text)
        choices.append(answers.choice(index, pieces))
        usage += generation.usage(pieces[-1].num_tokens, text.reasoning_tokens)
    headers = {**answer_headers(services, generations, usage), **headers}
    ids = generations[0].valid.input_ids if chat.shown.token_ids else None
    answer = answers.answer(choices, usage, ids)
    prompt = generations[0].prompt_logprobs
    if asked is not None and prompt is not None:
        answer["prompt_logprobs"] = prompt_logprobs_json(prompt, asked, services.tokenizer)
    return json_response(answer, headers=headers)
