"""The work of a request for scores of pairs of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from millrace_router.api.pooling.requests import RerankRequest, ScoreRequest
from millrace_router.api.pooling.run import PoolingRun
from millrace_router.api.pooling.start import asked_of, longest_prompt
from millrace_router.api.pooling.vectors import raw_score
from millrace_router.engine.generation import Generation
from millrace_router.errors import ValidationError
from millrace_router.pooling.prompts import pair_tokens
from millrace_router.request.adapter import AdapterReference
from millrace_router.request.request import SchedulingParameters
from millrace_router.request.scheduling import DEFAULT_SCHEDULING
from millrace_router.server.services import Services

Pair = tuple[str, str]
"""A query and a document."""


async def score_run(
    services: Services,
    body: RerankRequest | ScoreRequest,
    pairs: Sequence[Pair],
    *,
    adapter: AdapterReference | None,
    scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
    on_start: Callable[[Generation], None] = lambda _: None,
) -> PoolingRun[float]:
    """Check a body for a server that scores, and return its work: the log-odds of each pair; raises RouterError."""
    if not all(all(pair) for pair in pairs):
        raise ValidationError("queries and documents cannot be empty")
    truncation = body.truncation(longest_prompt(services.limits))
    asked = asked_of(
        body,
        services.pooling.score_pooling,
        prompt_name="documents",
        adapter=adapter,
        scheduling=scheduling,
    )
    template = services.pooling.template
    assert template is not None
    instruction = body.instruction
    if instruction is None:
        instruction = services.pooling.files.default_prompt or None
    around = {
        query: await template.around_document(query, instruction)
        for query in dict.fromkeys(query for query, _ in pairs)
    }
    return PoolingRun(
        services=services,
        asked=asked,
        prompts=[
            partial(pair_tokens, services.tokenizer, around[query], document, truncation)
            for query, document in pairs
        ],
        render=raw_score,
        on_start=on_start,
    )
