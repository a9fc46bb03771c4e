"""The batch sizes that are captured as CUDA graphs, and whether graphs are in use at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from millrace_shard.model_runner.graph_capture import Capture

SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))
"""The sizes without `--cuda-graphs`: above 8 rows a batch gets at most 7 rows of padding, above 64 at most 15.

The number of sizes bounds the time of the captures.
"""
FIRST_TO_END_FAILED_CAPTURES = (2, 13)
"""Earlier versions of torch leave a failed capture open: torch.cuda.empty_cache() raises an error ever after."""


@dataclass(slots=True)
class GraphSettings:
    """The graphs to capture and the way to capture them; the captures of a process share one instance."""

    sizes: tuple[int, ...] | None
    """None: SIZES up to the largest batch, and this batch."""
    new_capture: Callable[[], Capture]
    not_capturable: set[str] = field(default_factory=set)
    """Kinds of graphs whose work has turned out to wait or to be replayed wrongly. No later warm-up captures them."""
    capture_failed: bool = False
    """Whether a capture has failed, whose memory is lost until the process ends. No other capture follows."""

    def sizes_up_to(self, max_batch_size: int) -> list[int]:
        """The sizes to capture for batches of at most `max_batch_size` rows, largest first."""
        if self.sizes is None:
            sizes = {min(size, max_batch_size) for size in SIZES}
        else:
            sizes = {size for size in self.sizes if 0 < size <= max_batch_size}
        return sorted(sizes, reverse=True)

    def may_capture(self, kind: str) -> bool:
        """Whether graphs of this kind may be captured."""
        return not self.capture_failed and kind not in self.not_capturable

    @property
    def holds_cache(self) -> bool:
        """Whether torch can never return its cached memory to the device, because a failed capture is open."""
        return self.capture_failed and not ends_failed_captures(torch.__version__)


def ends_failed_captures(version: str) -> bool:
    """Whether torch of this version, such as 2.13.0+cu130, ends a graph capture that fails."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= FIRST_TO_END_FAILED_CAPTURES


def empty_cache(device: torch.device, graphs: GraphSettings | None) -> None:
    """Return the memory that torch caches to a CUDA device, if torch can."""
    if device.type == "cuda" and not (graphs is not None and graphs.holds_cache):
        torch.cuda.empty_cache()
