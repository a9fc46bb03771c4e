"""Bodies of TGI's routes as strict models."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field

from millrace_router.api.body.adapters import MergedAdapters
from millrace_router.api.body.fields import (
    FieldScope,
    Float32,
    NullIs,
    RequestModel,
    SamplingModel,
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


class GenerateParameters(SamplingModel):
    """How to generate. None means that the client left the choice to the server; null is the default everywhere."""

    scope = FieldScope.PARAMETERS

    best_of: UInt64 | None = None
    """Draws this many answers, and returns the likeliest; not in streams. Range: 1 to `--max-best-of`. Default: 1."""
    frequency_penalty: Float32 | None = None
    """Lowers the score of a token by its share of the prompt and the answer. Range: -2 to 2; 0 is off. Default: 0."""
    typical_p: Float32 | None = None
    """Draws from the tokens whose information is nearest to the expected one, up to this mass. Range: above 0 and
    below 1. Default: 1, which is off.
    """
    do_sample: Switch = False
    """Whether tokens are drawn, instead of taking the likeliest each time. Range: true or false. Default: false; true
    without `parameters`, or with a field that restricts the draw.
    """
    max_new_tokens: UInt32 | None = None
    """Most tokens of the answer. Range: 1 to what the context leaves, or to `--max-new-tokens-limit`. Default:
    `--default-max-new-tokens`, otherwise what the context leaves.
    """
    return_full_text: bool | None = None
    """Whether the text begins with the prompt. Range: true or false. Default: false; true on `POST /`."""
    stop: Annotated[list[str], Field(fail_fast=True), NullIs(list)] = Field(default_factory=list)
    """Texts that end the answer, and are the end of it. Range: up to `--max-stop-sequences` texts. Default: none."""
    truncate: UInt64 | None = None
    """Keeps this many of the prompt's last tokens. Range: 1 to `--max-input-tokens`. Default: all."""
    watermark: Switch = False
    """Whether the answer has a watermark that statistics can find. Range: true or false. Default: false."""
    details: Switch = False
    """Whether the answer has its tokens, the seed and the reason of its end. Range: true or false. Default: false."""
    decoder_input_details: Switch = False
    """Whether the details have the prompt's tokens; needs `--enable-prefill-logprobs`. Range: true or false. Default:
    false.
    """
    seed: UInt64 | None = None
    """Makes the answer repeatable: the same seed and request give the same tokens. Range: 0 to 2^64 - 1. Default:
    random.
    """
    top_n_tokens: UInt32 | None = None
    """Likeliest tokens next to each token of the details. Range: 0 to `--max-top-n-tokens`. Default: 0."""
    grammar: GrammarType | None = None
    """What the answer has to match: a JSON schema, a regular expression or a grammar. Range: an object with `type` and
    `value`. Default: none.
    """
    adapter_id: str | None = None
    """The LoRA adapter of this request. Range: any name. Default: the default one."""
    adapter_source: str | None = None
    """Where the adapter is. Range: `hub` or `local`. Default: `--adapter-source`."""
    merged_adapters: MergedAdapters | None = None
    """Several LoRA adapters, merged for this request. Range: an object with `ids`. Default: none."""
    api_token: str | None = Field(default=None, repr=False)
    """The client's own token for the hub. Range: any text. Default: none."""
    return_k_alternatives: UInt32 | None = None
    """LoRAX's form of `top_n_tokens`. Range: 0 to `--max-top-n-tokens`. Default: 0."""
    response_format: LoraxFormat | None = None
    """LoRAX's form of `grammar`, for JSON. Range: an object with `type`. Default: none."""
    apply_chat_template: bool | None = None
    """Whether `inputs` is the user's turn of a chat, and the chat template makes the prompt. Range: true or false.
    Default: false.
    """
    lora_path: str | None = None
    """The name of a registered adapter, as in SGLang. Range: any name. Default: none."""
    priority: int | None = None
    """Requests of a higher priority are served first. Range: -10 to 10. Default: the header `x-priority`, otherwise 0.
    """
    ignore_eos: Switch = Field(
        default=False, validation_alias=AliasChoices("ignore_eos", "ignore_eos_token")
    )
    """Whether the answer goes on until `max_new_tokens`, even if the model ends it. Range: true or false. Default:
    false.
    """
    min_new_tokens: UInt32 | None = None
    """Tokens before which the model cannot end the answer. Range: 0 to `max_new_tokens`. Default: 0."""

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
            typical_p=self.typical_p,
            frequency_penalty=self.frequency_penalty,
            watermark=self.watermark,
            grammar=self._grammar(),
            top_n_tokens=self.return_k_alternatives
            if self.top_n_tokens is None
            else self.top_n_tokens,
            decoder_input_details=self.decoder_input_details,
            **self.shared_sampling(),
        )

    def _grammar(self) -> RawGrammar | None:
        grammar = self.grammar or self.response_format
        return None if grammar is None else grammar.raw()


def sampling_parameters() -> GenerateParameters:
    """Stand in for absent `parameters`: TGI samples then, but not for an empty object."""
    return GenerateParameters(do_sample=True)


class GenerateRequest(RequestModel):
    """Body of `/generate`, `/generate_stream` and `/tokenize`."""

    scope = FieldScope.GENERATE

    inputs: str
    """The prompt. Range: a text that is not empty. Default: none, it is required."""
    parameters: Annotated[GenerateParameters, NullIs(sampling_parameters)] = Field(
        default_factory=sampling_parameters
    )
    """How to generate. Range: an object. Default: sampling with a temperature of 1."""

    def generation(self) -> GenerationRequest:
        return self.parameters.generation(self.inputs)


class CompatGenerateRequest(GenerateRequest):
    """Body of `POST /`."""

    stream: Switch = False
    """Whether the answer comes in pieces, as events. Range: true or false. Default: false."""
