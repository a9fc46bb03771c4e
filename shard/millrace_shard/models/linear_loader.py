"""Reads a rank's part of the linears of a layer, which become sites of the adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.layer.layer_weights import LinearWeights
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.lora.lora_site import LoraPart, LoraSite
from millrace_shard.weights.weights import Columns, Weights


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs of a column-parallel linear: `units` of `unit_size`, split over the ranks by units."""

    name: str
    """The module of the part, relative to the layer."""
    units: int
    unit_size: int = 1


class LinearLoader:
    """Reads weights and biases, and adds the sites in order of execution."""

    def __init__(
        self, weights: Weights, group: ProcessGroup, adapters: AdapterTable | None
    ) -> None:
        self._weights = weights
        self._group = group
        self._adapters = adapters

    def columns(
        self,
        prefix: str,
        parts: Sequence[Part],
        inputs: int,
        *,
        fused: str | None,
        bias: bool,
    ) -> LinearWeights:
        """A column-parallel linear of `parts`, which the file has in one module if `fused` names it."""
        total = sum(part.units * part.unit_size for part in parts)
        columns, first = [], 0
        for part in parts:
            size = part.units * part.unit_size
            if fused is None:
                columns.append(Columns(prefix + part.name, part.units, part.unit_size))
            else:
                columns.append(Columns(prefix + fused, part.units, part.unit_size, first, total))
            first += size
        return LinearWeights(
            self._weights.columns([each.of("weight") for each in columns], inputs),
            self._weights.biases([each.of("bias") for each in columns]) if bias else None,
            self._column_site(columns, inputs),
        )

    def rows(self, name: str, inputs: int, outputs: int, *, bias: bool) -> LinearWeights:
        """A row-parallel linear. The results of the ranks are summed, so only rank 0 adds the bias."""
        whole = self._weights.replicated(f"{name}.bias", outputs) if bias else None
        return LinearWeights(
            self._weights.rows(f"{name}.weight", outputs, inputs),
            whole if self._group.rank == 0 else None,
            self._row_site(name, inputs, outputs),
        )

    def own_heads(self, name: str, heads: int, head_dim: int) -> Tensor:
        """The rank's heads of a tensor [heads, head_dim] or [heads * head_dim], in the shape of the file."""
        return self._weights.heads(name, Columns(name, heads, head_dim))

    def head_site(self, name: str, vocab_size: int, inputs: int, share: int) -> LoraSite | None:
        """The site of an output head of which each rank has `share` outputs."""
        if self._adapters is None:
            return None
        start = min(self._group.rank * share, vocab_size)
        part = LoraPart(
            name=name,
            inputs=inputs,
            outputs=vocab_size,
            input_range=(0, inputs),
            output_range=(start, min(start + share, vocab_size)),
        )
        return self._adapters.add_site([part], is_head=True)

    def _column_site(self, parts: Sequence[Columns], inputs: int) -> LoraSite | None:
        if self._adapters is None:
            return None
        found, first = list[LoraPart](), 0
        for part in parts:
            start, end = part.span(self._group.rank, self._group.world_size)
            found.append(
                LoraPart(
                    name=part.name,
                    inputs=inputs,
                    outputs=part.rows,
                    input_range=(0, inputs),
                    output_range=(start, end),
                    first_output=first,
                )
            )
            first += end - start
        return self._adapters.add_site(found)

    def _row_site(self, name: str, inputs: int, outputs: int) -> LoraSite | None:
        if self._adapters is None:
            return None
        rank = self._group.rank
        share = inputs // self._group.world_size
        part = LoraPart(
            name=name,
            inputs=inputs,
            outputs=outputs,
            input_range=(rank * share, (rank + 1) * share),
            output_range=(0, outputs),
            adds_bias=rank == 0,
        )
        return self._adapters.add_site([part])
