"""OpenAI's text completions: one or several prompts, and one or several choices of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from aiohttp import web
from typing_extensions import TypeAliasType

from millrace_router.api.body.reading import read_request
from millrace_router.api.chat.route import openai_route, stream_errors
from millrace_router.api.openai.completion_stream import (
    CompletionChunks,
    Sample,
    completion_choice,
    completion_streams,
)
from millrace_router.api.openai.completion_text import (
    CompletionDelta,
    CompletionLogprobs,
    CompletionText,
    Echo,
    Style,
    echo_of,
)
from millrace_router.api.openai.protocol import (
    ChunkJson,
    CompletionCompleteJson,
    CompletionFinalJson,
)
from millrace_router.api.openai.render import (
    ResponseMeta,
    prompt_logprobs_json,
    response_meta,
    usage_json,
)
from millrace_router.api.openai.request import CompletionRequest
from millrace_router.engine.generation import Generation, Usage
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.token_stream import TokenEvent, read_tokens
from millrace_router.server.access_log import watch
from millrace_router.server.bodies import json_response, off_loop
from millrace_router.server.headers import ANSWER, answer_headers, names_of, sse_options
from millrace_router.server.operation import GENERATING, IDEMPOTENT, Operation
from millrace_router.server.services import SERVICES, Services, scheduling_of
from millrace_router.server.sse import respond

Completion = TypeAliasType("Completion", ChunkJson | CompletionFinalJson)
OPERATIONS = (
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
)


def register(app: web.Application) -> None:
    """Add the route to `app`."""
    app.router.add_post("/v1/completions", openai_route(completions))


async def completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`."""
    services = request.app[SERVICES]
    body = await read_request(request, CompletionRequest)
    prompts, sampled = await off_loop(request, partial(body.translated, services.limits))
    names = names_of(request)
    sampled = replace(
        sampled,
        scheduling=scheduling_of(request, body.priority),
        adapter=body.adapter(request),
        answer=request.get(ANSWER),
    )
    meta = response_meta(services, "text_completion", "cmpl", body.model, names)
    style = _style(services, body)
    with ExitStack() as cleanup:
        samples: list[Sample] = []
        for place, prompt in enumerate(prompts):
            generations = await services.infer.start_samples(
                replace(sampled, prompt=prompt, unset_seed=names.part(place).seed()),
                body.num_samples,
            )
            for generation in generations:
                cleanup.callback(generation.close)
            echo = await _echo(services, sampled, prompt) if body.echo else None
            samples.extend((generation, CompletionText(style, echo)) for generation in generations)
        watch(request, *_generations(samples))
        headers = body.lorax_headers(services, sampled.adapter)
        if body.stream:
            return await _stream(request, body, samples, meta, headers)
        return await _answer(services, body, samples, meta, headers)


async def _stream(
    request: web.Request,
    body: CompletionRequest,
    samples: Sequence[Sample],
    meta: ResponseMeta,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    services = request.app[SERVICES]
    options = sse_options(services, _generations(samples), stream_errors(services), headers)
    chunks = CompletionChunks(
        meta,
        includes_usage=body.includes_usage,
        continuous_usage=body.continuous_usage,
        dialect=services.dialect,
    )
    return await respond(request, completion_streams(samples, body.num_samples, chunks), options)


async def _echo(
    services: Services, sampled: GenerationRequest, prompt: str | tuple[int, ...]
) -> Echo:
    adds = sampled.adds_special_tokens
    return await echo_of(services.tokenizer, prompt, adds_special_tokens=adds)


def _generations(samples: Sequence[Sample]) -> list[Generation]:
    return [generation for generation, _ in samples]


def _style(services: Services, body: CompletionRequest) -> Style:
    logprobs = None
    if body.logprobs is not None:
        logprobs = CompletionLogprobs(
            services.tokenizer, body.logprobs, names_ids=bool(body.return_tokens_as_token_ids)
        )
    return Style(
        stop_sequences=body.stop_sequences,
        logprobs=logprobs,
        only_scores=body.only_scores,
        dialect=services.dialect,
        output_options=body.output_options,
        streams=bool(body.stream),
    )


async def _answer(
    services: Services,
    body: CompletionRequest,
    samples: Sequence[Sample],
    meta: ResponseMeta,
    headers: Mapping[str, str],
) -> web.Response:
    """Return the best samples of each prompt; the tokens of the others count, too."""
    choices: list[CompletionCompleteJson] = []
    usage = Usage()
    for first in range(0, len(samples), body.num_samples):
        texts, used = await _read(body, samples[first : first + body.num_samples])
        usage += used
        ids = samples[first][0].valid.input_ids if body.return_token_ids else None
        prompt = samples[first][0].prompt_logprobs
        for pieces in texts:
            choice = completion_choice(len(choices), pieces, ids)
            if body.prompt_logprobs is not None and prompt is not None:
                choice["prompt_logprobs"] = prompt_logprobs_json(
                    prompt, body.prompt_logprobs, services.tokenizer
                )
            choices.append(choice)
    headers = {**answer_headers(services, _generations(samples), usage), **headers}
    # TGI does not add them up here.
    del headers["x-compute-time"]
    answer: CompletionFinalJson = {**meta.json(), "choices": choices, "usage": usage_json(usage)}
    return json_response(answer, headers=headers)


async def _read(
    body: CompletionRequest, samples: Sequence[Sample]
) -> tuple[list[list[CompletionDelta]], Usage]:
    """Read one prompt's choices: its samples, or the likeliest of them first.

    They are read one after the other: tokens of the others wait in their streams.
    """
    read: list[tuple[float, list[CompletionDelta]]] = []
    usage = Usage()
    first, _ = samples[0]
    for generation, text in samples:
        deltas = await _deltas(generation, text, first)
        read.append((text.mean_logprob, deltas))
        usage += generation.usage(deltas[-1].num_tokens)
    if len(read) > body.num_choices:
        read.sort(key=lambda one: one[0], reverse=True)
    return [deltas for _, deltas in read[: body.num_choices]], usage


async def _deltas(
    generation: Generation, text: CompletionText, first: Generation
) -> list[CompletionDelta]:
    """Read the deltas of echo and tokens; the `first` sample has the log probabilities of the prompt."""
    deltas: list[CompletionDelta] = []

    def take(event: TokenEvent) -> bool:
        if not deltas and (opening := text.opening(first.prompt_logprobs)) is not None:
            deltas.append(opening)
        deltas.append(text.push(event))
        return deltas[-1].finish_reason is not None

    await read_tokens(generation, take)
    return deltas
