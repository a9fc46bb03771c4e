"""What all parsers of answers with calls have in common."""

from __future__ import annotations

from typing import Protocol

from millrace_router.tool_calls.tool import Parsed


class AnswerParser(Protocol):
    """Parses one answer; the cuts between pushed pieces make no difference."""

    def push(self, text: str) -> Parsed:
        """Parse more text; text that may begin a call is held back."""

    def finish(self) -> Parsed:
        """Parse the held text as the end of the answer."""
