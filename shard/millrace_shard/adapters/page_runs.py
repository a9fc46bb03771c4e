"""Runs of consecutive pages, which are moved together when the free pages are scattered."""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple


class Run(NamedTuple):
    """Consecutive pages."""

    first: int
    size: int

    @property
    def end(self) -> int:
        """The page behind the last one."""
        return self.first + self.size


class PageRuns:
    """Which pages are held; any thread may call the methods."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._held: list[Run] = []
        """Ascending."""
        self._lock = Lock()

    def allocate(self, count: int) -> Run | None:
        """The first free run of `count` pages; None if there is none."""
        with self._lock:
            start = 0
            for place, held in enumerate([*self._held, Run(self.num_pages, 0)]):
                if held.first - start >= count:
                    run = Run(start, count)
                    self._held.insert(place, run)
                    return run
                start = held.end
            return None

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        with self._lock:
            return self.num_pages - sum(run.size for run in self._held)

    def free(self, run: Run) -> None:
        """Free a held run."""
        with self._lock:
            self._held.remove(run)

    def compact(self) -> dict[Run, Run]:
        """Move all runs to the front; returns the new run of each that moves, in the order in which they can move."""
        with self._lock:
            moves, held, start = dict[Run, Run](), list[Run](), 0
            for run in self._held:
                moved = Run(start, run.size)
                if moved != run:
                    moves[run] = moved
                held.append(moved)
                start = moved.end
            self._held = held
            return moves
