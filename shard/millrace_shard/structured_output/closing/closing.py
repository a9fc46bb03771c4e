"""Closes a text within a number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llguidance import LLMatcher

from millrace_shard.structured_output.closing.closing_tokens import ClosingTokens
from millrace_shard.structured_output.closing.ending import Ending, leads_to_end, short_ending

LEAST_MARGIN, MOST_MARGIN = 8, 64
MARGIN_SHARE = 8
"""A text is closed this share of its tokens early, since one token may lengthen its shortest ending by as many: a comma
begins an item."""
PATIENCE = 16
"""The least tokens until the next look where no ending was within the limit."""


@dataclass(frozen=True, slots=True)
class ClosingState:
    """What is known at a place; a matcher that goes back takes an earlier one."""

    next_look: int = 0
    """The place where the ending is looked at next: each look allows half of the slack to be used up."""
    ending: Ending = ()
    """It led to the end from the last place where it was looked at, or is empty."""
    began: int | None = None
    """The place from which on the text is `ending`; None while the model chooses."""


class Closing:
    """Follows one text. What it does is a function of the tokens and of their limit alone.

    So a text that is computed again, or in other steps, is closed in the same place with the same tokens.
    """

    def __init__(
        self,
        tokens: ClosingTokens,
        limit: int,
        first: Ending | None = None,
        *,
        is_out_of_reach: bool = False,
    ) -> None:
        """A text of at most `limit` tokens.

        `first` is the ending of the empty text, if it is known; with `is_out_of_reach` it is known to exceed the limit.
        """
        self._tokens = tokens
        self.limit = limit
        self._margin = min(max(limit // MARGIN_SHARE, LEAST_MARGIN), MOST_MARGIN)
        next_look = self._later(0) if is_out_of_reach else 0
        self.state = ClosingState(next_look, first or ())

    def next_token(self, place: int) -> int | None:
        """The token that has to come after `place` tokens, which the last look was at; None for any."""
        state = self.state
        return None if state.began is None else state.ending[place - state.began]

    def look(self, matcher: LLMatcher, place: int) -> None:
        """See whether the text of `matcher`, which has `place` tokens, has to be closed now."""
        state = self.state
        if state.began is not None or place < state.next_look:
            return
        if matcher.is_accepting():
            self.state = replace(state, next_look=place + 1)
            return
        left, ending = self.limit - place, state.ending
        if not ending or not leads_to_end(matcher, ending):
            ending = short_ending(matcher, self._tokens, most=left) or ()
        slack = left - len(ending) - self._margin
        if not ending or left < len(ending):
            self.state = ClosingState(self._later(place), ending)
        elif slack <= 0:
            self.state = ClosingState(place, ending, place)
        else:
            self.state = ClosingState(place + max(1, slack // 2), ending)

    def _later(self, place: int) -> int:
        """The place of the next look, after one that found the limit out of reach."""
        return place + max(PATIENCE, (self.limit - place) * 3 // 4)
