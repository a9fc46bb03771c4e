"""OpenAI's sampling parameters, and their meaning in a `GenerationRequest`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from millrace_router.api.fields import (
    UINT64_MAX,
    Float32,
    Int32,
    Items,
    RequestModel,
    UInt32,
)
from millrace_router.errors import ValidationError
from millrace_router.request.dialect import Dialect
from millrace_router.request.generation_request import FieldNames, GenerationRequest
from millrace_router.request.grammar import RawGrammar
from millrace_router.validation.rules import check_sampling

Seed = Annotated[int, Field(ge=-(2**63), le=UINT64_MAX)]
MAX_PENALTY = 2.0
OPENAI_NAMES = FieldNames(least_tokens="min_tokens", most_tokens="max_tokens")


class SamplingFields(RequestModel):
    """Fields of chats, text completions and responses; null means absent."""

    seed: Seed | None = None
    stop: str | Items[str] | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    frequency_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    repetition_penalty: Float32 | None = None
    """Not in OpenAI's, like all fields below."""
    top_k: Int32 | None = None
    """0 and -1 are no restriction."""
    min_p: Float32 | None = None
    """0 is no restriction."""
    ignore_eos: bool | None = None
    min_tokens: UInt32 | None = None
    """Tokens before which no end-of-sequence token is drawn."""
    priority: int | None = None
    """Requests of a higher priority are served first; beats the header `x-priority`."""

    @property
    def stop_sequences(self) -> list[str]:
        """Stop strings without empty ones, which stop nothing."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    def sampling(self, dialect: Dialect) -> GenerationRequest:
        """Translate these fields, for `openai_generation` to complete; raises ValidationError."""
        return GenerationRequest(
            seed=None if self.seed is None else self.seed & UINT64_MAX,
            stop=tuple(self.stop_sequences),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            min_new_tokens=self.min_tokens,
            ignore_eos=bool(self.ignore_eos),
            names=OPENAI_NAMES,
            **self._penalties(dialect),
        )

    def _penalties(self, dialect: Dialect) -> dict[str, Any]:
        repetition, presence = self.repetition_penalty, self.presence_penalty
        for name in ("frequency_penalty", "presence_penalty"):
            penalty = getattr(self, name)
            if penalty is not None and not -MAX_PENALTY <= penalty <= MAX_PENALTY:
                raise ValidationError(f"`{name}` must be >= -2.0 and <= 2.0")
        if dialect.has_tgi_penalties:
            return {
                "repetition_penalty": repetition if presence is None else presence + 2.0,
                "frequency_penalty": self.frequency_penalty,
            }
        return {
            "repetition_penalty": repetition,
            "openai_frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": presence or 0.0,
        }


def openai_generation(request: GenerationRequest, dialect: Dialect) -> GenerationRequest:
    """Take temperature 0 as greedy decoding, and neutral values as no restriction.

    Raises:
        ValidationError: a restriction that greedy decoding ignores is out of range, or the dialect refuses the grammar.

    """
    if dialect.needs_properties and isinstance(request.grammar, RawGrammar):
        request.grammar.check_as_tgi()
    has_full_top_p = request.top_p == 1 and not dialect.refuses_full_top_p
    sampled = replace(
        request,
        do_sample=True,
        top_p=None if has_full_top_p else request.top_p,
        top_k=None if request.top_k in {-1, 0} else request.top_k,
        typical_p=None if request.typical_p == 1 else request.typical_p,
    )
    if request.temperature != 0:
        return sampled
    check_sampling(replace(sampled, temperature=None))
    return replace(request, temperature=None, top_p=None, top_k=None, typical_p=None, min_p=None)
