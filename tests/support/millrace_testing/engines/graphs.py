"""Captures without a GPU, and failures of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from millrace_shard.model_runner.graph_capture import CaptureError


@dataclass
class Recording:
    """Recorded work that is run anew over the same tensors, as a graph would be."""

    compute: Callable[[], Tensor]
    output: Tensor
    is_stale: bool = False
    """Whether a replay yields the results of the capture, as of code that has read its values on the host."""
    replays: int = -1
    """Steps; the comparison with the eager pass does not count."""

    @property
    def chooses_tokens(self) -> bool:
        """Whether the output are tokens, and not logits or states."""
        return not self.output.is_floating_point()

    def replay(self) -> Tensor:
        """Into the memory of the first output."""
        self.replays += 1
        return self.output if self.is_stale else self.output.copy_(self.compute())


@dataclass
class Recorder:
    """A Capture that remembers; also its own factory.

    `fail_warm_up` and `fail` may raise, given how many were captured before, the latter in a capture.
    """

    fail: Callable[[int], None] = lambda number: None
    fail_warm_up: Callable[[int], None] = lambda number: None
    stale: tuple[int, ...] = ()
    """Numbers of recordings with stale results."""
    recordings: list[Recording] = field(default_factory=list)
    num_captures: int = 0

    def new_capture(self) -> Recorder:
        """Counted; the recordings stay in one list."""
        self.num_captures += 1
        return self

    def warm_up(self, compute: Callable[[], Tensor]) -> None:
        """Run once."""
        self.fail_warm_up(len(self.recordings))
        compute()

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """Run once, and keep it."""
        number = len(self.recordings)
        try:
            self.fail(number)
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        self.recordings.append(Recording(compute, compute(), is_stale=number in self.stale))
        return self.recordings[-1]

    @property
    def sizes(self) -> list[int]:
        """Rows of each recording but those that choose tokens, in the order of capture."""
        return [len(each.output) for each in self.recordings if not each.chooses_tokens]

    def replays(self) -> dict[int, int]:
        """The number of replays by steps of each recording but those that choose tokens, by its rows."""
        recordings = [r for r in self.recordings if not r.chooses_tokens]
        return {len(r.output): r.replays for r in recordings if r.replays > 0}

    def num_choices(self) -> int:
        """The number of steps whose tokens a recording chose."""
        return sum(max(0, r.replays) for r in self.recordings if r.chooses_tokens)


def out_of_memory() -> None:
    """Raise the error of CUDA's allocator."""
    raise torch.OutOfMemoryError("CUDA out of memory")
