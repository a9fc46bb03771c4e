"""Items in order, and how much weighs before any point: who is next in a queue, and how far away one is."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

Item = tuple[float, float, int]
"""Rank, what breaks ties (distinct among the items), weight."""

_LONGEST_RUN = 256


class Ranking:
    """A sorted sequence kept as runs of bounded length, each with its weight (a B-tree of two levels).

    Every operation compares about log2(n) items and moves at most a run. Only `before`, for a point inside, also adds
    up the runs before it: some microseconds for 100 000 items.
    """

    def __init__(self) -> None:
        self._runs: list[list[Item]] = []
        self._lasts: list[Item] = []
        self._weights: list[int] = []
        self._length = 0
        self.weight = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        for run in self._runs:
            yield from run

    def first(self) -> Item | None:
        """The item of the lowest rank."""
        return self._runs[0][0] if self._runs else None

    def add(self, item: Item) -> None:
        """Put `item` where it belongs."""
        self._length += 1
        self.weight += item[2]
        if not self._runs:
            self._insert_run(0, [item])
            return
        index = min(bisect_left(self._lasts, item), len(self._runs) - 1)
        run = self._runs[index]
        insort(run, item)
        self._lasts[index] = run[-1]
        self._weights[index] += item[2]
        if len(run) > _LONGEST_RUN:
            self._delete_run(index)
            self._insert_run(index, run[_LONGEST_RUN // 2 :])
            self._insert_run(index, run[: _LONGEST_RUN // 2])

    def remove(self, item: Item) -> None:
        """Take out `item`, as it was added.

        Raises:
            ValueError: it is not there.

        """
        index = bisect_left(self._lasts, item)
        run = self._runs[index] if index < len(self._runs) else []
        place = bisect_left(run, item)
        if place == len(run) or run[place] != item:
            raise ValueError(f"{item} is not in the ranking")
        self._length -= 1
        self.weight -= item[2]
        del run[place]
        if run:
            self._lasts[index] = run[-1]
            self._weights[index] -= item[2]
        else:
            self._delete_run(index)

    def before(self, rank: float) -> tuple[int, int]:
        """Number and weight of the items up to `rank`, those at it included."""
        end: Item = (rank, float("inf"), 0)
        index = bisect_left(self._lasts, end)
        if index == len(self._runs):
            return self._length, self.weight
        run = self._runs[index]
        place = bisect_left(run, end)
        number = sum(map(len, self._runs[:index])) + place
        return number, sum(self._weights[:index]) + sum([weight for _, _, weight in run[:place]])

    def _insert_run(self, index: int, run: list[Item]) -> None:
        self._runs.insert(index, run)
        self._lasts.insert(index, run[-1])
        self._weights.insert(index, sum([weight for _, _, weight in run]))

    def _delete_run(self, index: int) -> None:
        del self._runs[index], self._lasts[index], self._weights[index]
