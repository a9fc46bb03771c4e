"""A request that every case asks: a prompt of known tokens, and how to continue it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Its text, cut to its last `truncate` tokens, which are `input_ids`; `parameters` are the native API's."""

    text: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    parameters: Mapping[str, Any]

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, penalties or not."""
        return not self.parameters.get("do_sample", False)

    @property
    def num_tokens(self) -> int:
        """KV positions it may come to need."""
        return len(self.input_ids) + self.max_new_tokens

    @property
    def body(self) -> dict[str, Any]:
        """For `/generate_stream`."""
        parameters = {
            **self.parameters,
            "details": True,
            "max_new_tokens": self.max_new_tokens,
            "truncate": len(self.input_ids),
        }
        return {"inputs": self.text, "parameters": parameters}
