"""Captures graphs of several sizes, in stages on which all ranks agree."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

import torch
from torch import Tensor

from millrace_shard.device.failures import is_out_of_memory, kernel_failures
from millrace_shard.device.process_group import CollectiveError, ProcessGroup
from millrace_shard.model_runner.graph_capture import (
    Capture,
    CaptureError,
    GraphSettings,
    empty_cache,
)

Graph = TypeVar("Graph")
logger = logging.getLogger(__name__)

TOLERANCE = 0.02
"""The greatest difference between the results of a replay and of the eager pass, relative to the largest result.

Only kernels that are not deterministic may differ at all, as a library may choose another algorithm in a capture.
"""


class StageOutcome(IntEnum):
    """The end of a stage; the ranks agree on the least of their outcomes."""

    CAPTURE_FAILED = 0
    NOT_CAPTURABLE = 1
    OUT_OF_MEMORY = 2
    GOOD = 3


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Graph]):
    """Work that may become a graph, in three stages. The first and the last may raise `kernel_failures`."""

    warm_up: Callable[[], None]
    """Runs the work outside a capture."""
    record: Callable[[], Graph]
    """Captures it. Raises CaptureError."""
    compare: Callable[[Graph], None]
    """Compares a replay with the eager pass."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """The outcome of a stage, and the text of its error."""

    outcome: StageOutcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CaptureRun:
    """The captures of one kind of graphs, which the log calls `kind`. All methods are collectives."""

    kind: str
    settings: GraphSettings
    group: ProcessGroup
    device: torch.device

    def capture(
        self, sizes: Sequence[int], candidate: Callable[[Capture, int], Candidate[Graph]]
    ) -> dict[int, Graph]:
        """The graphs of `sizes`, which are descending so that the memory of the first one has room for the others.

        If a rank runs out of memory, all ranks drop the graphs of this size and of larger ones. If work cannot be
        captured, or a replay differs from the eager pass, all graphs are dropped, and the settings record this. Both
        log a warning.
        Raises CollectiveError.
        """
        graphs: dict[int, Graph] = {}
        started = time.monotonic()
        capture = self.settings.new_capture()
        for number, size in enumerate(sizes, 1):
            attempt = self._attempt(candidate(capture, size))
            if not isinstance(attempt, _Ending):
                graphs[size] = attempt
                logger.info("%s: captured %d/%d, size %d", self.kind, number, len(sizes), size)
                continue
            graphs.clear()
            if attempt.outcome is not StageOutcome.OUT_OF_MEMORY:
                self.settings.not_capturable.add(self.kind)
                if attempt.outcome is StageOutcome.CAPTURE_FAILED:
                    self.settings.capture_failed = True
                logger.warning("running without %s: %s", self.kind, attempt.reason)
                return graphs
            logger.warning(
                "no %s from size %d on, out of memory: %s", self.kind, size, attempt.reason
            )
            empty_cache(self.device, self.settings)
            capture = self.settings.new_capture()
        if graphs:
            seconds = time.monotonic() - started
            logger.info("%s: %d sizes captured in %.1f s", self.kind, len(graphs), seconds)
        return graphs

    def _attempt(self, candidate: Candidate[Graph]) -> Graph | _Ending:
        graphs: list[Graph] = []
        stages: tuple[Callable[[], None], ...] = (
            candidate.warm_up,
            lambda: graphs.append(candidate.record()),
            lambda: candidate.compare(graphs[0]),
        )
        for stage in stages:
            ending = _run(stage)
            # Ranks in different stages would call different collectives.
            agreed = StageOutcome(self.group.minimum(ending.outcome))
            if agreed is not StageOutcome.GOOD:
                return _Ending(agreed, ending.reason or "another rank has failed")
        return graphs[0]


def _run(stage: Callable[[], None]) -> _Ending:
    """Run a stage. Raises CollectiveError, after which ranks cannot agree."""
    try:
        stage()
    except CaptureError as error:
        return _Ending(StageOutcome.CAPTURE_FAILED, f"a capture has failed: {error}")
    except CollectiveError:
        raise
    except kernel_failures() as error:
        outcome = (
            StageOutcome.OUT_OF_MEMORY if is_out_of_memory(error) else StageOutcome.NOT_CAPTURABLE
        )
        return _Ending(outcome, str(error))
    return _Ending(StageOutcome.GOOD)


def check_equal(replayed: Tensor, eager: Tensor, *, deterministic: bool) -> None:
    """Raise RuntimeError if `replayed` differs from `eager` in a bit, or beyond TOLERANCE if not `deterministic`."""
    limit = 0.0
    if not deterministic:
        limit = TOLERANCE * float(eager.abs().nan_to_num(nan=0.0, posinf=0.0).max())
    if not torch.allclose(replayed, eager, rtol=0.0, atol=limit, equal_nan=True):
        difference = float((replayed - eager).abs().max())
        raise RuntimeError(
            f"with {len(eager)} rows, a replay differs from the eager pass by {difference:.3g}"
        )
