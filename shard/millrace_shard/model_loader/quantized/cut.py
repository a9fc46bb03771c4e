"""A rank's part of a linear, and what is left of its groups of inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Span = tuple[int, int]
"""A half-open range."""
SMALLEST_GROUP = 16
"""Inputs of the smallest group that kernels take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The outputs `rows` and the inputs `columns` of a linear [outputs, inputs]."""

    outputs: int
    inputs: int
    rows: Span
    columns: Span

    @property
    def has_all_inputs(self) -> bool:
        """Whether no input is left out."""
        return self.columns == (0, self.inputs)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a rank's inputs: `index` [groups] int64 names the group of the file that each is a part of.

    All groups of the rank have `size` inputs, but the last, which may have fewer. If the rank's inputs begin inside a
    group of the file, its groups are smaller than those of the file.
    """

    size: int
    index: Tensor

    @staticmethod
    def of(size: int, span: Span) -> Groups:
        """The groups of the inputs `span`, which are in groups of `size` in the file."""
        start, end = span
        if start // size == (end - 1) // size:
            return Groups(end - start, torch.tensor([start // size]))
        own = group_size_at(size, start)
        return Groups(own, torch.arange(start, end, own) // size)


def group_size_at(size: int, start: int) -> int:
    """The largest group size with which groups that begin at input `start` end where groups of `size` do."""
    return math.gcd(size, start)
