"""Tools, the choice among them, and parsed calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from millrace_router.errors import ToolError
from millrace_router.request.request import Grammar


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    """JSON Schema of the arguments, which are an object."""
    strict: bool
    """Whether arguments have to match `parameters` even where a call is optional."""
    text: Grammar | None = None
    """What the one parameter, a string, has to match; None if `parameters` define everything."""

    def as_json(self) -> dict[str, Any]:
        """Render in OpenAI's form, which chat templates read; an absent description is left out."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.parameters}
        return {"type": "function", "function": function}


_MAX_LISTED = 20
_MAX_NAME_CHARS = 100


def tool_not_found(name: str, tools: Sequence[str]) -> ToolError:
    """Return the error for a choice of a tool that is not one of `tools`, which are names."""
    listed = ", ".join(one[:_MAX_NAME_CHARS] for one in tools[:_MAX_LISTED])
    more = f" and {len(tools) - _MAX_LISTED} more" if len(tools) > _MAX_LISTED else ""
    tip = f": the tools are {listed}{more}" if tools else ": the list of tools is empty"
    return ToolError(f"Tool with name {name[:_MAX_NAME_CHARS]} not found", tip)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the model may or must call."""

    kind: Literal["auto", "none", "required", "named"]
    name: str | None = None
    """The tool to call, if `kind` is `named`."""
    parallel: bool = True
    """Whether several calls are allowed. A named tool is called once in any case, as with OpenAI."""

    @property
    def is_forced(self) -> bool:
        """Whether the answer must consist of calls."""
        return self.kind in {"required", "named"}

    @property
    def is_single(self) -> bool:
        """Whether at most one call is allowed."""
        return self.kind == "named" or not self.parallel


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call: the first has id and name, and the pieces of arguments together are one JSON object."""

    index: int
    """The call's place in the answer, from 0."""
    id: str | None
    name: str | None
    arguments: str
    source: str = ""
    """What the model wrote for it, special tokens apart; it is text if the call never ends."""
    is_last: bool = False
    """Whether the arguments are whole with it. A call without such a piece is broken or cut."""


@dataclass(slots=True)
class Parsed:
    """Text for the client and pieces of calls. Their order among each other is not kept, as in OpenAI's answers.

    One is made for every token, and a frozen one would take twice as long; no code changes it.
    """

    text: str = ""
    calls: tuple[CallDelta, ...] = ()


class AnswerParser(Protocol):
    """Parses one answer; the cuts between pushed pieces make no difference."""

    def push(self, text: str) -> Parsed:
        """Parse more text; text that may begin a call is held back."""

    def finish(self) -> Parsed:
        """Parse the held text as the end of the answer."""
