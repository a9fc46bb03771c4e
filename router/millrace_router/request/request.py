"""What a request is once it may be trusted: token ids, clamped limits, resolved defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


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
    """What the generated text has to match as a whole."""

    kind: GrammarKind
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How the next token is chosen; the defaults are the neutral values of the wire."""

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
    watermark: bool = False
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its score), each id once."""

    @property
    def samples(self) -> bool:
        """Whether randomness takes part: asked for, or implied by an active warper."""
        return (
            self.do_sample
            or self.temperature != 1.0
            or self.top_k != 0
            or self.top_p < 1.0
            or self.typical_p < 1.0
            or self.min_p > 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingParameters:
    """When a request wants to be served; changes nothing of what is generated."""

    priority: int = 0
    """Higher is sooner; -10 to 10."""
    tenant: str = ""
    """Whose share of the tokens it takes."""
    max_queue_seconds: float | None = None
    """How long it is worth waiting in the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A request that passed validation; nothing after this point checks it again."""

    input_ids: tuple[int, ...]
    max_new_tokens: int
    """Resolved: what was asked, or what is left of max_total_tokens."""
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stop_sequences: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    top_n_tokens: int = 0
    prefill_logprobs: bool = False
    """Whether the log probabilities of the prompt's tokens are to be told."""
    prompt_top_n_tokens: int = 0
    """Candidates beside each of those."""
    grammar: Grammar | None = None
    scheduling: SchedulingParameters = SchedulingParameters()
