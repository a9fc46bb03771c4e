"""The formats of codes that a model's linears have, for kernels that are compiled for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFormat:
    """What the codes of a `QuantizedTensor` stand for, and which scales they have."""

    values: tuple[float, ...]
    """Of 16 or 256 codes."""
    group_size: int | None
    """None: one group of all inputs."""
    has_offsets: bool = False
    has_input_order: bool = False

    @classmethod
    def of(cls, weight: QuantizedTensor) -> CodeFormat:
        """The format of a weight. Codes without a number stand for 0 here."""
        is_whole = weight.group_size >= weight.shape[1]
        return cls(
            values=tuple(weight.values.nan_to_num(0.0).tolist()),
            group_size=None if is_whole else weight.group_size,
            has_offsets=weight.offsets is not None,
            has_input_order=weight.input_order is not None,
        )

    def random(
        self, outputs: int, inputs: int, device: torch.device, seed: int = 0
    ) -> QuantizedTensor:
        """A weight of random codes, made on `device`, whose products with a normal distribution are about 1."""
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.tensor(self.values, dtype=torch.float32, device=device)
        finite = values[values.isfinite()]
        group_size = inputs if self.group_size is None else self.group_size
        groups = (outputs, -(-inputs // group_size))
        typical = float(finite.square().mean().sqrt()) * inputs**0.5
        # Zero points are integers, and scales have the precision of files.
        scales = (torch.rand(groups, generator=generator, device=device) + 0.5) / typical
        scales = scales.half().float()
        zeros = torch.rand(groups, generator=generator, device=device).mul(16).floor()
        codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=device)
        codes.random_(len(values), generator=generator)
        for code in (~values.isfinite()).nonzero().flatten().tolist():
            codes.masked_fill_(codes == code, 0)
        order = torch.randperm(inputs, generator=generator, device=device)
        return QuantizedTensor(
            codes=codes,
            values=values,
            scales=scales,
            offsets=-zeros * scales if self.has_offsets else None,
            group_size=group_size,
            input_order=order if self.has_input_order else None,
        )
