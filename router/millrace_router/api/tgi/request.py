"""Bodies of TGI's routes as strict models."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field

from millrace_router.api.body.adapters import MergedAdapters
from millrace_router.api.body.fields import (
    Float32,
    Int32,
    NullIs,
    Place,
    RequestModel,
    Switch,
    UInt32,
    UInt64,
)
from millrace_router.api.body.grammars import GrammarType, LoraxFormat
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.grammar import RawGrammar

LORAX_FIELDS = frozenset(
    {
        "adapter_source",
        "merged_adapters",
        "api_token",
        "return_k_alternatives",
        "response_format",
        "apply_chat_template",
    }
)
"""Fields that LoRAX has and TGI lacks."""


class GenerateParameters(RequestModel):
    """How to generate. None means that the client left the choice to the server; null is the default everywhere."""

    place = Place.PARAMETERS

    best_of: UInt64 | None = None
    temperature: Float32 | None = None
    repetition_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None
    top_k: Int32 | None = None
    top_p: Float32 | None = None
    typical_p: Float32 | None = None
    do_sample: Switch = False
    max_new_tokens: UInt32 | None = None
    return_full_text: bool | None = None
    stop: Annotated[list[str], Field(fail_fast=True), NullIs(list)] = Field(default_factory=list)
    truncate: UInt64 | None = None
    watermark: Switch = False
    details: Switch = False
    decoder_input_details: Switch = False
    seed: UInt64 | None = None
    top_n_tokens: UInt32 | None = None
    grammar: GrammarType | None = None
    adapter_id: str | None = None
    """The adapter of this request; none, as "", means the default one, or the base model."""
    adapter_source: str | None = None
    """LoRAX's, like the five fields below: `hub` or `local`."""
    merged_adapters: MergedAdapters | None = None
    api_token: str | None = Field(default=None, repr=False)
    """The client's own token for the hub."""
    return_k_alternatives: UInt32 | None = None
    """The same as `top_n_tokens`, in LoRAX's form."""
    response_format: LoraxFormat | None = None
    """The same as `grammar`, for JSON."""
    apply_chat_template: bool | None = None
    """Whether the text is the one turn of a chat, which the chat template renders."""
    lora_path: str | None = None
    """SGLang's: the name of a registered adapter."""
    priority: int | None = None
    """Not in TGI: requests of a higher priority are served first; beats the header `x-priority`."""
    ignore_eos: Switch = Field(
        default=False, validation_alias=AliasChoices("ignore_eos", "ignore_eos_token")
    )
    """Not in TGI: generate `max_new_tokens` tokens even after an end-of-sequence token, for benchmarks."""
    min_new_tokens: UInt32 | None = None
    """Not in TGI: tokens before which no end-of-sequence token is drawn."""
    min_p: Float32 | None = None
    """Not in TGI: tokens less likely than this share of the likeliest one are not drawn."""

    @property
    def is_lorax(self) -> bool:
        """Whether a client of LoRAX sent them, which reads fields of answers that TGI lacks."""
        return not LORAX_FIELDS.isdisjoint(self.model_fields_set)

    def generation(self, prompt: str) -> GenerationRequest:
        """Return the request to continue `prompt`, without its adapter."""
        return GenerationRequest(
            prompt=prompt,
            truncate=self.truncate,
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            stop=tuple(self.stop),
            ignore_eos=self.ignore_eos,
            best_of=self.best_of,
            do_sample=self.do_sample,
            seed=self.seed,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            typical_p=self.typical_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            watermark=self.watermark,
            grammar=self._grammar(),
            top_n_tokens=self.return_k_alternatives
            if self.top_n_tokens is None
            else self.top_n_tokens,
            decoder_input_details=self.decoder_input_details,
        )

    def _grammar(self) -> RawGrammar | None:
        given = self.grammar or self.response_format
        return None if given is None else given.raw()


def sampling_parameters() -> GenerateParameters:
    """Stand in for absent `parameters`: TGI samples then, but not for an empty object."""
    return GenerateParameters(do_sample=True)


class GenerateRequest(RequestModel):
    """Body of `/generate`, `/generate_stream` and `/tokenize`."""

    place = Place.GENERATE

    inputs: str
    parameters: Annotated[GenerateParameters, NullIs(sampling_parameters)] = Field(
        default_factory=sampling_parameters
    )

    def generation(self) -> GenerationRequest:
        """Translate."""
        return self.parameters.generation(self.inputs)


class CompatGenerateRequest(GenerateRequest):
    """Body of `POST /`."""

    stream: Switch = False
