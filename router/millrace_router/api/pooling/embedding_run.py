"""The work of a request for embeddings, from the fields of its body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from millrace_router.api.fields import Prompt, prompts_of
from millrace_router.api.pooling.requests import MOST_PROMPTS, EmbeddingFields
from millrace_router.api.pooling.run import PoolingRun, text_or_ids
from millrace_router.api.pooling.start import asked_of, longest_prompt
from millrace_router.api.pooling.vectors import EmbeddingForm
from millrace_router.engine.generation import Generation
from millrace_router.errors import ValidationError
from millrace_router.pooling.prompts import tokens_of
from millrace_router.request.adapter import AdapterReference
from millrace_router.request.request import Pooling, SchedulingParameters
from millrace_router.request.scheduling import DEFAULT_SCHEDULING
from millrace_router.server.services import Services

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Given:
    """The parts of a body that have other names on the other route."""

    prompt: Prompt
    name: str
    """The field of the prompt."""
    adapter: AdapterReference | None


def embedding_run(
    services: Services,
    body: EmbeddingFields,
    given: Given,
    render: Callable[[EmbeddingForm], Callable[[Sequence[float]], Result]],
    *,
    specials: bool = True,
    scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
    on_start: Callable[[Generation], None] = lambda _: None,
) -> PoolingRun[Result]:
    """Check a body for a server that embeds, and return its work; raises ValidationError.

    `render` makes the function that writes a hidden state in a form.
    """
    prompts = _prompts(services, body, given)
    truncation = body.truncation(longest_prompt(services.limits))
    asked = asked_of(
        body, Pooling(), prompt_name=given.name, adapter=given.adapter, scheduling=scheduling
    )
    tokenize = partial(tokens_of, services.tokenizer, truncation=truncation, specials=specials)
    return PoolingRun(
        services=services,
        asked=asked,
        prompts=[text_or_ids(prompt, tokenize) for prompt in prompts],
        render=render(_form(services, body)),
        on_start=on_start,
    )


def _prompts(
    services: Services, body: EmbeddingFields, given: Given
) -> list[str | tuple[int, ...]]:
    """Return the prompts, with the text that belongs before texts; raises ValidationError."""
    prompts = prompts_of(given.prompt)
    if len(prompts) > MOST_PROMPTS:
        raise ValidationError(
            f"`{given.name}` must have at most {MOST_PROMPTS} prompts. Given: {len(prompts)}"
        )
    if "" in prompts:
        raise ValidationError(f"`{given.name}` cannot be empty")
    files = services.pooling.files
    before = files.default_prompt
    if body.prompt_name is not None:
        if body.prompt_name not in files.prompts:
            known = ", ".join(sorted(files.prompts)) or "none"
            raise ValidationError(f"`prompt_name` must be one of the model's prompts: {known}")
        before = files.prompts[body.prompt_name]
    return [before + one if isinstance(one, str) else one for one in prompts]


def _form(services: Services, body: EmbeddingFields) -> EmbeddingForm:
    """Return the form of the embeddings; raises ValidationError."""
    most = services.shard.hidden_size
    if body.dimensions is not None and body.dimensions > most:
        raise ValidationError(
            f"`dimensions` must be <= {most}, the size of the model. Given: {body.dimensions}"
        )
    normalizes = services.pooling.files.normalizes
    if body.normalize is not None:
        normalizes = body.normalize
    return EmbeddingForm(normalizes=normalizes, dimensions=body.dimensions)
