"""Captures without a GPU, and a capture that runs out of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Recording:
    """Recorded work that is run anew over the same tensors, as a graph would be."""

    compute: Callable[[], Tensor]
    output: Tensor
    replays: int = 0

    def replay(self) -> Tensor:
        """Into the memory of the first output."""
        self.replays += 1
        return self.output.copy_(self.compute())


@dataclass
class Recorder:
    """A Capture that remembers; also its own factory. `fail` may raise, given how many were captured before."""

    fail: Callable[[int], None] = lambda number: None
    recordings: list[Recording] = field(default_factory=list)
    num_captures: int = 0

    def new_capture(self) -> Recorder:
        """Counted; the recordings stay in one list."""
        self.num_captures += 1
        return self

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        """Run once, and keep it."""
        self.fail(len(self.recordings))
        self.recordings.append(Recording(compute, compute()))
        return self.recordings[-1]

    @property
    def sizes(self) -> list[int]:
        """Rows of each recording, in the order of capture."""
        return [len(recording.output) for recording in self.recordings]

    def replays(self) -> dict[int, int]:
        """The number of replays of each recording, by its rows."""
        return {len(r.output): r.replays for r in self.recordings if r.replays}


def out_of_memory() -> None:
    """Raise the error of CUDA's allocator."""
    raise torch.OutOfMemoryError("CUDA out of memory")
