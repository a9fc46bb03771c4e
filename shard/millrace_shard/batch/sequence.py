"""A sequence as it joins the batch, with its sampling parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from millrace_shard.batch.pooling.pooling import Pooling
from millrace_shard.errors import StepInvalid
from millrace_shard.sampling.sequence_rules.rules import NO_RULES, SequenceRules

Ids = NDArray[np.int64]
FLOAT32 = np.finfo(np.float32)

PARAMETERS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("typical_p", np.float32),
        ("min_p", np.float32),
        ("top_n_sigma", np.float32),
        ("xtc_probability", np.float32),
        ("xtc_threshold", np.float32),
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("openai_frequency_penalty", np.float32),
        ("top_k", np.int64),
        ("do_sample", np.bool_),
        ("seed", np.uint64),
        ("top_n_tokens", np.int64),
        ("min_new_tokens", np.int64),
        ("num_prompt", np.int64),
        ("watermark", np.bool_),
        ("is_biased", np.bool_),
        ("has_rules", np.bool_),
        ("is_guided", np.bool_),
    ],
    align=True,
)
"""The sampling parameters of a sequence as a row; `num_prompt` is the position of its first generated token."""


class GrammarKind(Enum):
    """The language of a grammar."""

    JSON_SCHEMA = auto()
    REGEX = auto()
    LARK = auto()


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole generated text of a sequence has to match."""

    kind: GrammarKind
    source: str


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
    presence_penalty: float = 0.0
    openai_frequency_penalty: float = 0.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0
    watermark: bool = False
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, number added to its score); the ids are distinct."""
    rules: SequenceRules = NO_RULES

    def check(self) -> None:
        """Raise StepInvalid for values without a meaning."""
        positive = (self.temperature, self.repetition_penalty, self.top_p, self.typical_p)
        if not all(value > 0 and math.isfinite(value) for value in positive):
            raise StepInvalid(
                "temperature, repetition_penalty, top_p and typical_p have to be positive"
            )
        penalties = (self.frequency_penalty, self.presence_penalty, self.openai_frequency_penalty)
        if not all(math.isfinite(value) for value in penalties):
            raise StepInvalid("penalties have to be finite")
        if not 0 <= self.min_p <= 1:
            raise StepInvalid("min_p has to be between 0 and 1")
        if not (0 <= self.top_n_sigma < math.inf and 0 <= self.xtc_probability <= 1):
            raise StepInvalid("top_n_sigma has to be finite, and xtc_probability at most 1")
        if not self.rules.is_valid:
            raise StepInvalid("bad words need tokens, and DRY's numbers have to be finite")
        if not all(math.isfinite(value) for _, value in self.bias):
            raise StepInvalid("biases have to be finite")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """A sequence as it joins the batch; the fields are those of the message `Sequence`."""

    slot: int
    request_id: int
    input_ids: Ids
    generated_tokens: int = 0
    cached_tokens: int = 0
    parameters: SamplingParameters = field(default_factory=SamplingParameters)
    top_n_tokens: int = 0
    prefill_logprobs: bool = False
    prefill_top_n_tokens: int = 0
    min_new_tokens: int = 0
    grammar: Grammar | None = None
    close_within: int = 0
    """Generated tokens within which the text of `grammar` is closed; 0: never."""
    adapter_slot: int = 0
    """0: no adapter."""
    pooling: Pooling | None = None
    """None: the sequence yields tokens."""

    @property
    def num_inputs(self) -> int:
        """Tokens to compute before the first sample."""
        return len(self.input_ids)

    def check(self, *, vocab_size: int, max_tokens: int, block_size: int) -> None:
        """Raise StepInvalid unless the sequence is consistent and within the limits."""
        if not 0 < self.num_inputs <= max_tokens:
            raise StepInvalid(
                f"request {self.request_id} has {self.num_inputs} tokens; 1 to {max_tokens} fit"
            )
        if self.input_ids.min() < 0 or self.input_ids.max() >= vocab_size:
            raise StepInvalid(
                f"request {self.request_id} has token ids beyond the vocabulary of {vocab_size}"
            )
        if not 0 <= self.cached_tokens < self.num_inputs:
            raise StepInvalid(f"request {self.request_id} leaves no token to compute")
        if self.cached_tokens % block_size:
            raise StepInvalid(
                f"request {self.request_id}: {self.cached_tokens} cached tokens do not fill blocks"
            )
        if not 0 <= self.generated_tokens < self.num_inputs:
            raise StepInvalid(f"request {self.request_id} has no prompt")
        if any(not 0 <= id_ < vocab_size for id_, _ in self.parameters.bias):
            raise StepInvalid(f"request {self.request_id} biases ids beyond {vocab_size}")
        if any(not 0 <= id_ < vocab_size for id_ in self.parameters.rules.ids()):
            raise StepInvalid(f"request {self.request_id} has rules for ids beyond {vocab_size}")
        if self.pooling and any(not 0 <= id_ < vocab_size for id_ in self.pooling.logit_ids):
            raise StepInvalid(f"request {self.request_id} asks for logits beyond {vocab_size}")
        self.parameters.check()

    def columns(self) -> NDArray[np.void]:
        """A row of PARAMETERS, an array without dimensions."""
        p = self.parameters
        row: NDArray[np.void] = np.zeros((), dtype=PARAMETERS)
        # As float32, a smaller value would be 0 and a larger one infinite, and both turn some scores into NaN.
        row["temperature"] = np.clip(p.temperature, FLOAT32.tiny, FLOAT32.max)
        row["top_p"] = min(p.top_p, 1.0)
        row["typical_p"] = min(p.typical_p, 1.0)
        row["repetition_penalty"] = np.clip(p.repetition_penalty, FLOAT32.tiny, FLOAT32.max)
        row["frequency_penalty"] = np.clip(p.frequency_penalty, FLOAT32.min, FLOAT32.max)
        row["presence_penalty"] = np.clip(p.presence_penalty, FLOAT32.min, FLOAT32.max)
        row["openai_frequency_penalty"] = np.clip(
            p.openai_frequency_penalty, FLOAT32.min, FLOAT32.max
        )
        row["top_k"] = p.top_k
        row["do_sample"] = p.do_sample
        row["seed"] = p.seed
        row["top_n_tokens"] = self.top_n_tokens
        row["min_new_tokens"] = self.min_new_tokens
        row["min_p"] = p.min_p
        row["top_n_sigma"] = p.top_n_sigma
        row["xtc_probability"] = p.xtc_probability
        row["xtc_threshold"] = p.xtc_threshold
        row["watermark"] = p.watermark
        row["is_biased"] = bool(p.bias)
        row["has_rules"] = bool(p.rules)
        row["is_guided"] = self.grammar is not None
        row["num_prompt"] = self.num_inputs - self.generated_tokens
        return row
