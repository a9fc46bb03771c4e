"""A request of the cases: a prompt with known tokens and the parameters of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

GENERATE = "/generate_stream"
COMPLETIONS = "/v1/completions"
"""Supports logit biases and prompt log probabilities, which TGI's streams do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, whose last `truncate` tokens are `input_ids`; `parameters` are the route's."""

    text: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    parameters: Mapping[str, Any]
    route: str = GENERATE
    adapter: str | None = None
    """The name of a LoRA adapter; the base model if None."""

    @property
    def is_greedy(self) -> bool:
        """Whether the answer takes the likeliest token, possibly after penalties."""
        if self.route == COMPLETIONS:
            return bool(self.parameters["temperature"] == 0)
        return not self.parameters.get("do_sample", False)

    @property
    def num_tokens(self) -> int:
        """KV positions that it may need."""
        return len(self.input_ids) + self.max_new_tokens

    @property
    def body(self) -> dict[str, Any]:
        """The body of the HTTP request."""
        if self.route == COMPLETIONS:
            return {
                **self.parameters,
                **({} if self.adapter is None else {"model": self.adapter}),
                "prompt": self.input_ids,
                "max_tokens": self.max_new_tokens,
                "stream": True,
            }
        parameters = {
            **self.parameters,
            **({} if self.adapter is None else {"adapter_id": self.adapter}),
            "details": True,
            "max_new_tokens": self.max_new_tokens,
            "truncate": len(self.input_ids),
        }
        return {"inputs": self.text, "parameters": parameters}

    def seeded(self, seed: int) -> Question:
        """The same question with this seed."""
        return replace(self, parameters={**self.parameters, "seed": seed})
