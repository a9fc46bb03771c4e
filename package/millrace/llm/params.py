"""How an answer is sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters with OpenAI's names and meanings; None leaves the choice to the server."""

    n: int = 1
    """Answers to each prompt."""
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    """0 takes the likeliest token."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    ignore_eos: bool | None = None
    response_format: Mapping[str, Any] | None = None
    """A JSON Schema, a regular expression or a grammar, as on OpenAI's routes."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request's body."""

    def body(self) -> dict[str, Any]:
        """The fields of a request's body that are set."""
        named = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in ("extra", "n")
        }
        given = {name: value for name, value in named.items() if value is not None}
        stop = given.get("stop")
        if stop is not None and not isinstance(stop, str):
            given["stop"] = list(stop)
        return {"n": self.n, **given, **self.extra}
