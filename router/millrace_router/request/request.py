"""A request after validation: token ids, clamped limits, resolved defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from millrace_router.request.adapter import AdapterVersion


class FinishReason(StrEnum):
    """Why a generation ended, in TGI's words."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"  # noqa: S105
    STOP_SEQUENCE = "stop_sequence"


class GrammarKind(StrEnum):
    """The language a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The generated text as a whole matches it."""

    kind: GrammarKind
    source: str
    closes: bool = False
    """Whether the text is closed before the request's last token: JSON in an answer is, and calls of tools are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dry:
    """The DRY penalty: a token that would extend a repeated passage becomes less likely."""

    multiplier: float
    base: float
    allowed_length: int
    """Shorter passages are free."""
    window: int
    """How many of the last tokens are searched; 0 for all."""
    breakers: tuple[int, ...] = ()
    """Tokens that no passage contains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRules:
    """Rules that few sequences have; the defaults are no rules."""

    allowed_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Passages that the generated tokens may not have."""
    dry: Dry | None = None


NO_RULES = SequenceRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """Parameters of the choice of the next token; the defaults are the neutral values of the wire."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    do_sample: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    """TGI's, over prompt and generated tokens."""
    presence_penalty: float = 0.0
    """OpenAI's, over generated tokens."""
    openai_frequency_penalty: float = 0.0
    """OpenAI's `frequency_penalty`, over generated tokens."""
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0
    watermark: bool = False
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its score), each id once."""
    rules: SequenceRules = NO_RULES

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random: the client asked for it, or a warper is active."""
        return (
            self.do_sample
            or self.temperature != 1.0
            or self.top_k != 0
            or self.top_p < 1.0
            or self.typical_p < 1.0
            or self.min_p > 0.0
            or self.top_n_sigma > 0.0
            or self.xtc_probability > 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingParameters:
    """Parameters of the queue, which do not change the generated tokens."""

    priority: int = 0
    """A higher priority is served sooner; -10 to 10."""
    tenant: str = ""
    """The tenant whose share of the tokens the request takes."""
    max_queue_seconds: float | None = None
    """The longest wait in the queue; None for no limit."""


class Task(StrEnum):
    """What a server does with its model."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


@dataclass(frozen=True, slots=True)
class Pooling:
    """The last token of the prompt yields its hidden state, or the logits of some ids; no token is generated."""

    logit_ids: tuple[int, ...] = ()
    """Empty: the hidden state after the last norm."""

    @property
    def task(self) -> Task:
        """The task that the server needs for it."""
        return Task.SCORE if self.logit_ids else Task.EMBED


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A request that passed validation, and is not checked again."""

    input_ids: tuple[int, ...]
    max_new_tokens: int
    """The client's limit, or the part of `max_total_tokens` that the prompt leaves."""
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stop_sequences: tuple[str, ...] = ()
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the answer, also with `ignore_eos`."""
    cache_salt: tuple[str, ...] = ()
    """Part of the keys of its KV blocks."""
    min_new_tokens: int = 0
    top_n_tokens: int = 0
    prefill_logprobs: bool = False
    """Whether the answer has the log probabilities of the prompt's tokens."""
    prompt_top_n_tokens: int = 0
    """Candidates beside each token of the prompt."""
    grammar: Grammar | None = None
    adapter: AdapterVersion | None = None
    """The version that all its tokens are computed with; None for the base model."""
    scheduling: SchedulingParameters = SchedulingParameters()
    pooling: Pooling | None = None
    """None: it generates tokens."""
