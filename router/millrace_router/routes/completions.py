"""OpenAI's text completions: one prompt or a few, and one choice or several of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from aiohttp import web

from millrace_router.access_log import watch
from millrace_router.api.completion import CompletionRequest
from millrace_router.api.completion_answers import completion_choice
from millrace_router.api.completion_json import (
    ChunkJson,
    CompletionCompleteJson,
    CompletionFinalJson,
)
from millrace_router.api.native import GenerateRequest
from millrace_router.api.openai_answers import AnswerHead, ChoiceText, Piece, Usage
from millrace_router.bodies import json_response, read_model
from millrace_router.errors import BatchSizeExceeded
from millrace_router.generation import Generation
from millrace_router.headers import answer_headers, stream_headers, sum_of_times
from millrace_router.recording import Form
from millrace_router.routes.asking import counting_refusals, terms_of
from millrace_router.routes.choices import Choices
from millrace_router.routes.openai_edge import (
    fingerprint,
    model_name,
    pieces_of,
    stream_error,
    usage_of,
)
from millrace_router.services import SERVICES, Services
from millrace_router.sse import respond


async def completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`."""
    services = request.app[SERVICES]
    body = await read_model(request, CompletionRequest)
    with counting_refusals(services.metrics):
        body.check(services.limits)
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
    with ExitStack() as cleanup:
        generations: list[Generation] = []
        for prompt in body.prompts:
            asked = GenerateRequest(inputs=prompt, parameters=parameters)
            samples = await services.infer.start_samples(asked, body.num_samples, terms=terms)
            for sample in samples:
                cleanup.callback(sample.close)
            generations.extend(samples)
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
        choices = Choices(
            _Chunks(body, head),
            [(generation, ChoiceText(body.stop_sequences)) for generation in generations],
            num_samples=body.num_samples,
        )
        return await respond(request, choices.feed, form)


async def _answer(
    services: Services, body: CompletionRequest, generations: list[Generation], head: AnswerHead
) -> web.Response:
    """Choose among each prompt's samples; the tokens of those left out are counted, too."""
    choices: list[CompletionCompleteJson] = []
    usage = Usage(0, 0)
    for first in range(0, len(generations), body.num_samples):
        samples = generations[first : first + body.num_samples]
        texts, used = await _texts(body, samples)
        usage += used
        for text, finish_reason in texts:
            choices.append(completion_choice(len(choices), text, finish_reason))
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


async def _texts(
    body: CompletionRequest, samples: Sequence[Generation]
) -> tuple[list[tuple[str, str]], Usage]:
    """Text and finish reason of one prompt's choices: its samples, or the likeliest of them first.

    They are read one after the other: the events of the others wait in their streams.
    """
    read: list[tuple[float, str, str]] = []
    usage = Usage(0, 0)
    for index, generation in enumerate(samples):
        choice = ChoiceText(body.stop_sequences)
        pieces = [piece async for piece in pieces_of(generation, choice)]
        text = "".join(piece.text for piece in pieces)
        read.append((choice.mean_logprob, text, pieces[-1].finish_reason or ""))
        usage += usage_of(generation, pieces[-1], sample=index)
    if len(read) > body.num_choices:
        read.sort(key=lambda one: one[0], reverse=True)
    return [(text, reason) for _, text, reason in read[: body.num_choices]], usage


class _Chunks:
    """Chunks of a completion.

    Usage comes with each choice's last chunk as in TGI, or for all of them in a chunk of its own if that is asked for.
    """

    def __init__(self, body: CompletionRequest, head: AnswerHead) -> None:
        self._body = body
        self._head = head

    def chunk(self, index: int, piece: Piece) -> ChunkJson:
        choice = completion_choice(index, piece.text, piece.finish_reason or "")
        return {**self._head.json(), "choices": [choice]}

    def last_chunk(self, index: int, piece: Piece, usage: Usage) -> ChunkJson | CompletionFinalJson:
        chunk = self.chunk(index, piece)
        if self._body.includes_usage:
            return chunk
        final: CompletionFinalJson = {**chunk, "usage": usage.json()}
        return final

    def usage_chunk(self, usage: Usage) -> CompletionFinalJson | None:
        if not self._body.includes_usage:
            return None
        return {**self._head.json(), "choices": [], "usage": usage.json()}
