"""Bodies of TGI's routes as strict models."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field

from millrace_router.api.fields import (
    Float32,
    Int32,
    NullIs,
    RequestModel,
    Switch,
    UInt32,
    UInt64,
)
from millrace_router.api.grammars import GrammarType
from millrace_router.request.generation_request import GenerationRequest


class GenerateParameters(RequestModel):
    """How to generate. None means that the client left the choice to the server; null is the default everywhere."""

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

    def generation(self, prompt: str) -> GenerationRequest:
        """Return the request to continue `prompt`."""
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
            grammar=None if self.grammar is None else self.grammar.raw(),
            adapter_id=self.adapter_id,
            top_n_tokens=self.top_n_tokens,
            decoder_input_details=self.decoder_input_details,
        )


def sampling_parameters() -> GenerateParameters:
    """Stand in for absent `parameters`: TGI samples then, but not for an empty object."""
    return GenerateParameters(do_sample=True)


class GenerateRequest(RequestModel):
    """Body of `/generate`, `/generate_stream` and `/tokenize`."""

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
