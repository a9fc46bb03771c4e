"""The items of a response while they are generated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from millrace_router.api.chat.choice import ChatCompletionLogprobJson
from millrace_router.api.responses.protocol import (
    ItemStatus,
    ResponseCustomCallJson,
    ResponseFunctionCallJson,
    ResponseMessageJson,
    ResponseOutputTextJson,
    ResponseReasoningItemJson,
    ResponseSummaryTextJson,
)
from millrace_router.api.responses.tools import CalledAs
from millrace_router.request.names import Names
from millrace_router.tool_calls.text_tool import TextReader

NUM_ID_BYTES = 24
"""As many as in OpenAI's ids."""


def named_id(
    names: Names, prefix: Literal["resp", "item", "msg", "fc", "ctc", "rs"], number: int = 0
) -> str:
    """Return the id of a response, or of its item or input item with this number."""
    return f"{prefix}_{names.digits(prefix, NUM_ID_BYTES, number)}"


@dataclass(slots=True)
class GrowingMessage:
    """The assistant's text."""

    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[ChatCompletionLogprobJson] = field(default_factory=list)

    def part(self) -> ResponseOutputTextJson:
        """Render the text so far."""
        return {
            "type": "output_text",
            "text": "".join(self.texts),
            "annotations": [],
            "logprobs": [*self.logprobs],
        }

    def json(
        self, status: ItemStatus, parts: Iterable[ResponseOutputTextJson]
    ) -> ResponseMessageJson:
        """Render the message with `parts`, which are its text or none."""
        return {
            "type": "message",
            "id": self.id,
            "status": status,
            "role": "assistant",
            "content": list(parts),
        }


@dataclass(slots=True)
class GrowingThought:
    """The assistant's thought, which stands whole in the place of its summary."""

    id: str
    texts: list[str] = field(default_factory=list)

    def part(self) -> ResponseSummaryTextJson:
        """Render the thought so far."""
        return {"type": "summary_text", "text": "".join(self.texts)}

    def json(
        self, status: ItemStatus, parts: Iterable[ResponseSummaryTextJson]
    ) -> ResponseReasoningItemJson:
        """Render the item with `parts`, which are its thought or none."""
        return {"type": "reasoning", "id": self.id, "status": status, "summary": list(parts)}


@dataclass(slots=True)
class GrowingCall:
    """A call by the assistant."""

    call_id: str
    called_as: CalledAs
    id: str
    arguments: list[str] = field(default_factory=list)
    is_whole: bool = False
    """Whether all arguments were read."""

    def json(self, status: ItemStatus) -> ResponseFunctionCallJson:
        """Render the call so far."""
        made: ResponseFunctionCallJson = {
            "type": "function_call",
            "id": self.id,
            "status": status,
            "call_id": self.call_id,
            "name": self.called_as.name,
            "arguments": "".join(self.arguments),
        }
        if self.called_as.namespace is not None:
            made["namespace"] = self.called_as.namespace
        return made


@dataclass(slots=True)
class GrowingCustomCall:
    """A call of a `custom` tool by the assistant."""

    call_id: str
    called_as: CalledAs
    id: str
    reader: TextReader = field(default_factory=TextReader)
    texts: list[str] = field(default_factory=list)
    is_whole: bool = False

    def push(self, arguments: str) -> str:
        """Read more arguments; return what they add to the input."""
        text = self.reader.push(arguments)
        self.texts.append(text)
        return text

    def json(self, status: ItemStatus) -> ResponseCustomCallJson:
        """Render the call so far."""
        made: ResponseCustomCallJson = {
            "type": "custom_tool_call",
            "id": self.id,
            "status": status,
            "call_id": self.call_id,
            "name": self.called_as.name,
            "input": "".join(self.texts),
        }
        if self.called_as.namespace is not None:
            made["namespace"] = self.called_as.namespace
        return made
