"""Stop sequences in growing text. Literal, found wherever they end, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches accumulated text for the first stop sequence to appear."""

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stop_sequences if stop)
        self._num_kept = max(map(len, self._stops), default=1) - 1
        self._tail = ""

    def push(self, text: str) -> str | None:
        """Take more text; return the stop sequence that it completes first, if any."""
        if not text:
            return None
        seen = self._tail + text
        self._tail = seen[max(0, len(seen) - self._num_kept) :]
        found = [(seen.find(stop) + len(stop), stop) for stop in self._stops if stop in seen]
        return min(found)[1] if found else None


class StopTrimmer:
    """Passes text on up to the first stop sequence, holding back what may turn out to begin one."""

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stop_sequences if stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take more text; return what is certain to stand before any stop sequence."""
        if self.stopped:
            return ""
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.stopped = True
            self._held = ""
            return text[: min(starts)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        safe = len(text) - num_held
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """Return what is held back: no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, `stop` itself excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
