"""OpenAI's text completions: one prompt or a few, each a choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing

import orjson
from aiohttp import web

from millrace_router.access_log import watch
from millrace_router.api.native import GenerateRequest
from millrace_router.api.openai import CompletionRequest
from millrace_router.api.openai_answers import (
    AnswerHead,
    ChoiceText,
    Piece,
    Usage,
    completion_choice,
)
from millrace_router.bodies import json_response, read_model
from millrace_router.errors import BatchSizeExceeded
from millrace_router.generation import Generation
from millrace_router.headers import answer_headers, stream_headers, sum_of_times
from millrace_router.routes.openai_edge import (
    counting_refusals,
    fingerprint,
    model_name,
    pieces_of,
    stream_error,
    usage_of,
)
from millrace_router.services import SERVICES, Services
from millrace_router.sse import DONE, event, respond

IndexedPiece = tuple[int, Piece]


async def completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`."""
    services = request.app[SERVICES]
    body = await read_model(request, CompletionRequest)
    with counting_refusals(services.metrics):
        body.check()
        if len(body.prompts) > services.limits.max_client_batch_size:
            raise BatchSizeExceeded(services.limits.max_client_batch_size)
    parameters = body.parameters()
    head = AnswerHead(
        "text_completion",
        "cmpl",
        model=model_name(services, body.model),
        fingerprint=fingerprint(),
    )
    async with AsyncExitStack() as open_generations:
        generations: list[Generation] = []
        for prompt in body.prompts:
            asked = GenerateRequest(inputs=prompt, parameters=parameters)
            started = await services.infer.start(asked)
            generations.append(await open_generations.enter_async_context(started))
        watch(request, *generations)
        if not body.stream:
            return await _answer(services, body, generations, head)
        return await respond(
            request,
            _chunks(body, generations, head),
            headers=stream_headers(
                compute_type=services.compute_type, num_characters=sum(map(len, body.prompts))
            ),
            keep_alive_seconds=services.keep_alive_seconds,
            on_error=stream_error,
        )


async def _answer(
    services: Services, body: CompletionRequest, generations: list[Generation], head: AnswerHead
) -> web.Response:
    """Read one generation after the other: the events of the others wait in their streams."""
    choices, usage = [], Usage(0, 0)
    for index, generation in enumerate(generations):
        pieces = [piece async for piece in pieces_of(generation, ChoiceText(body.stop_sequences))]
        text = "".join(piece.text for piece in pieces)
        choices.append(completion_choice(index, text, pieces[-1].finish_reason or ""))
        usage += usage_of(generation, pieces[-1])
    headers = answer_headers(
        compute_type=services.compute_type,
        num_characters=sum(map(len, body.prompts)),
        prompt_tokens=usage.prompt_tokens,
        generated_tokens=usage.completion_tokens,
        times=sum_of_times([generation.times for generation in generations]),
    )
    # TGI gives no such sum here.
    del headers["x-compute-time"]
    return json_response(head.json(choices=choices, usage=usage.json()), headers=headers)


async def _chunks(
    body: CompletionRequest, generations: list[Generation], head: AnswerHead
) -> AsyncGenerator[bytes, None]:
    """Frame one chunk a token, prompts interleaved as they come.

    Usage comes with each prompt's last chunk as in TGI, or for all prompts in a chunk of its own if that is asked for.
    """
    total = Usage(0, 0)
    async with aclosing(_merged(body, generations)) as pieces:
        async for index, piece in pieces:
            choice = completion_choice(index, piece.text, piece.finish_reason or "")
            chunk = head.json(choices=[choice])
            if piece.finish_reason is not None:
                usage = usage_of(generations[index], piece)
                total += usage
                if not body.includes_usage:
                    chunk["usage"] = usage.json()
            yield event(orjson.dumps(chunk))
    if body.includes_usage:
        yield event(orjson.dumps(head.json(choices=[], usage=total.json())))
    yield DONE


async def _merged(
    body: CompletionRequest, generations: list[Generation]
) -> AsyncGenerator[IndexedPiece, None]:
    """Yield the pieces of all generations as they come; the first failure ends it."""
    async with AsyncExitStack() as open_streams:
        streams: dict[int, AsyncIterator[Piece]] = {}
        for index, generation in enumerate(generations):
            stream = pieces_of(generation, ChoiceText(body.stop_sequences))
            streams[index] = await open_streams.enter_async_context(aclosing(stream))
        if len(streams) == 1:
            async for piece in streams[0]:
                yield 0, piece
            return
        async with aclosing(_interleaved(streams)) as interleaved:
            async for indexed in interleaved:
                yield indexed


async def _interleaved(
    streams: dict[int, AsyncIterator[Piece]],
) -> AsyncGenerator[IndexedPiece, None]:
    waits = {asyncio.ensure_future(anext(stream, None)): i for i, stream in streams.items()}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in sorted(done, key=waits.__getitem__):
                index = waits.pop(wait)
                piece = wait.result()
                if piece is not None:
                    waits[asyncio.ensure_future(anext(streams[index], None))] = index
                    yield index, piece
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
