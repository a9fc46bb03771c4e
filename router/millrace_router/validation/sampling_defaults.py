"""What a model's own generation_config.json says about parameters that a request leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from millrace_router.request.float32 import rounded
from millrace_router.request.generation_request import GenerationRequest

GREEDY_NAMES = frozenset({"repetition_penalty", "max_new_tokens"})
"""Parameters that also apply without sampling."""
WARPERS = (
    *("temperature", "top_k", "top_p", "typical_p", "min_p", "top_n_sigma", "xtc_probability"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values for parameters that a request leaves out; None leaves them to the server."""

    temperature: float | None = None
    """0 stands for greedy decoding."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    """A request without a limit of its own gets as many as fit, and no more than these."""

    @classmethod
    def of(cls, generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """Read generation_config.json; a value that restricts nothing is None. Raises ValueError."""
        read: dict[str, Any] = {}
        for name, (kind, is_valid, neutral) in _RULES.items():
            value = generation_config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kind) or not is_valid(value):
                raise ValueError(f"generation_config.json: `{name}` must not be {str(value)[:40]}")
            if value not in neutral:
                read[name] = rounded(float(value)) if kind is not int else value
        return cls(**read)

    def given(self) -> dict[str, float]:
        """Return the values that are set, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def fill(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with values for what it left out, except `max_new_tokens`, which the prompt bounds."""
        filled: dict[str, Any] = {
            name: value
            for name, value in self.given().items()
            if name in request.left_out and name != "max_new_tokens"
        }
        if filled.get("temperature") == 0:
            # As a client's temperature of 0: restrictions of sampling have no meaning, not even the client's own.
            greedy: dict[str, Any] = dict.fromkeys(WARPERS)
            greedy |= {name: filled[name] for name in GREEDY_NAMES & filled.keys()}
            return replace(request, do_sample=False, **greedy)
        return replace(request, **filled) if filled else request

    def most_tokens(self, request: GenerationRequest) -> int | None:
        """Return the most new tokens of a request that has no limit of its own; None for as many as fit."""
        return self.max_new_tokens if "max_new_tokens" in request.left_out else None


_Rule = tuple[type[int] | tuple[type[int], type[float]], Callable[[Any], bool], tuple[float, ...]]
_NUMBER = (int, float)
_RULES: dict[str, _Rule] = {
    "temperature": (_NUMBER, lambda value: value >= 0, (1,)),
    "top_k": (int, lambda value: value >= -1, (0, -1)),
    "top_p": (_NUMBER, lambda value: 0 < value <= 1, (1,)),
    "min_p": (_NUMBER, lambda value: 0 <= value <= 1, (0,)),
    "repetition_penalty": (_NUMBER, lambda value: value > 0, (1,)),
    "max_new_tokens": (int, lambda value: value > 0, ()),
}
"""For each parameter its type, its range, and its neutral values."""
NO_DEFAULTS = SamplingDefaults()
NAMES = frozenset(_RULES)
