"""What the routes for embeddings and scores share: the request beside its prompts, and token counts."""

from __future__ import annotations

from millrace_router.api.pooling.answers import PoolingUsageJson
from millrace_router.api.pooling.requests import PoolingFields
from millrace_router.engine.generation import Usage
from millrace_router.request.adapter import AdapterReference
from millrace_router.request.generation_request import FieldNames, GenerationRequest
from millrace_router.request.limits import Limits
from millrace_router.request.request import Pooling, SchedulingParameters
from millrace_router.request.scheduling import DEFAULT_SCHEDULING


def longest_prompt(limits: Limits) -> int:
    """The most tokens of a prompt that is pooled."""
    return min(limits.max_input_tokens, limits.max_total_tokens - 1)


def asked_of(
    body: PoolingFields,
    pooling: Pooling,
    *,
    prompt_name: str,
    adapter: AdapterReference | None,
    scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
) -> GenerationRequest:
    """Return a request without a prompt, whose field is called `prompt_name`."""
    return GenerationRequest(
        max_new_tokens=1,
        seed=0,
        pooling=pooling,
        scheduling=scheduling,
        adapter=adapter,
        cache_salt=() if body.cache_salt is None else (body.cache_salt, ""),
        names=FieldNames(prompt=prompt_name),
    )


def usage_json(usage: Usage) -> PoolingUsageJson:
    """Render token counts."""
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
