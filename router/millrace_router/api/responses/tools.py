"""The tools of a response, and how their calls are named in the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag

from millrace_router.api.body.fields import Items, RequestModel
from millrace_router.api.body.messages import new_tool
from millrace_router.api.responses.protocol import (
    ResponseCustomToolJson,
    ResponseFunctionToolJson,
    ResponseNamespaceJson,
)
from millrace_router.request.grammar import RawGrammar
from millrace_router.request.request import GrammarKind
from millrace_router.tool_calls.text_tool import text_tool
from millrace_router.tool_calls.tool import Tool

JOINT = "__"
"""Between a namespace and a name, for the model."""


class FunctionTool(RequestModel):
    """A function."""

    type: Literal["function"] | None = "function"
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        validation_alias=AliasChoices("parameters", "input_schema", "inputSchema"), default=None
    )
    strict: bool | None = None
    """Whether the arguments of every call match `parameters`; unlike OpenAI's, absent means false."""

    def as_tool(self, name: str) -> Tool:
        return new_tool(name, self.description, self.parameters, strict=self.strict)

    def repeated(self) -> ResponseFunctionToolJson:
        """Render as the answer repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


class AnyText(RequestModel):
    """The input is any text."""

    type: Literal["text"]

    def raw(self) -> None:
        """Return no grammar."""


class GrammarText(RequestModel):
    """The input matches a grammar."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str

    def raw(self) -> RawGrammar:
        kind = GrammarKind.LARK if self.syntax == "lark" else GrammarKind.REGEX
        return RawGrammar(kind, self.definition)


class CustomTool(RequestModel):
    """A tool whose input is a text, which the model writes as the one parameter of a function."""

    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: AnyText | GrammarText | None = Field(discriminator="type", default=None)

    def as_tool(self, name: str) -> Tool:
        """Translate; raises ValidationError for a grammar that is not valid."""
        raw = None if self.format is None else self.format.raw()
        return text_tool(name, self.description, None if raw is None else raw.read())

    def repeated(self) -> ResponseCustomToolJson:
        """Render as the answer repeats it."""
        format_json = {"type": "text"} if self.format is None else self.format.model_dump()
        return {
            "type": "custom",
            "name": self.name,
            "description": self.description,
            "format": format_json,
        }


class LeftOutTool(RequestModel):
    """A tool that OpenAI's servers would run, or that OpenAI's models know without a definition."""

    is_open: ClassVar[bool] = True
    type: str


def _type_of(tool: object) -> str:
    if not isinstance(tool, dict):
        return _TAGS.get(type(tool), "left_out")
    tool_type = tool.get("type", "function")
    return tool_type if isinstance(tool_type, str) and tool_type in _TAGS.values() else "left_out"


class NamespaceTool(RequestModel):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: Items[
        Annotated[
            Annotated[FunctionTool, Tag("function")]
            | Annotated[CustomTool, Tag("custom")]
            | Annotated[LeftOutTool, Tag("left_out")],
            Discriminator(_type_of),
        ]
    ] = Field(default_factory=list)

    def repeated(self) -> ResponseNamespaceJson:
        """Render as the answer repeats it."""
        inner = [tool.repeated() for tool in self.tools if not isinstance(tool, LeftOutTool)]
        return {
            "type": "namespace",
            "name": self.name,
            "description": self.description,
            "tools": inner,
        }


_TAGS: dict[type, str] = {
    FunctionTool: "function",
    CustomTool: "custom",
    NamespaceTool: "namespace",
    LeftOutTool: "left_out",
}
ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[LeftOutTool, Tag("left_out")],
    Discriminator(_type_of),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledAs:
    """How the answer names a tool."""

    name: str
    namespace: str | None
    is_custom: bool


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model may call."""

    definition: FunctionTool | CustomTool
    called_as: CalledAs

    @property
    def name(self) -> str:
        """The name that the model knows."""
        return joined(self.called_as.namespace, self.called_as.name)

    def as_tool(self) -> Tool:
        """Translate; raises ValidationError."""
        return self.definition.as_tool(self.name)


def joined(namespace: str | None, name: str) -> str:
    """Return the name that the model knows a tool by."""
    return f"{namespace.removesuffix(JOINT)}{JOINT}{name}" if namespace else name


def offered(tools: Iterable[ResponsesTool], namespace: str | None = None) -> Iterator[OfferedTool]:
    """Yield the tools that the model may call, those in namespaces one by one."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from offered(tool.tools, tool.name)
        elif not isinstance(tool, LeftOutTool):
            is_custom = isinstance(tool, CustomTool)
            yield OfferedTool(
                tool, CalledAs(name=tool.name, namespace=namespace, is_custom=is_custom)
            )


def left_out(tools: Iterable[ResponsesTool]) -> Iterator[str]:
    """Yield the names of the tools that the prompt does not have, as `x-millrace-ignored` has them."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from left_out(tool.tools)
        elif isinstance(tool, LeftOutTool):
            yield f"tools.{tool.type}"
