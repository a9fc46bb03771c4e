"""A request of any dialect, not yet validated."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace_proto.sampling import SamplingRequest
from millrace_router.request.adapter import AdapterReference
from millrace_router.request.continuation import Answer
from millrace_router.request.grammar import RawGrammar
from millrace_router.request.images import PreparedImage
from millrace_router.request.request import AnswerText, Grammar, Pooling, SchedulingParameters
from millrace_router.request.scheduling import DEFAULT_SCHEDULING


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """The names that error messages use for the client's fields: TGI's unless a dialect has others."""

    prompt: str = "inputs"
    max_new_tokens: str = "max_new_tokens"
    stop: str = "stop"
    top_n_tokens: str = "top_n_tokens"
    truncate: str = "truncate"
    least_tokens: str = "min_new_tokens"
    most_tokens: str = "max_new_tokens"
    """Name that goes with `least_tokens`: OpenAI's where TGI has its own rule about `max_new_tokens`."""


TGI_NAMES = FieldNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRequest:
    """The DRY penalty as a client requests it; the defaults are llama.cpp's."""

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    window: int = 0
    """How many of the last tokens are searched; 0 for all."""
    breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """Texts; no passage contains a token that has one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(SamplingRequest):
    """One generation as a client requests it; None leaves the choice to the server."""

    prompt: str | tuple[int, ...] = ""
    """Text, or token ids."""
    images: tuple[PreparedImage, ...] = ()
    """The pictures whose placeholders the text has, in this order."""
    adds_special_tokens: bool = True
    """Whether the tokenizer puts its special tokens around a text."""
    truncate: int | None = None
    """How many of the prompt's last tokens are kept; -1, which TGI lacks: as many as fit."""
    max_new_tokens: int | None = None
    is_chat: bool = False
    """Whether it is the next turn of a chat, whose `max_new_tokens` is an upper bound and has a default."""
    min_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    answer_text: AnswerText | None = field(default=None, compare=False)
    """Makes what finds the text in which stop strings count; None: all."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the answer."""
    cache_salt: tuple[str, ...] = ()
    """Prefixes of prompts are shared only among requests with the same one."""
    best_of: int | None = None
    do_sample: bool = False
    seed: int | None = None
    unset_seed: int | None = field(default=None, compare=False)
    """The seed where the client has left it open; None for a random one."""
    openai_frequency_penalty: float = 0.0
    """OpenAI's, over the answer."""
    presence_penalty: float = 0.0
    """OpenAI's, over the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its score), each id once."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; empty: all."""
    bad_words: tuple[str, ...] = ()
    """Texts that the generated text may not have, as their tokens."""
    dry: DryRequest | None = None
    watermark: bool = False
    grammar: RawGrammar | Grammar | None = None
    adapter: AdapterReference | None = None
    """None for the base model."""
    top_n_tokens: int | None = None
    top_n_allowed: int = 0
    """How many the route allows in any case, where the server's limit is lower."""
    decoder_input_details: bool = False
    """Whether the answer has the prompt's log probabilities, if the server allows them."""
    prompt_logprobs: bool = False
    """Whether the answer has the prompt's log probabilities, whatever the server allows."""
    prompt_top_n_tokens: int = 0
    """Other candidates for each of the prompt's tokens."""
    scheduling: SchedulingParameters = DEFAULT_SCHEDULING
    pooling: Pooling | None = None
    """None: it generates tokens."""
    answer: Answer | None = field(default=None, compare=False)
    """The answer that it is part of, if its tokens are recorded."""
    names: FieldNames = TGI_NAMES
    left_out: frozenset[str] = field(default=frozenset(), compare=False)
    """Parameters of `SamplingDefaults` that the client left out, for which the model's own defaults stand."""

    @property
    def text(self) -> str:
        """The prompt if it is a text, else an empty text."""
        return self.prompt if isinstance(self.prompt, str) else ""
