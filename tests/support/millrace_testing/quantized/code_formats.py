"""Random weights in codes, and experts by their definition."""

from __future__ import annotations

from dataclasses import replace

import torch
from bench.harness.code_formats import code_format
from torch import Tensor

from millrace_shard.kernels.expert_weights import ExpertsWeights
from millrace_shard.kernels.layer_weights import Activation, LinearWeights
from millrace_shard.kernels.quantized import QuantizedTensor


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
