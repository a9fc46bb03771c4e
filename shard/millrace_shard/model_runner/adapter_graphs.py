"""Graphs of forward passes of decodes with adapters, in addition to the graphs of decodes without.

A graph reads the adapters of its rows from a buffer that never moves, and the addresses of adapters from the table, so
that it holds for any adapters. Its logits lie where the graph without adapters puts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.lora.adapter_table import (
    BLOCK_ROWS,
    AdapterRows,
    AdapterTable,
    most_blocks,
)
from millrace_shard.model_runner.capture_run import Candidate, CaptureRun
from millrace_shard.model_runner.graph_capture import Capture, Captured, GraphSettings

KIND = "CUDA graphs of decodes with adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedWork:
    """A forward pass of one size, which may become a graph."""

    pad: Callable[[], None]
    """Lets all rows be padding."""
    forward: Callable[[AdapterRows], Tensor]
    """The pass of rows with these adapters: [size, vocab] float32."""
    logits: Tensor
    """[size, vocab] float32, where the graph puts the result."""
    compare: Callable[[Captured], None]
    """Compares a replay with the eager pass."""


class AdapterGraphs:
    """Graphs for the sizes that could be captured; there are none if a linear reads the adapters on the host."""

    def __init__(self, table: AdapterTable | None, max_batch_size: int) -> None:
        self._table = table
        self._graphs: dict[int, Captured] = {}
        self._rows: AdapterRows | None = None
        """The rows whose adapters are in the buffer."""
        self._grid_slices = 0
        """Slices that the captured launches have programs for."""
        if table is not None:
            count = most_blocks(max_batch_size, table.max_adapters)
            shape = (count, 1 + BLOCK_ROWS)
            self._blocks = torch.zeros(shape, dtype=torch.int32, device=table.device)

    def capture(
        self,
        settings: GraphSettings,
        group: ProcessGroup,
        works: Mapping[int, AdaptedWork],
    ) -> None:
        """Capture each size in `works`. This is a collective.

        See DecodeGraphs.capture. The comparison runs without adapters: the check of kernels at the start has some.
        """
        self._graphs.clear()
        table = self._table
        if table is None or not (table.max_adapters and table.reads_on_device and works):
            return
        if settings.may_capture(KIND):
            self._grid_slices = table.grid_slices
            run = CaptureRun(KIND, settings, group, table.device)
            self._graphs = run.capture(
                sorted(works, reverse=True), partial(self._candidate, table, works)
            )

    def fits(self, size: int, rows: AdapterRows) -> bool:
        """Whether there is a graph of `size` rows that computes the ranks of these adapters."""
        return size in self._graphs and self._most_slices(rows) <= self._grid_slices

    def replay(self, size: int, rows: AdapterRows) -> Tensor:
        """Replay the graph of `size` rows with the adapters of `rows`, which must fit: [size, vocab] float32."""
        if rows is not self._rows:
            self._blocks.zero_()
            self._blocks[: len(rows.blocks)] = rows.blocks
            self._rows = rows
        return self._graphs[size].replay()

    def _most_slices(self, rows: AdapterRows) -> int:
        assert self._table is not None, "there are adapters"
        adapters = [self._table.get(group.slot) for group in rows.groups]
        return max(0 if adapter is None else adapter.most_slices for adapter in adapters)

    def _candidate(
        self,
        table: AdapterTable,
        works: Mapping[int, AdaptedWork],
        capture: Capture,
        size: int,
    ) -> Candidate[Captured]:
        work = works[size]
        work.pad()
        rows = self._rows_of(size, table)

        def compute() -> Tensor:
            return work.logits.copy_(work.forward(rows))

        return Candidate(
            warm_up=lambda: capture.warm_up(compute),
            record=lambda: capture.record(compute),
            compare=work.compare,
        )

    def _rows_of(self, size: int, table: AdapterTable) -> AdapterRows:
        rows = AdapterRows(
            host=np.zeros(size, dtype=np.int64),
            slots=torch.zeros(size, dtype=torch.int32, device=table.device),
            groups=(),
            blocks=self._blocks[: most_blocks(size, table.max_adapters)],
            logits=None,
        )
        return replace(rows, logits=rows)
