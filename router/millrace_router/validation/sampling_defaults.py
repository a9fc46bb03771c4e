"""Values of a model's own generation_config.json for parameters that a request leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from millrace_proto.sampling import POSITIVE, WARPERS, SamplingPresets, preset
from millrace_router.request.float32 import rounded
from millrace_router.request.generation_request import GenerationRequest

GREEDY_NAMES = frozenset({"repetition_penalty", "max_new_tokens"})
"""Parameters that also apply without sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults(SamplingPresets):
    """Values for parameters that a request leaves out; None leaves them to the server."""

    max_new_tokens: int | None = preset(POSITIVE, kind=(int,))
    """A request that names no limit gets as many as fit, and no more than these."""

    @classmethod
    def of(cls, generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """Read generation_config.json; a value that restricts nothing is None. Raises ValueError."""
        read: dict[str, Any] = {}
        for one in fields(cls):
            value, kind = generation_config.get(one.name), one.metadata["kind"]
            if value is None:
                continue
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if not is_number or value not in one.metadata["allowed"]:
                raise ValueError(
                    f"generation_config.json: `{one.name}` must not be {str(value)[:40]}"
                )
            if value not in one.metadata["neutral"]:
                read[one.name] = value if kind == (int,) else rounded(float(value))
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
            # As a client's temperature of 0: restrictions of sampling are dropped, even the client's own.
            greedy: dict[str, Any] = dict.fromkeys(WARPERS)
            greedy |= {name: filled[name] for name in GREEDY_NAMES & filled.keys()}
            return replace(request, do_sample=False, **greedy)
        return replace(request, **filled) if filled else request

    def most_tokens(self, request: GenerationRequest) -> int | None:
        """Return the most new tokens of a request that names no limit; None for as many as fit."""
        return self.max_new_tokens if "max_new_tokens" in request.left_out else None


NO_DEFAULTS = SamplingDefaults()
NAMES = frozenset(one.name for one in fields(SamplingDefaults))
