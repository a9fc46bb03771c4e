"""A rank's part of a linear of a class, by its style in the tensor-parallel plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.models.transformers_backend.tensor_parallel.plan import Style

Span = tuple[int, int]
"""A half-open range."""
OUTPUTS = frozenset((Style.COLWISE, Style.COLWISE_GATHER, Style.PACKED_COLWISE))
"""Styles that split the outputs."""
INPUTS = frozenset((Style.ROWWISE, Style.ROWWISE_SPLIT))
"""Styles that split the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShare:
    """What one rank has of a linear [outputs, inputs]."""

    style: Style
    outputs: tuple[Span, ...]
    """Ranges of the outputs, one after the other."""
    inputs: Span
    padding: int = 0
    """Zero rows behind the outputs, so that the parts of all ranks have one size."""

    @staticmethod
    def of(style: Style, outputs: int, inputs: int, group: ProcessGroup) -> LinearShare:
        """The share of `group.rank`; `outputs` or `inputs` must be as `is_divisible` requires."""
        rank, ranks = group.rank, group.world_size
        if style is Style.PACKED_COLWISE:
            half = outputs // 2
            first, second = (_shifted(part_of(half, rank, ranks), by) for by in (0, half))
            return LinearShare(style=style, outputs=(first, second), inputs=(0, inputs))
        if style is Style.COLWISE_GATHER:
            size = -(-outputs // ranks)
            start, end = (min(each * size, outputs) for each in (rank, rank + 1))
            return LinearShare(
                style=style,
                outputs=((start, end),),
                inputs=(0, inputs),
                padding=size - (end - start),
            )
        return LinearShare(
            style=style,
            outputs=(part_of(outputs, rank, ranks) if style is Style.COLWISE else (0, outputs),),
            inputs=part_of(inputs, rank, ranks) if style in INPUTS else (0, inputs),
        )

    @property
    def is_summed(self) -> bool:
        """Whether the results of the ranks are summed."""
        return self.style in INPUTS

    def weights(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The parts of `weight` [outputs, inputs], as views, and the padding."""
        own = tuple(weight[slice(*span), slice(*self.inputs)] for span in self.outputs)
        if not self.padding:
            return own
        return (*own, weight.new_zeros(self.padding, weight.shape[1]))

    def bias(self, bias: Tensor) -> Tensor:
        """The part of `bias` [outputs] and zeros for the padding."""
        own = [bias[slice(*span)] for span in self.outputs]
        return torch.cat([*own, bias.new_zeros(self.padding)])


def is_divisible(style: Style, outputs: int, inputs: int, ranks: int) -> bool:
    """Whether `ranks` can share a linear, or the matrices of experts, of `style`."""
    if style is Style.PACKED_COLWISE:
        return outputs % (2 * ranks) == 0
    if style is Style.PACKED_ROWWISE:
        return inputs % (2 * ranks) == 0
    if style is Style.COLWISE:
        return outputs % ranks == 0
    return style not in INPUTS or inputs % ranks == 0


def part_of(size: int, rank: int, ranks: int) -> Span:
    """The range of a rank in `size` items, which `ranks` divides."""
    share = size // ranks
    return rank * share, (rank + 1) * share


def _shifted(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
