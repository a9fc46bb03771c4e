"""When requests join and leave the batch: at every step, or only batch by batch, for experiments."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from millrace_router.scheduler.row import Row


class BatchingPolicy:
    """Continuous: requests join and leave the batch at every step (iteration-level scheduling: Orca, OSDI 2022)."""

    is_forming = False
    """Whether waiting requests may join for now; a plan in which they may no longer ends that."""

    def admits(self, rows: Collection[Row]) -> bool:  # noqa: ARG002
        """Whether a waiting request may join `rows`."""
        return True

    def close(self) -> None:
        """Let no request join before the batch has ended."""

    def keeps(self, row: Row) -> bool:  # noqa: ARG002
        """Whether `row` stays in the batch after its last token."""
        return False


class StaticBatching(BatchingPolicy):
    """A batch is filled from the waiting requests, and no request joins before all its rows have ended.

    A preempted request is still of its batch.
    """

    def __init__(self, *, max_rows: int | None = None, keeps_ended: bool = False) -> None:
        """At most `max_rows` rows; `keeps_ended` decodes an ended row on until the longest answer ends."""
        self.is_forming = True
        self._max_rows = max_rows
        self._keeps_ended = keeps_ended

    def admits(self, rows: Collection[Row]) -> bool:
        """As `BatchingPolicy`."""
        if not rows:
            self.is_forming = True
        return self.is_forming and (self._max_rows is None or len(rows) < self._max_rows)

    def close(self) -> None:
        """As `BatchingPolicy`."""
        self.is_forming = False

    def keeps(self, row: Row) -> bool:
        """As `BatchingPolicy`; a multi-token row leaves, because a grammar has no token after the last."""
        return self._keeps_ended and not row.is_multi_token


def batching_policy(name: str) -> BatchingPolicy:
    """The policy by the flag's value: continuous, static, static-naive or none."""
    if name == "continuous":
        return BatchingPolicy()
    return StaticBatching(
        max_rows=1 if name == "none" else None, keeps_ended=name == "static-naive"
    )


def end_of_batch(rows: Mapping[int, Row]) -> int:
    """Positions of the longest sequence of the batch; an ended row is decoded no further than that."""
    return max(row.num_inputs + row.max_tokens for row in rows.values())
