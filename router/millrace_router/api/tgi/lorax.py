"""The fields that LoRAX's answers have in addition to TGI's: its client refuses answers without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from millrace_router.api.body.adapters import adapter_of_fields, lorax_headers
from millrace_router.api.tgi.answers import (
    AlternativeTokenJson,
    SequenceJson,
    StreamDetailsJson,
    TokenJson,
)
from millrace_router.api.tgi.request import GenerateParameters
from millrace_router.engine.generation import Collected
from millrace_router.request.adapter import AdapterReference
from millrace_router.request.float32 import shortest
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.token_stream import TokenEvent
from millrace_router.server.headers import milliseconds, names_of
from millrace_router.server.services import SERVICES


def adapter_of(request: web.Request, parameters: GenerateParameters) -> AdapterReference | None:
    """Return the adapter of a request; None for the base model. Raises RouterError."""
    return adapter_of_fields(
        request,
        adapter_id=parameters.adapter_id,
        merged=parameters.merged_adapters,
        lora_path=parameters.lora_path,
        source=parameters.adapter_source,
        token=parameters.api_token,
    )


def headers_of(request: web.Request, parameters: GenerateParameters) -> dict[str, str]:
    """Return LoRAX's headers if the request has one of its fields."""
    if not parameters.is_lorax:
        return {}
    return lorax_headers(request.app[SERVICES], adapter_of(request, parameters))


async def rendered(
    request: web.Request, generation_request: GenerationRequest, parameters: GenerateParameters
) -> GenerationRequest:
    """Return the request with the images of its text, and with the text as a chat's only turn if the client wants that.

    Raises RouterError.
    """
    services, text = request.app[SERVICES], generation_request.text
    images = services.images
    content, sources = images.parts_of(text)
    prepared = await images.prepare(sources, generation_request.cache_salt) if sources else ()
    if parameters.apply_chat_template:
        turn = {"role": "user", "content": content if prepared else text}
        now = names_of(request).created
        prompt = await services.template.render_async([turn], add_generation_prompt=True, now=now)
        prompt = images.expanded(prompt, prepared)
        return replace(
            generation_request, prompt=prompt, images=prepared, adds_special_tokens=False
        )
    if not prepared:
        return generation_request
    prompt = images.joined(content, prepared)
    adds = generation_request.adds_special_tokens and images.adds_special_tokens
    return replace(generation_request, prompt=prompt, images=prepared, adds_special_tokens=adds)


def times_of(collected: Collected, parameters: GenerateParameters) -> dict[str, str]:
    """Return the headers, in milliseconds, that LoRAX adds to a whole answer if the request has one of its fields."""
    if not parameters.is_lorax:
        return {}
    times, usage = collected.times, collected.usage
    first = times.total if times.first_token is None else times.first_token
    num_others = max(usage.completion_tokens - 1, 1)
    return {
        "x-skipped-tokens": "0",
        "x-total-tokens": str(usage.prompt_tokens + usage.completion_tokens),
        "x-time-to-first-token": milliseconds(first),
        "x-time-per-output-token": milliseconds((times.total - first) / num_others),
    }


def complete_sequence(
    sequence: SequenceJson,
    events: Sequence[TokenEvent],
    parameters: GenerateParameters,
    *,
    num_prompt_tokens: int,
) -> None:
    """Add LoRAX's fields to the details of a sequence if the request has a field that only LoRAX has."""
    if not parameters.is_lorax:
        return
    sequence["prompt_tokens"] = num_prompt_tokens
    sequence["skipped_tokens"] = 0
    for token, event in zip(sequence["tokens"], events, strict=True):
        complete_token(token, event, parameters)


def complete_details(details: StreamDetailsJson, parameters: GenerateParameters) -> None:
    """Add LoRAX's fields to the details at the end of a stream if the request has a field that only LoRAX has."""
    if parameters.is_lorax:
        details["prompt_tokens"] = details["input_length"]
        details["skipped_tokens"] = 0


def complete_token(token: TokenJson, event: TokenEvent, parameters: GenerateParameters) -> None:
    """Add LoRAX's fields to a token."""
    token["skipped"] = False
    if parameters.return_k_alternatives:
        token["alternative_tokens"] = [
            AlternativeTokenJson(id=one.id, text=one.text, logprob=shortest(one.logprob))
            for one in event.top_tokens
        ]
