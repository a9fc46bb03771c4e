"""OpenAI's text completions: one prompt or a few, each a choice."""

from __future__ import annotations

from contextlib import AsyncExitStack

import orjson
from aiohttp import web

from millrace_router.access_log import watch
from millrace_router.api.native import GenerateRequest
from millrace_router.api.openai import CompletionRequest
from millrace_router.api.openai_answers import (
    AnswerHead,
    ChoiceText,
    ChunkTemplate,
    Piece,
    Usage,
    completion_choice,
)
from millrace_router.api.openai_json import (
    ChunkJson,
    CompletionCompleteJson,
    CompletionFinalJson,
)
from millrace_router.bodies import json_response, read_model
from millrace_router.errors import BatchSizeExceeded
from millrace_router.events import TokenEvent
from millrace_router.generation import Generation
from millrace_router.headers import answer_headers, stream_headers, sum_of_times
from millrace_router.outlet import Sink
from millrace_router.recording import Form
from millrace_router.routes.asking import counting_refusals, terms_of
from millrace_router.routes.openai_edge import (
    fingerprint,
    model_name,
    pieces_of,
    stream_error,
    usage_of,
)
from millrace_router.services import SERVICES, Services
from millrace_router.sse import DONE, event, respond


async def completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`."""
    services = request.app[SERVICES]
    body = await read_model(request, CompletionRequest)
    with counting_refusals(services.metrics):
        body.check()
        if len(body.prompts) > services.limits.max_client_batch_size:
            raise BatchSizeExceeded(services.limits.max_client_batch_size)
        parameters = body.parameters()
        terms = terms_of(request, parameters)
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
            started = await services.infer.start(asked, terms=terms)
            generations.append(await open_generations.enter_async_context(started))
        watch(request, *generations)
        if not body.stream:
            return await _answer(services, body, generations, head)
        form = Form(
            headers=stream_headers(
                compute_type=services.compute_type,
                num_characters=sum(map(len, body.prompts)),
                times=sum_of_times([generation.times for generation in generations]),
            ),
            keep_alive_seconds=services.keep_alive_seconds,
            may_expire=lambda: any(generation.may_expire for generation in generations),
            on_error=stream_error,
        )
        return await respond(request, _Chunks(body, generations, head).feed, form)


async def _answer(
    services: Services, body: CompletionRequest, generations: list[Generation], head: AnswerHead
) -> web.Response:
    """Read one generation after the other: the events of the others wait in their streams."""
    choices: list[CompletionCompleteJson] = []
    usage = Usage(0, 0)
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
        cached_tokens=usage.cached_tokens,
        times=sum_of_times([generation.times for generation in generations]),
    )
    # TGI gives no such sum here.
    del headers["x-compute-time"]
    answer: CompletionFinalJson = {**head.json(), "choices": choices, "usage": usage.json()}
    return json_response(answer, headers=headers)


class _Chunks:
    """Frames one chunk a token, prompts interleaved as they come; the first failure ends it.

    Usage comes with each prompt's last chunk as in TGI, or for all prompts in a chunk of its own if that is asked for.
    """

    def __init__(
        self, body: CompletionRequest, generations: list[Generation], head: AnswerHead
    ) -> None:
        self._body = body
        self._generations = generations
        self._head = head
        self._total = Usage(0, 0)
        self._num_open = len(generations)

    def feed(self, sink: Sink) -> None:
        self._sink = sink
        for index, generation in enumerate(self._generations):
            choice = _Choice(index, ChoiceText(self._body.stop_sequences), self)
            generation.listen(choice)

    def chunk(self, index: int, text: str, finish_reason: str = "") -> ChunkJson:
        """One piece of one choice."""
        return {
            **self._head.json(),
            "choices": [completion_choice(index, text, finish_reason)],
        }

    def send(self, json: bytes) -> None:
        """Frame a chunk."""
        self._sink.send(event(json))

    def finish(self, index: int, piece: Piece) -> None:
        """Send the last piece of one choice, and the end after that of the last choice."""
        chunk = self.chunk(index, piece.text, piece.finish_reason or "")
        usage = usage_of(self._generations[index], piece)
        self._total += usage
        if self._body.includes_usage:
            self.send(orjson.dumps(chunk))
        else:
            self.send(_final_json({**chunk, "usage": usage.json()}))
        self._num_open -= 1
        if self._num_open:
            return
        if self._body.includes_usage:
            total: CompletionFinalJson = {
                **self._head.json(),
                "choices": [],
                "usage": self._total.json(),
            }
            self._sink.end(event(_final_json(total)), DONE)
        else:
            self._sink.end(DONE)

    def fail(self, error: Exception) -> None:
        """End the stream for all."""
        self._sink.fail(error)


class _Choice:
    """Reads the tokens of one prompt."""

    def __init__(self, index: int, text: ChoiceText, chunks: _Chunks) -> None:
        self._index = index
        self._text = text
        self._chunks = chunks
        self._template = ChunkTemplate(lambda text: chunks.chunk(index, text))
        self._finished = False

    def token(self, token: TokenEvent) -> None:
        if self._finished:
            return
        piece = self._text.push(token)
        if piece.finish_reason is None:
            self._chunks.send(self._template.fill(piece.text))
        else:
            self._finished = True
            self._chunks.finish(self._index, piece)

    def fail(self, error: Exception) -> None:
        if not self._finished:
            self._chunks.fail(error)


def _final_json(chunk: CompletionFinalJson) -> bytes:
    return orjson.dumps(chunk)
