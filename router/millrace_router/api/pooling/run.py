"""The work of a request for embeddings or scores.

Several prompts run at a time, and no more than leaves permits to others.
"""

from __future__ import annotations

import asyncio
import base64
import math
import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import orjson

from millrace_router.api.body.fields import Prompt, prompts_of
from millrace_router.api.pooling.protocol import (
    MOST_PROMPTS,
    EmbeddingFields,
    PoolingFields,
    PoolingUsageJson,
    RerankRequest,
    ScoreRequest,
)
from millrace_router.engine.generation import Generation, Usage
from millrace_router.errors import Overloaded, ValidationError
from millrace_router.pooling.prompts import Ids, pair_tokens, tokens_of
from millrace_router.request.adapter import AdapterReference
from millrace_router.request.generation_request import FieldNames, GenerationRequest
from millrace_router.request.limits import Limits
from millrace_router.request.request import Pooling, SchedulingParameters
from millrace_router.request.scheduling import DEFAULT_SCHEDULING
from millrace_router.request.token_stream import read_tokens
from millrace_router.server.services import Services
from millrace_router.text.tokenizer import TokenizerError

Result = TypeVar("Result")
Pair = tuple[str, str]
"""A query and a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingForm:
    """Makes an embedding of a hidden state, and writes it."""

    normalizes: bool
    dimensions: int | None
    is_base64: bool = False

    def embedding(self, state: Sequence[float]) -> list[float]:
        """Cut a hidden state to `dimensions` and normalize it to length 1 if requested; zeros stay zeros."""
        values = list(state if self.dimensions is None else state[: self.dimensions])
        length = math.hypot(*values) if self.normalizes else 0.0
        return [value / length for value in values] if length else values

    def render(self, state: Sequence[float]) -> orjson.Fragment:
        """Write the embedding as JSON at once: numbers as objects would take ten times the memory."""
        values = self.embedding(state)
        if not self.is_base64:
            return orjson.Fragment(orjson.dumps(values))
        words = array("f", values)
        if sys.byteorder == "big":
            words.byteswap()
        return orjson.Fragment(orjson.dumps(base64.b64encode(words.tobytes()).decode()))


def raw_score(logits: Sequence[float]) -> float:
    """Return the logit of the first token, minus the second one's if there are two."""
    return logits[0] - logits[1] if len(logits) > 1 else logits[0]


def sigmoid(value: float) -> float:
    """The probability whose log-odds are `value`."""
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    odds = math.exp(value)
    return odds / (1 + odds)


@dataclass(frozen=True, slots=True)
class Pooled(Generic[Result]):
    """The results of all prompts, in their order."""

    results: list[Result]
    generations: list[Generation]
    usage: Usage


@dataclass(slots=True, kw_only=True)
class PoolingRun(Generic[Result]):
    """The work of one request. A prompt is tokenized by its function on the tokenizer's threads."""

    services: Services
    base_request: GenerationRequest
    """The request of every prompt, without the prompt."""
    prompts: Sequence[Callable[[], Ids]]
    render: Callable[[Sequence[float]], Result]
    on_start: Callable[[Generation], None] = lambda _: None
    """Gets each generation once it has started."""
    _waiting: deque[int] = field(default_factory=deque)
    _num_workers: int = 0
    _done: dict[int, tuple[Generation, Result]] = field(default_factory=dict)

    async def finish(self) -> Pooled[Result]:
        """Run all prompts; raises the first RouterError, which ends the others."""
        self._waiting.extend(range(len(self.prompts)))
        services = self.services
        # At least one worker requests a permit, and is refused if none is free.
        num_workers = max(1, min(len(self.prompts), services.infer.permits.free // 2))
        self._num_workers = num_workers
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(num_workers):
                    group.create_task(self._work(services))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        done = [self._done[index] for index in range(len(self.prompts))]
        generations = [generation for generation, _ in done]
        usage = sum((one.usage(0) for one in generations), Usage())
        return Pooled([result for _, result in done], generations, usage)

    async def _work(self, services: Services) -> None:
        """Run prompts one after the other, until none is left."""
        following = await self._next(services)
        while following is not None:
            index, ids = following
            try:
                generation = await services.infer.start(replace(self.base_request, prompt=ids))
            except Overloaded:
                self._num_workers -= 1
                if not self._num_workers:
                    raise
                # Others of this request go on, and take the prompt when they are done.
                self._waiting.append(index)
                return
            async with generation:
                self.on_start(generation)
                await read_tokens(generation, lambda _: True)
                self._done[index] = generation, self.render(generation.take_pooled())
                following = await self._next(services)
            # The permit goes back here, and `start` takes it again before any other task runs.
        self._num_workers -= 1

    async def _next(self, services: Services) -> tuple[int, Ids] | None:
        if not self._waiting:
            return None
        index = self._waiting.popleft()
        try:
            return index, await services.tokenizer.in_thread(self.prompts[index])
        except TokenizerError as error:
            raise ValidationError(f"tokenizer error {error}") from error


def text_or_ids(prompt: str | Ids, tokenize: Callable[[str], Ids]) -> Callable[[], Ids]:
    """Return the function of a prompt, which is a text or token ids already."""
    return partial(tokenize, prompt) if isinstance(prompt, str) else lambda: prompt


def longest_prompt(limits: Limits) -> int:
    """Return the most tokens of a prompt that is pooled."""
    return min(limits.max_input_tokens, limits.max_total_tokens - 1)


def pooling_request(
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
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """The parts of a body whose names differ between OpenAI's and TEI's routes."""

    prompt: Prompt
    name: str
    """The field of the prompt."""
    adapter: AdapterReference | None


def embedding_run(
    services: Services,
    body: EmbeddingFields,
    source: PoolingInput,
    render: Callable[[EmbeddingForm], Callable[[Sequence[float]], Result]],
    *,
    specials: bool = True,
    scheduling: SchedulingParameters = DEFAULT_SCHEDULING,
    on_start: Callable[[Generation], None] = lambda _: None,
) -> PoolingRun[Result]:
    """Check a body for a server that embeds, and return its work; raises ValidationError.

    `render` makes the function that writes a hidden state in a form.
    """
    prompts = _prompts(services, body, source)
    truncation = body.truncation(longest_prompt(services.limits))
    base_request = pooling_request(
        body, Pooling(), prompt_name=source.name, adapter=source.adapter, scheduling=scheduling
    )
    tokenize = partial(tokens_of, services.tokenizer, truncation=truncation, specials=specials)
    return PoolingRun(
        services=services,
        base_request=base_request,
        prompts=[text_or_ids(prompt, tokenize) for prompt in prompts],
        render=render(_form(services, body)),
        on_start=on_start,
    )


def _prompts(
    services: Services, body: EmbeddingFields, source: PoolingInput
) -> list[str | tuple[int, ...]]:
    """Return the prompts, with the text that belongs before texts; raises ValidationError."""
    prompts = prompts_of(source.prompt)
    if len(prompts) > MOST_PROMPTS:
        raise ValidationError(
            f"`{source.name}` must have at most {MOST_PROMPTS} prompts. Given: {len(prompts)}"
        )
    if "" in prompts:
        raise ValidationError(f"`{source.name}` cannot be empty")
    files = services.pooling.files
    before = files.default_prompt
    if body.prompt_name is not None:
        if body.prompt_name not in files.prompts:
            names = ", ".join(sorted(files.prompts)) or "none"
            raise ValidationError(f"`prompt_name` must be one of the model's prompts: {names}")
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
    base_request = pooling_request(
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
        base_request=base_request,
        prompts=[
            partial(pair_tokens, services.tokenizer, around[query], document, truncation)
            for query, document in pairs
        ],
        render=raw_score,
        on_start=on_start,
    )
