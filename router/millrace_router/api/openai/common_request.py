"""What OpenAI's chat and text completions have in common, and what it means in TGI's parameters."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field

from millrace_router.api.openai.bias import biases_from
from millrace_router.errors import ValidationError
from millrace_router.request.fields import UINT64_MAX, Float32, Int32, RequestModel, UInt32
from millrace_router.request.grammar import ResponseFormat, check_as_tgi, grammar_of
from millrace_router.request.limits import Limits
from millrace_router.request.parameters import OpenAIParameters
from millrace_router.validation.validator import check_sampling

Seed = Annotated[int, Field(ge=-(2**63), le=UINT64_MAX)]
MAX_PENALTY = 2.0
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which only the first mistake is looked for: a million of them would take seconds to collect."""


class StreamOptions(RequestModel):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Not in OpenAI's: whether each chunk tells the usage of its choice so far."""


class CommonRequest(RequestModel):
    """Fields that both routes have; null means absent throughout."""

    model: str | None = None
    max_tokens: UInt32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    stop: str | Items[str] | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    frequency_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    n: int | None = None
    logit_bias: dict[str, Any] | Annotated[list[Any], Field(max_length=0)] | None = None
    """An empty list is taken, too: TGI has lists here, and ignores them."""
    response_format: ResponseFormat | None = None
    repetition_penalty: Float32 | None = None
    """Not in OpenAI's, like everything that follows."""
    top_k: Int32 | None = None
    """0 and -1 are no restriction."""
    typical_p: Float32 | None = None
    """1 is no restriction."""
    min_p: Float32 | None = None
    """0 is no restriction."""
    ignore_eos: bool | None = None
    min_tokens: UInt32 | None = None
    """How many tokens come at least: end-of-sequence tokens are not drawn before."""
    priority: int | None = None
    """How much sooner than others; beats the header `x-priority`."""

    @property
    def stop_sequences(self) -> list[str]:
        """Stop strings; an empty one stops nothing."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of its own for usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def tells_usage_always(self) -> bool:
        """Whether each chunk of a stream has the usage of its choice so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return 1 if self.n is None else self.n

    def check(self, limits: Limits) -> None:
        """Check what only these routes have, and refuse what would be ignored in silence; raises RouterError."""
        if not 0 < self.num_choices <= limits.max_n:
            raise ValidationError(f"`n` must be > 0 and <= {limits.max_n}. Given: {self.n}")
        for name in ("frequency_penalty", "presence_penalty"):
            penalty = getattr(self, name)
            if penalty is not None and not -MAX_PENALTY <= penalty <= MAX_PENALTY:
                raise ValidationError(f"`{name}` must be >= -2.0 and <= 2.0")
        if self.temperature == 0:
            # What chooses among several tokens is left out then; a mistake in it is one all the same.
            drawn = self.model_copy(update={"temperature": None})
            check_sampling(drawn.parameters(strict_tgi=limits.strict_tgi))
        grammar = grammar_of(self.response_format)
        if limits.strict_tgi and grammar is not None:
            check_as_tgi(grammar)

    def parameters(
        self, *, top_n_tokens: int | None = None, strict_tgi: bool = False
    ) -> OpenAIParameters:
        """Translate: temperature 0 is greedy, anything else samples; raises ValidationError.

        With `strict_tgi`, the penalties are those that TGI makes of OpenAI's, and a `top_p` of 1 is left to be refused.
        """
        greedy = self.temperature == 0
        is_off = greedy or (self.top_p == 1 and not strict_tgi)
        return OpenAIParameters(
            temperature=None if greedy else self.temperature,
            top_p=None if is_off else self.top_p,
            top_k=None if greedy or self.top_k in {-1, 0} else self.top_k,
            typical_p=None if greedy or self.typical_p == 1 else self.typical_p,
            min_p=None if greedy else self.min_p,
            do_sample=not greedy,
            **(self._penalties_of_tgi() if strict_tgi else self._penalties()),
            logit_bias=biases_from(self.logit_bias) if isinstance(self.logit_bias, dict) else (),
            grammar=grammar_of(self.response_format),
            max_new_tokens=self.max_tokens,
            min_new_tokens=self.min_tokens,
            stop=self.stop_sequences,
            seed=None if self.seed is None else self.seed & UINT64_MAX,
            top_n_tokens=top_n_tokens,
            ignore_eos=bool(self.ignore_eos),
            priority=self.priority,
            details=True,
        )

    def _penalties(self) -> dict[str, Any]:
        return {
            "repetition_penalty": self.repetition_penalty,
            "openai_frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": self.presence_penalty or 0.0,
        }

    def _penalties_of_tgi(self) -> dict[str, Any]:
        presence = self.presence_penalty
        return {
            "repetition_penalty": self.repetition_penalty if presence is None else presence + 2.0,
            "frequency_penalty": self.frequency_penalty,
        }
