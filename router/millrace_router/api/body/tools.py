"""The tools of a chat, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import AliasChoices, Field
from typing_extensions import TypeAliasType

from millrace_router.api.body.fields import Items, RequestModel
from millrace_router.errors import ToolError
from millrace_router.tool_calls.tool import Tool, ToolChoice

MAX_NAME_CHARS = 100
"""Characters of an unknown name in a message."""
Word = Literal["auto", "none", "required"]
WORDS: Mapping[str, Word] = {"auto": "auto", "none": "none", "required": "required"}


class FunctionDefinition(RequestModel):
    """A function that the model may call; `arguments` is TGI's name of `parameters`."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        validation_alias=AliasChoices("parameters", "arguments"), default=None
    )
    """A JSON schema; None stands for no parameters."""
    strict: bool | None = None
    """Whether the arguments of every call match `parameters`."""

    def as_tool(self) -> Tool:
        """Translate."""
        return new_tool(self.name, self.description, self.parameters, strict=self.strict)


class ToolDefinition(RequestModel):
    """A tool; functions alone are supported."""

    type: str | None = "function"
    function: FunctionDefinition | None = None

    def as_tool(self) -> Tool:
        """Translate; raises ToolError for another kind."""
        if self.type not in {None, "function"}:
            raise ToolError(f"tools of type `{str(self.type)[:MAX_NAME_CHARS]}` are not supported")
        if self.function is None:
            raise ToolError("a tool of type `function` needs a `function`")
        return self.function.as_tool()


def without_functions(value: object, **replacements: str) -> object:
    """Return `value`; raises ValueError for a field of OpenAI's function calling, which tools have replaced."""
    if isinstance(value, dict):
        for name, replacement in replacements.items():
            if value.get(name) is not None:
                raise ValueError(f"`{name}` is not supported: use `{replacement}`")
    return value


class FunctionName(RequestModel):
    """A function by its name."""

    name: str


class NamedTool(RequestModel):
    """A choice of one tool, which the model must call."""

    type: Literal["function"] | None = "function"
    function: FunctionName


class AllowedTools(RequestModel):
    """The tools that the model may call in this turn."""

    mode: Literal["auto", "required"] = "auto"
    tools: Items[NamedTool] = Field(min_length=1)


class AllowedToolsChoice(RequestModel):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoiceField = TypeAliasType("ToolChoiceField", Word | str | NamedTool | AllowedToolsChoice)
"""A word, or a function: by its bare name as in TGI, or in OpenAI's form."""


def new_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None
) -> Tool:
    """Return a tool, with the defaults of OpenAI's API."""
    return Tool(
        name=name,
        description=description,
        parameters=parameters or {"type": "object", "properties": {}},
        strict=bool(strict),
    )


def choose(
    tools: tuple[Tool, ...], choice: ToolChoiceField | None, *, parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that may be called, and the choice among them; raises ToolError."""
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        names = [named.function.name for named in allowed.tools]
        return only(tools, names), ToolChoice(allowed.mode, None, parallel)
    if isinstance(choice, NamedTool):
        return choose_named(tools, choice.function.name, parallel=parallel)
    name = "auto" if choice is None else choice
    if name in WORDS:
        return choose_by_word(tools, WORDS[name], parallel=parallel)
    return choose_named(tools, name, parallel=parallel)


def choose_by_word(
    tools: tuple[Tool, ...], word: Word, *, parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return all tools and the choice; raises ToolError where a call is required and there is no tool."""
    if word == "required" and not tools:
        raise ToolError("a call is `required`, but there are no `tools`")
    return tools, ToolChoice(word, None, parallel)


def choose_named(
    tools: tuple[Tool, ...], name: str, *, parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tool with the name, and the choice; raises ToolError if there is none."""
    (chosen,) = only(tools, [name])
    return tools, ToolChoice("named", chosen.name, parallel)


def only(tools: tuple[Tool, ...], names: Sequence[str]) -> tuple[Tool, ...]:
    """Return the tools with the names, each once; raises ToolError for a name that no tool has."""
    known = {tool.name: tool for tool in tools}
    for name in names:
        if name not in known:
            raise ToolError(f"Tool with name {name[:MAX_NAME_CHARS]} not found")
    return tuple(known[name] for name in dict.fromkeys(names))
