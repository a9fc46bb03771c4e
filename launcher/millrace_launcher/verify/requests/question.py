"""A request that every case asks: a prompt of known tokens, and how to continue it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

GENERATE = "/generate_stream"
COMPLETIONS = "/v1/completions"
"""Takes a bias for each token, and tells log probabilities of the prompt, which no stream of the native routes does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Its text, cut to its last `truncate` tokens, which are `input_ids`; `parameters` are the route's."""

    text: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    parameters: Mapping[str, Any]
    route: str = GENERATE

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, penalties or not."""
        if self.route == COMPLETIONS:
            return bool(self.parameters["temperature"] == 0)
        return not self.parameters.get("do_sample", False)

    @property
    def num_tokens(self) -> int:
        """KV positions it may come to need."""
        return len(self.input_ids) + self.max_new_tokens

    @property
    def body(self) -> dict[str, Any]:
        """For its route."""
        if self.route == COMPLETIONS:
            return {
                **self.parameters,
                "prompt": self.input_ids,
                "max_tokens": self.max_new_tokens,
                "stream": True,
            }
        parameters = {
            **self.parameters,
            "details": True,
            "max_new_tokens": self.max_new_tokens,
            "truncate": len(self.input_ids),
        }
        return {"inputs": self.text, "parameters": parameters}

    def seeded(self, seed: int) -> Question:
        """The same with this seed."""
        return replace(self, parameters={**self.parameters, "seed": seed})
