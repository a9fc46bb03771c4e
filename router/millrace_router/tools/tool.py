"""What a client offers to be called, and what it says about calling it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    """JSON Schema of its arguments, which are an object."""
    strict: bool
    """Whether arguments have to match `parameters` even where no call is asked for."""

    def as_json(self) -> dict[str, Any]:
        """Render as chat templates know it: OpenAI's shape, without what is unsaid."""
        said = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **said, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are to be called, and which."""

    kind: Literal["auto", "none", "required", "named"]
    name: str | None = None
    """The one tool to call, if `kind` is `named`."""
    parallel: bool = True
    """Whether there may be several calls; of a named tool there is one in any case, as OpenAI has it."""

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.kind in {"required", "named"}

    @property
    def is_single(self) -> bool:
        """Whether there may be one call at most."""
        return self.kind == "named" or not self.parallel
