"""The formats of codes that checkpoints have."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from millrace_shard.kernels.expert_weights import ExpertsWeights
from millrace_shard.kernels.layer_weights import Activation, LinearWeights
from millrace_shard.kernels.quantized import CodeFormat, QuantizedTensor

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_NF4 = torch.tensor(
    (
        *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
    )
)
_FP4 = torch.tensor([0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
_BYTES = torch.arange(256, dtype=torch.uint8)

TABLES = {
    "int4": torch.arange(16.0) - 8,
    "int4 with zeros": torch.arange(16.0),
    "nf4": _NF4,
    "fp4": torch.cat((_FP4, -_FP4)),
    "e2m1": torch.cat((_E2M1, -_E2M1)),
    "int8": _BYTES.view(torch.int8).float(),
    "e4m3": _BYTES.view(torch.float8_e4m3fn).float(),
}
"""What the codes of each format stand for."""


def code_format(name: str, group_size: int | None) -> CodeFormat:
    """The format of that name in TABLES."""
    values = tuple(TABLES[name].tolist())
    return CodeFormat(values=values, group_size=group_size, has_offsets=name == "int4 with zeros")


def random_codes(
    name: str,
    outputs: int,
    inputs: int,
    group_size: int | None,
    *,
    in_order: bool = True,
    seed: int = 0,
) -> QuantizedTensor:
    """A random weight of that format on CPU."""
    found = replace(code_format(name, group_size), has_input_order=not in_order)
    return found.random(outputs, inputs, torch.device("cpu"), seed)


def defined_experts(weights: ExpertsWeights, x: Tensor, *, integer: bool = False) -> Tensor:
    """[T, hidden] float64. The choice is by the logits in float32, which float64 would not change but for ties.

    The results of gates are rounded to bfloat16. With `integer`, rows are rounded to int8, with a scale for every 32
    inputs in the order of the codes, before they are multiplied with codes.
    """
    router, wide = weights.router, x.double()
    logits = wide @ router.weight.double().T
    if router.bias is not None:
        logits += router.bias
    chosen, shares = router.rule.choose(logits.float(), router.correction)
    total = torch.zeros_like(wide)
    for index, expert in enumerate(weights.experts):
        gate, up = _product(expert.gate_up, wide, integer=integer).chunk(2, dim=1)
        if isinstance(weights.activation, Activation):
            gated = gate * gate.sigmoid() * up
        else:
            alpha, limit = weights.activation.alpha, weights.activation.limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            gated = (up + 1) * gate * (gate * alpha).sigmoid()
        gated = gated.to(torch.bfloat16).double()
        out = _product(expert.down, gated, integer=integer)
        total += out * ((chosen == index) * shares).sum(1, keepdim=True)
    return total


def _product(linear: LinearWeights, rows: Tensor, *, integer: bool) -> Tensor:
    parts = [_exact(part) for part in linear.weight.parts]
    first = linear.weight.parts[0]
    if integer and isinstance(first, QuantizedTensor):
        rows = _rounded(rows, first.input_order)
    y = rows @ torch.cat(parts).T
    return y if linear.bias is None else y + linear.bias


def _exact(part: Tensor | QuantizedTensor) -> Tensor:
    """A part [n, in] in float64."""
    if isinstance(part, Tensor):
        return part.double()
    group = torch.arange(part.shape[1]) // part.group_size
    weight = part.values.double()[part.codes.int()] * part.scales.double()[:, group]
    if part.offsets is not None:
        weight += part.offsets.double()[:, group]
    if part.input_order is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, part.input_order, weight)


def _rounded(rows: Tensor, order: Tensor | None) -> Tensor:
    order = torch.arange(rows.shape[1]) if order is None else order
    parts = torch.split(rows[:, order], 32, dim=1)
    scales = [part.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127 for part in parts]
    rounded = [(part / scale).round() * scale for part, scale in zip(parts, scales, strict=True)]
    return torch.empty_like(rows).index_copy_(1, order, torch.cat(rounded, dim=1))
