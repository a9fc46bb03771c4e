"""From hidden states to embeddings, and from logits to scores."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import orjson


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingForm:
    """How an embedding is made of a hidden state, and written."""

    normalizes: bool
    dimensions: int | None
    is_base64: bool = False

    def embedding(self, state: Sequence[float]) -> list[float]:
        """Cut a hidden state, and give it the length 1; that of zeros stays 0."""
        values = list(state if self.dimensions is None else state[: self.dimensions])
        length = math.hypot(*values) if self.normalizes else 0.0
        return [value / length for value in values] if length else values

    def render(self, state: Sequence[float]) -> orjson.Fragment:
        """Write the embedding as JSON at once: numbers as objects would take ten times the memory."""
        values = self.embedding(state)
        if not self.is_base64:
            return orjson.Fragment(orjson.dumps(values))
        words = array("f", values)
        if sys.byteorder == "big":
            words.byteswap()
        return orjson.Fragment(orjson.dumps(base64.b64encode(words.tobytes()).decode()))


def raw_score(logits: Sequence[float]) -> float:
    """The logit of the first token, less that of the second if there is one."""
    return logits[0] - logits[1] if len(logits) > 1 else logits[0]


def sigmoid(value: float) -> float:
    """The probability whose log-odds are `value`."""
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    odds = math.exp(value)
    return odds / (1 + odds)
