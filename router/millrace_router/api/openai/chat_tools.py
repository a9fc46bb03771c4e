"""What a chat's tools are, and which of them the model may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import AliasChoices, Field
from typing_extensions import TypeAliasType

from millrace_router.api.openai.common_request import Items
from millrace_router.errors import ToolError
from millrace_router.request.fields import RequestModel
from millrace_router.tool_calls.tool import Tool, ToolChoice

MAX_TOLD_CHARS = 100
"""Of a name that is not known."""


class FunctionDefinition(RequestModel):
    """A function that the model may call; `arguments` is TGI's name of `parameters`."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        validation_alias=AliasChoices("parameters", "arguments"), default=None
    )
    """A JSON schema; None stands for no parameters."""
    strict: bool | None = None
    """Whether what the model calls it with is sure to match."""

    def as_tool(self) -> Tool:
        """Translate."""
        return Tool(
            name=self.name,
            description=self.description,
            parameters=self.parameters or {"type": "object", "properties": {}},
            strict=bool(self.strict),
        )


class ToolDefinition(RequestModel):
    """A tool; of OpenAI's kinds only functions can be called here."""

    type: str | None = "function"
    function: FunctionDefinition | None = None

    def as_tool(self) -> Tool:
        """Translate; raises ToolError for another kind."""
        if self.type not in {None, "function"}:
            raise ToolError(f"tools of type `{str(self.type)[:MAX_TOLD_CHARS]}` are not supported")
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
    """The one tool that has to be called."""

    type: Literal["function"] | None = "function"
    function: FunctionName


class AllowedTools(RequestModel):
    """Those of the tools that may be called this time."""

    mode: Literal["auto", "required"] = "auto"
    tools: Items[NamedTool] = Field(min_length=1)


class AllowedToolsChoice(RequestModel):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoiceField = TypeAliasType("ToolChoiceField", str | NamedTool | AllowedToolsChoice)
"""A word, or a function: by its bare name as in TGI, or in OpenAI's form."""


def choose(
    tools: tuple[Tool, ...], choice: ToolChoiceField | None, *, parallel: bool
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Tools that may be called, and the choice among them; raises ToolError for one that is not there."""
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        tools = _named(tools, [named.function.name for named in allowed.tools])
        return tools, ToolChoice(allowed.mode, None, parallel)
    if choice is None or choice == "auto":
        return tools, ToolChoice("auto", None, parallel)
    if choice == "none":
        return tools, ToolChoice("none", None, parallel)
    if choice == "required":
        if not tools:
            raise ToolError("a call is `required`, but there are no `tools`")
        return tools, ToolChoice("required", None, parallel)
    (tool,) = _named(tools, [choice if isinstance(choice, str) else choice.function.name])
    return tools, ToolChoice("named", tool.name, parallel)


def _named(tools: tuple[Tool, ...], names: Sequence[str]) -> tuple[Tool, ...]:
    """The tools of those names, each once; raises ToolError."""
    known = {tool.name: tool for tool in tools}
    for name in names:
        if name not in known:
            raise ToolError(f"Tool with name {name[:MAX_TOLD_CHARS]} not found")
    return tuple(known[name] for name in dict.fromkeys(names))
