"""Entries that have not been admitted to the batch yet, first come first served."""

from __future__ import annotations

from collections import deque

from millrace_router.entry import Entry


class WaitingQueue:
    """FIFO of entries; one whose reader has left is taken out at once."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, entry: Entry) -> None:
        """Queue `entry` last."""
        self._entries.append(entry)

    def head(self) -> Entry | None:
        """The entry to admit next."""
        return self._entries[0] if self._entries else None

    def pop(self) -> Entry:
        """Take the head out."""
        return self._entries.popleft()

    def discard(self, entry: Entry) -> bool:
        """Take `entry` out wherever it stands; whether it was there."""
        try:
            self._entries.remove(entry)
        except ValueError:
            return False
        return True
