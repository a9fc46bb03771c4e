"""Finds stop sequences in growing text, at any position and in bounded memory.

If the text has several, the one that ends first counts; of those that end together, the longest counts. So the result
does not depend on the cuts between tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first completed stop sequence."""

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stop_sequences if stop)
        self._num_kept = max(map(len, self._stops), default=1) - 1
        self._tail = ""

    def push(self, text: str) -> str | None:
        """Read more text; return the stop sequence that it completes, if any. The matcher is of no use after that."""
        if not text:
            return None
        seen = self._tail + text
        self._tail = seen[max(0, len(seen) - self._num_kept) :]
        match = _first(seen, self._stops)
        return None if match is None else match[1]


class StopTrimmer:
    """Returns text up to the first stop sequence; text that may begin one is held back."""

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stop_sequences if stop)
        self._beginnings = [_Beginning(stop) for stop in self._stops]
        self._held = ""
        self.stop: str | None = None
        """The found stop sequence."""

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def push(self, text: str) -> str:
        """Read more text; return the new part that is certain to precede any stop sequence."""
        if self.stop is not None or not text:
            return ""
        if not self._stops:
            return text
        added, text = text, self._held + text
        match = _first(text, self._stops)
        if match is not None:
            self.stop = match[1]
            self._held = ""
            return text[: match[0]]
        num_held = max(beginning.push(added) for beginning in self._beginnings)
        num_safe = len(text) - num_held
        self._held = text[num_safe:]
        return text[:num_safe]

    def finish(self) -> str:
        """Return the held text at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _first(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Start and text of the stop sequence that ends first."""
    first: tuple[int, str] | None = None
    for stop in stops:
        start = text.find(stop)
        if start >= 0 and (first is None or _order(start, stop) < _order(*first)):
            first = start, stop
    return first


def _order(start: int, stop: str) -> tuple[int, int]:
    return start + len(stop), start


class _Beginning:
    """The length of a stop sequence's beginning at the end of the text, by Knuth, Morris and Pratt."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._length = 0
        # The length of the longest proper prefix that is also a suffix, for each prefix.
        self._shorter = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            length = self._next(length, stop[i])
            self._shorter[i] = length

    def push(self, text: str) -> int:
        """Read text that does not complete the sequence; return the length of the longest prefix at its end."""
        length = self._length
        if length == 0 and self._stop[0] not in text:
            return 0
        for char in text:
            length = self._next(length, char)
        self._length = length
        return length

    def _next(self, length: int, char: str) -> int:
        while length and self._stop[length] != char:
            length = self._shorter[length - 1]
        return length + (self._stop[length] == char)
