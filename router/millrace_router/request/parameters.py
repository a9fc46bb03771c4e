"""Bodies of TGI's routes: what a client may ask for, as strict models."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field

from millrace_router.request.fields import (
    Float32,
    Int32,
    NullIs,
    RequestModel,
    Switch,
    UInt32,
    UInt64,
)
from millrace_router.request.grammar import GrammarType


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
    """Not in TGI: how much sooner than others; beats the header `x-priority`."""
    ignore_eos: Switch = Field(
        default=False, validation_alias=AliasChoices("ignore_eos", "ignore_eos_token")
    )
    """Not in TGI: generate `max_new_tokens` tokens whatever the model says; benchmarks ask for it."""
    min_new_tokens: UInt32 | None = None
    """Not in TGI: tokens before which no end-of-sequence token is drawn."""
    min_p: Float32 | None = None
    """Not in TGI: tokens less likely than this share of the likeliest one are not drawn."""


class OpenAIParameters(GenerateParameters):
    """What only the OpenAI routes can ask for; both penalties are over generated tokens."""

    presence_penalty: Float32 = 0.0
    openai_frequency_penalty: Float32 = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its score), each id once."""
    prompt_logprobs: bool = False
    """Whether the prompt's log probabilities are told, whatever the native routes are allowed."""
    prompt_top_n_tokens: UInt32 = 0
    """Candidates beside each of them."""


def sampling_parameters() -> GenerateParameters:
    """Stand in for absent `parameters`: TGI samples then, but not for an empty object."""
    return GenerateParameters(do_sample=True)


class GenerateRequest(RequestModel):
    """Body of `/generate`, `/generate_stream` and `/tokenize`."""

    inputs: str
    parameters: Annotated[GenerateParameters, NullIs(sampling_parameters)] = Field(
        default_factory=sampling_parameters
    )


class CompatGenerateRequest(GenerateRequest):
    """Body of `POST /`."""

    stream: Switch = False
