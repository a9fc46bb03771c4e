"""The fields that OpenAI's chat and text completions share."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from millrace_router.api.body.adapters import adapter_of_model, lorax_headers
from millrace_router.api.body.fields import Float32, RequestModel, UInt32
from millrace_router.api.body.grammars import GuidedFields, ResponseFormat
from millrace_router.api.chat.bias import biases_from
from millrace_router.api.chat.sampling import SamplingFields, openai_generation
from millrace_router.api.openai.prompt_logprobs import check_prompt_logprobs
from millrace_router.errors import ValidationError
from millrace_router.request.adapter import AdapterReference
from millrace_router.request.dialect import Dialect
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.limits import Limits
from millrace_router.server.services import Services

LORAX_FIELDS = frozenset({"adapter_source", "api_token"})
"""Fields that LoRAX has and OpenAI lacks."""


class StreamOptions(RequestModel):
    """The contents of a stream besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Not in OpenAI's: whether each chunk has the usage of its choice so far."""


class CommonRequest(SamplingFields, GuidedFields):
    """Fields that both routes have; null means absent throughout."""

    model: str | None = None
    max_tokens: UInt32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    logit_bias: dict[str, Any] | Annotated[list[Any], Field(max_length=0)] | None = None
    """An empty list is allowed, because TGI has lists here, and ignores them."""
    response_format: ResponseFormat | None = None
    typical_p: Float32 | None = None
    """Not in OpenAI's; 1 is no restriction."""
    adapter_source: str | None = None
    """LoRAX's, like the field below: where `model` is, `hub` or `local`."""
    api_token: str | None = Field(default=None, repr=False)
    """The client's own token for the hub."""
    add_special_tokens: bool | None = None
    """vLLM's, like the field below: whether the tokenizer puts its special tokens around the prompt."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """vLLM's: whether log probabilities name a token by its id, `token_id:5`, in place of its text."""
    prompt_logprobs: int | None = None
    """vLLM's: candidates beside the log probability of each token of the prompt."""
    lora_path: str | None = None
    """SGLang's: the name of a registered adapter; an adapter in `model` beats it."""

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of its own for usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the usage of its choice so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def has_token_ids(self) -> bool:
        """Whether the answer has the ids of tokens."""
        return bool(self.return_token_ids)

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return 1 if self.n is None else self.n

    def adapter(self, request: web.Request) -> AdapterReference | None:
        """Return the adapter that the body names; None for the base model. Raises RouterError."""
        return adapter_of_model(
            request,
            self.model,
            lora_path=self.lora_path,
            source=self.adapter_source,
            token=self.api_token,
        )

    def lorax_headers(self, services: Services, adapter: AdapterReference | None) -> dict[str, str]:
        """Return LoRAX's headers for an answer of `adapter` if the request has one of its fields."""
        if LORAX_FIELDS.isdisjoint(self.model_fields_set):
            return {}
        return lorax_headers(services, adapter)

    def check(self, limits: Limits) -> None:
        """Check the fields that TGI ignores; raises RouterError."""
        if not 0 < self.num_choices <= limits.max_n:
            raise ValidationError(f"`n` must be > 0 and <= {limits.max_n}. Given: {self.n}")
        check_prompt_logprobs(self.prompt_logprobs, limits, stream=bool(self.stream))

    def generation(self, dialect: Dialect) -> GenerationRequest:
        """Translate, without a prompt; raises ValidationError."""
        grammar = self.guide(None if self.response_format is None else self.response_format.raw())
        request = replace(
            self.sampling(dialect),
            typical_p=self.typical_p,
            logit_bias=biases_from(self.logit_bias) if isinstance(self.logit_bias, dict) else (),
            grammar=grammar,
            max_new_tokens=self.max_tokens,
            prompt_logprobs=self.prompt_logprobs is not None,
            prompt_top_n_tokens=self.prompt_logprobs or 0,
        )
        return openai_generation(request, dialect)
