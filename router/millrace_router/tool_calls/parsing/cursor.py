"""A position in text that arrives in pieces, for parsers that are written as generators.

A generator yields where it needs more text. It decides only on text that it has, or on the end of the answer, so that
its decisions do not depend on the cuts between pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import TypeVar

from millrace_router.tool_calls.parsing.json_mender import JsonMender
from millrace_router.tool_calls.parsing.syntax import marker_pattern

BLANKS = " \t\n\r"
MAX_BLANKS = 256
"""More blanks in a row count as text, so that the time to hold them back is bounded."""
STRAY = "}])\"'"
"""Characters that models write once too often behind a call."""

Result = TypeVar("Result")
Wait = Generator[None, None, Result]
"""Yields where more text is needed, and returns the result."""
Give = Callable[[str], None]


class Cursor:
    """Text and a position in it."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_last = False
        """Whether no more text arrives."""
        self.holds = True
        """Whether text before the position stays until `drop`, so that a parser can go back."""
        self.records = False
        """Whether dropped text is kept for `taken`."""
        self._dropped: list[str] = []

    def taken(self) -> str:
        """Drop, and return all text that was dropped since the last call."""
        self.drop()
        text = "".join(self._dropped)
        self._dropped.clear()
        return text

    def drop(self) -> None:
        """Forget the text before the position."""
        if self.records:
            self._dropped.append(self.text[: self.position])
        self.text = self.text[self.position :]
        self.position = 0

    def put_back(self, text: str) -> None:
        """Put `text`, which was read last, in front of the position; text before it may be gone."""
        if self.records:
            before = self.taken()
            self._dropped.append(before[: len(before) - len(text)])
        self.text = f"{text}{self.text[self.position :]}"
        self.position = 0

    def more(self) -> Wait[bool]:
        """Wait for text behind what is there; False at the end of the answer."""
        if not self.holds:
            self.drop()
        length = len(self.text)
        while len(self.text) == length and not self.is_last:
            yield
        return len(self.text) > length

    def peek(self) -> Wait[str]:
        """Return the next character; "" at the end of the answer."""
        if self.position == len(self.text):
            yield from self.more()
        return self.text[self.position : self.position + 1]

    def take(self, texts: Collection[str]) -> Wait[str]:
        """Step over the longest of `texts` that follows, and return it; "" if none does."""
        while True:
            rest = self.text[self.position : self.position + max(map(len, texts), default=0)]
            if self.is_last or not any(
                len(one) > len(rest) and one.startswith(rest) for one in texts
            ):
                break
            yield from self.more()
        taken = max((one for one in texts if rest.startswith(one)), key=len, default="")
        self.position += len(taken)
        return taken

    def skip(self, characters: str = BLANKS, most: int = MAX_BLANKS) -> Wait[None]:
        """Step over at most `most` of `characters`."""
        while most:
            char = yield from self.peek()
            if not char or char not in characters:
                break
            self.position += 1
            most -= 1

    def copy(self, ends: Collection[str], give: Give) -> Wait[str]:
        """Pass text on up to the first of `ends`, step over it and return it; "" if the answer ends before it.

        At the end of the answer, the beginning of an end is dropped.
        """
        pattern = marker_pattern(tuple(ends))
        while True:
            match = pattern.search(self.text, self.position)
            text = self.text[self.position : None if match is None else match.start()]
            self.position += len(text)
            give(text)
            if match is not None and match[0] in ends:
                self.position += len(match[0])
                return match[0]
            if not (yield from self.more()):
                self.position = len(self.text)
                return ""

    def close(self, ends: Collection[str]) -> Wait[str]:
        """Step over blanks and one of `ends`, and over stray signs before it; "" if none follows.

        Stray signs at the end of the answer are stepped over, too.
        """
        holds, self.holds = self.holds, True
        if not holds:
            self.drop()
        yield from self.skip()
        end = yield from self.take(ends)
        mark = self.position
        if not end:
            yield from self.skip(f"{STRAY}{BLANKS}")
            end = (yield from self.take(ends)) if self.position > mark else ""
            if not end and not (yield from self.peek()):
                mark = self.position
        if not end:
            self.position = mark
        self.holds = holds
        return end

    def json(self, give: Give) -> Wait[bool]:
        """Pass the JSON of one value on as it comes; False if it cannot be mended, or is cut off."""
        mender = JsonMender()
        while not (mender.ended or mender.failed):
            if self.position == len(self.text) and not (yield from self.more()):
                return False
            self.position, value = mender.push(self.text, self.position)
            num_held = min(len(mender.held), self.position)
            self.position -= num_held
            give(value)
            self.position += num_held
        return mender.ended
