"""The messages of a chat, and the body of the next request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Conversation:
    """The messages of a chat; each request begins with the `system` message."""

    system: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    """Fields of the request beside the messages: the model, sampling, the length."""
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> dict[str, Any]:
        """Add the user's message, and return the body of the request for its answer."""
        self.messages.append({"role": "user", "content": text})
        lead = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {**self.parameters, "messages": [*lead, *self.messages], "stream": True}

    def answered(self, text: str) -> None:
        """Add the answer, or the part of it that was made."""
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Remove the last message, which got no answer."""
        self.messages.pop()

    def clear(self) -> None:
        """Begin anew."""
        self.messages.clear()
