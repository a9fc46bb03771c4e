"""A weight matrix of codes of 4 or 8 bits, with scales for groups of inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """A matrix [out, in], whose element (o, i) is `scales[o, g] * values[codes[o, i]] + offsets[o, g]`.

    Here g is `i // group_size`. The product and the sum are taken in float32. Tensors may be views of mapped files.
    """

    codes: Tensor
    """uint8 [out, in], one code a byte, each below `len(values)`."""
    values: Tensor
    """float32 [16] or [256], what each code stands for: integers for int4 and int8, a table for nf4, e2m1 or e4m3."""
    scales: Tensor
    """float32 [out, groups]."""
    offsets: Tensor | None = None
    """float32 [out, groups]; zero points are the offsets `-zero * scale`."""
    group_size: int
    """Inputs of a group; the last group may have fewer. One scale for each output is one group of all inputs."""
    input_order: Tensor | None = None
    """int64 [in]: column i of the codes belongs to input `input_order[i]`; None: to input i."""

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        groups = (outputs, -(-inputs // self.group_size))
        assert self.codes.dtype is torch.uint8
        assert len(self.values) in (16, 256)
        assert self.scales.shape == groups
        assert self.offsets is None or self.offsets.shape == groups

    @property
    def shape(self) -> torch.Size:
        """Outputs and inputs."""
        return self.codes.shape

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return len(self.values).bit_length() - 1

    def rows(self, start: int, end: int) -> QuantizedTensor:
        """The outputs from `start` to `end`, as views."""
        offsets = None if self.offsets is None else self.offsets[start:end]
        return replace(
            self, codes=self.codes[start:end], scales=self.scales[start:end], offsets=offsets
        )

    def dequantized(self) -> Tensor:
        """The matrix [out, in] in float32."""
        outputs, inputs = self.shape
        # This is several times as fast as an index of two axes.
        weight = self.values.index_select(0, self.codes.flatten().int())
        grouped = inputs % self.group_size == 0
        weight = weight.view(outputs, -1, self.group_size if grouped else 1)
        scales, offsets = self.scales, self.offsets
        if not grouped:
            group = torch.arange(inputs) // self.group_size
            scales = scales[:, group]
            offsets = None if offsets is None else offsets[:, group]
        weight *= scales.unsqueeze(-1)
        if offsets is not None:
            weight += offsets.unsqueeze(-1)
        weight = weight.view(outputs, inputs)
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.input_order, weight)
