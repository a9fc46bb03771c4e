"""What a client offers to be called, and what it says about calling it."""

from __future__ import annotations

import secrets
import string
import uuid
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


_ALPHABET = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Return an id as OpenAI's are."""
    return f"call_{uuid.uuid4().hex[:24]}"


def new_short_call_id() -> str:
    """Return nine letters and digits: the only ids that Mistral's templates take."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call; the first of a call has its id and name, and the pieces of arguments are one JSON object."""

    index: int
    """Which call of the answer, from 0."""
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """Text for the client, and pieces of calls; which of the two came first is not said, as in OpenAI's answers."""

    text: str = ""
    calls: tuple[CallDelta, ...] = ()
