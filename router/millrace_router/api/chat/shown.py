"""What of the generated tokens is part of an answer's text."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_router.request.events import TokenEvent
from millrace_router.request.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownText:
    """Options of the text of a choice."""

    special_tokens: bool = False
    """Whether special tokens are part of the text."""
    stops: bool = False
    """Whether what ended the answer, a stop string or a token, is part of the text."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    token_ids: bool = False
    """Whether the ids of tokens stand beside the text."""

    def hides_end(self, event: TokenEvent) -> bool:
        """Return whether the token of `event` ends the answer and is not part of the text."""
        finished = event.finished
        if self.stops or finished is None:
            return False
        if event.token.id in self.stop_token_ids:
            return True
        # Other special tokens are shown; without them, a parser of calls decides about the end.
        return self.special_tokens and finished.finish_reason is FinishReason.EOS_TOKEN


DEFAULT_TEXT = ShownText()
"""Neither special tokens nor stop strings."""
