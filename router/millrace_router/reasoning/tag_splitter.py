"""Separates a thought in tags from the answer behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace_router.reasoning.splitter import Split, Start
from millrace_router.tool_calls.parsing.syntax import earliest, num_begun

BLANKS = " \t\r\n"
MAX_BLANKS = 256
"""More blanks in a row count as text, so that the time to hold them back is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The texts around a thought, and around the answer if a format has such."""

    openers: tuple[str, ...]
    """Texts of which one opens the thought, at the beginning of the answer; templates write the first."""
    closers: tuple[str, ...]
    answer_opener: str = ""
    answer_closer: str = ""
    trimmed: str = "\n"
    """Characters that belong to a tag that they stand beside."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All tags."""
        return tuple(
            filter(None, (*self.openers, *self.closers, self.answer_opener, self.answer_closer))
        )


class TagSplitter:
    """Finds at most one thought, at the beginning; tags in the answer are text."""

    def __init__(self, tags: Tags, start: Start) -> None:
        self._tags = tags
        self._start = start
        self._rest = ""
        """Undecided text."""
        self._is_last = False
        self._begins = True
        """Whether the part has no text yet, so that its first characters may be trimmed."""
        self._thoughts: list[str] = []
        self._answers: list[str] = []
        self._step: Callable[[], bool] | None = self._at_start
        """None within an answer that nothing ends."""
        self.thinks = start is Start.OPEN

    def push(self, text: str) -> Split:
        """Split more text."""
        if self._step is None:
            return Split("", text)
        self._rest += text
        return self._split()

    def finish(self) -> Split:
        """Split the held text as the end of the answer."""
        self._is_last = True
        return self._split()

    def _split(self) -> Split:
        while self._step is not None and self._step():
            pass
        split = Split("".join(self._thoughts), "".join(self._answers))
        self._thoughts.clear()
        self._answers.clear()
        return split

    # Each step removes decided text from `_rest`, and returns whether another step can go on.

    def _at_start(self) -> bool:
        begin = len(self._rest) - len(self._rest.lstrip(BLANKS))
        text = self._rest[begin:]
        openers = self._tags.openers if begin <= MAX_BLANKS else ()
        opener = next((one for one in openers if text.startswith(one)), None)
        if opener is not None:
            self._rest = text[len(opener) :]
            self.thinks = True
        elif not self._is_last and any(one.startswith(text) for one in openers):
            return False
        self._step = self._in_thought if self.thinks else self._before_answer
        return True

    def _in_thought(self) -> bool:
        if not self._in_part(self._tags.closers, self._thoughts):
            return False
        self.thinks = False
        self._step = self._behind_thought
        return True

    def _behind_thought(self) -> bool:
        self._rest = self._rest.lstrip(self._tags.trimmed)
        self._step = self._before_answer if self._rest else self._step
        return bool(self._rest)

    def _before_answer(self) -> bool:
        opener = self._tags.answer_opener
        if opener and self._rest.startswith(opener):
            self._rest = self._rest[len(opener) :]
            self._begins = True
            self._step = self._in_answer
            return True
        if opener and opener.startswith(self._rest) and not self._is_last:
            return False
        return self._give_all(self._answers)

    def _in_answer(self) -> bool:
        if not self._in_part((self._tags.answer_closer,), self._answers):
            return False
        return self._give_all(self._answers)

    def _in_part(self, closers: Sequence[str], parts: list[str]) -> bool:
        """Move decided text to `parts`; returns whether one of `closers` has followed."""
        if self._begins:
            self._rest = self._rest.lstrip(self._tags.trimmed)
            if not self._rest:
                return False
            self._begins = False
        end, found = len(self._rest), None
        if any(closer[0] in self._rest for closer in closers):
            found = earliest(self._rest, closers, 0)
            end = end - num_begun(self._rest, closers) if found is None else found[0]
        if found is None and self._is_last:
            return self._give_all(parts)
        num_given = self._num_given(end)
        parts.append(self._rest[:num_given])
        self._rest = self._rest[num_given:] if found is None else self._rest[end + len(found[1]) :]
        return found is not None

    def _num_given(self, end: int) -> int:
        """The length of the text before `end` that is certain; blanks at its end may stand beside a closer."""
        text = self._rest[max(0, end - MAX_BLANKS) : end]
        return end - len(text) + len(text.rstrip(self._tags.trimmed))

    def _give_all(self, parts: list[str]) -> bool:
        """Add all text to `parts`, to which all later text belongs too."""
        parts.append(self._rest)
        self._rest = ""
        self._step = None
        return False
