"""The items of a response's input: messages, calls and their results."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Tag

from millrace_router.api.chat.messages import ContentPart
from millrace_router.api.fields import Items, RequestModel


class MessageItem(RequestModel):
    """One turn of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[ContentPart]


class FunctionCallItem(RequestModel):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """The text of a JSON object."""


class FunctionCallOutputItem(RequestModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[ContentPart]


class ReasoningPart(RequestModel):
    """A part of a thought, or of its summary."""

    type: str
    text: str


class ReasoningItem(RequestModel):
    """The assistant's thought, for templates that ask for it."""

    type: Literal["reasoning"]
    summary: Items[ReasoningPart] | None = None
    content: Items[ReasoningPart] | None = None

    @property
    def text(self) -> str:
        """The thought itself if it is there, else its summary."""
        return "\n".join(part.text for part in self.content or self.summary or ())


class ItemReference(RequestModel):
    """An item that OpenAI would have stored; refused."""

    type: Literal["item_reference"] | None = None
    id: str


class ForeignItem(RequestModel):
    """An item of one of OpenAI's own tools; refused."""

    type: str


def _kind_of(item: object) -> str:
    """Return the tag of an item's model: its `type`, which two kinds may leave out."""
    if not isinstance(item, dict):
        return _KINDS.get(type(item), "message")
    given = item.get("type")
    if given is None:
        return "item_reference" if "id" in item and "role" not in item else "message"
    return given if isinstance(given, str) and given in _KINDS.values() else "foreign"


_KINDS: dict[type, str] = {
    MessageItem: "message",
    FunctionCallItem: "function_call",
    FunctionCallOutputItem: "function_call_output",
    ReasoningItem: "reasoning",
    ItemReference: "item_reference",
    ForeignItem: "foreign",
}
InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[ForeignItem, Tag("foreign")],
    Discriminator(_kind_of),
]
