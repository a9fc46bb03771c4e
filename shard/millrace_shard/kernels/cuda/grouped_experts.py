"""Launches a layer's experts without transfers or waits; grids depend only on shapes, for CUDA graphs."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.cuda.linear_tilings import row_tiling
from millrace_shard.kernels.cuda.triton_choice import choose, group_pairs
from millrace_shard.kernels.cuda.triton_experts import (
    add_experts,
    clamped_swiglu,
    multiply_experts,
)
from millrace_shard.kernels.expert_weights import ExpertsWeights, Scoring
from millrace_shard.kernels.layer_weights import ClampedSwiglu

COLUMNS = 1024
"""Columns per program of the kernels without products."""


class GroupedExperts:
    """Router, experts and their sum; the rows of an expert are multiplied together."""

    def __init__(self, kernels: Kernels, weights: ExpertsWeights) -> None:
        """`kernels` computes the logits of the router, and all gates but gpt-oss's."""
        self._router = weights.router
        self._logits = kernels.router(weights.router.weight)
        self._silu_mul, self._activation = kernels.silu_mul, weights.activation
        count, hidden = weights.router.weight.shape
        device, inter = weights.router.weight.device, weights.inter
        self._gate_up, self._down = (
            torch.empty(count, *shape, dtype=weights.dtype, device=device)
            for shape in ((2 * inter, hidden), (hidden, inter))
        )
        self._gate_up_bias: Tensor | None = None
        self._down_bias: Tensor | None = None
        for index, expert in enumerate(weights.experts):
            self._gate_up[index] = expert.gate_up.weight.copied()
            self._down[index] = expert.down.weight.copied()
            self._gate_up_bias = _with(self._gate_up_bias, index, count, expert.gate_up.bias)
            self._down_bias = _with(self._down_bias, index, count, expert.down.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        out = x.new_empty(x.shape)
        if not len(x):
            return out
        chosen, shares = self._choose(self._logits(x.float()))
        count, top_k = len(self._router.weight), self._router.rule.top_k
        order = torch.empty(chosen.numel(), dtype=torch.int32, device=x.device)
        starts = torch.empty(count + 1, dtype=torch.int32, device=x.device)
        group_pairs[(count,)](order, starts, chosen, chosen.numel(), num_warps=4)
        groups = order, starts
        gate_up = x.new_empty(chosen.numel(), self._gate_up.shape[1])
        _multiply(gate_up, x.contiguous(), self._gate_up, self._gate_up_bias, groups, top_k)
        gated = self._activate(gate_up)
        results = x.new_empty(chosen.numel(), x.shape[1], dtype=torch.float32)
        _multiply(results, gated, self._down, self._down_bias, groups, 1)
        grid = len(x), triton.cdiv(x.shape[1], COLUMNS)
        add_experts[grid](
            out, results, shares, x.shape[1], top_k=top_k, columns=COLUMNS, num_warps=4
        )
        return out

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        router, rule = self._router, self._router.rule
        chosen = torch.empty(len(logits), rule.top_k, dtype=torch.int32, device=logits.device)
        shares = logits.new_empty(chosen.shape)
        choose[(len(logits),)](
            chosen,
            shares,
            logits,
            logits if router.bias is None else router.bias,
            logits if router.correction is None else router.correction,
            rule.scale,
            experts=logits.shape[1],
            top_k=rule.top_k,
            scoring=list(Scoring).index(rule.scoring),
            renormalise=rule.renormalise,
            groups=rule.num_groups,
            top_groups=rule.top_groups,
            has_bias=router.bias is not None,
            has_correction=router.correction is not None,
            num_warps=1,
        )
        return chosen, shares

    def _activate(self, gate_up: Tensor) -> Tensor:
        """[pairs, 2 * inter], gates first, to [pairs, inter]."""
        activation = self._activation
        if not isinstance(activation, ClampedSwiglu):
            return self._silu_mul(gate_up)
        inter = gate_up.shape[1] // 2
        out = gate_up.new_empty(len(gate_up), inter)
        clamped_swiglu[(len(out), triton.cdiv(inter, COLUMNS))](
            out,
            gate_up,
            activation.alpha,
            activation.limit,
            inter,
            columns=COLUMNS,
            num_warps=4,
        )
        return out


def _multiply(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: tuple[Tensor, Tensor],
    pairs_per_row: int,
) -> None:
    """Multiply the rows of every expert; `groups` holds their order and starts."""
    num_experts, num_outputs, num_inputs = weight.shape
    tiling = row_tiling(x.dtype, max(1, len(out) // num_experts))
    slots = len(out) // tiling.rows + num_experts
    multiply_experts[(slots, triton.cdiv(num_outputs, tiling.outputs))](
        out,
        x,
        weight,
        weight if bias is None else bias,
        *groups,
        num_experts,
        num_outputs,
        num_inputs,
        pairs_per_row=pairs_per_row,
        has_bias=bias is not None,
        rows=tiling.rows,
        outputs=tiling.outputs,
        inputs=tiling.inputs,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _with(biases: Tensor | None, index: int, count: int, bias: Tensor | None) -> Tensor | None:
    """`biases` [count, n] with the bias of expert `index`; None if experts have none."""
    if bias is None:
        return biases
    if biases is None:
        biases = bias.new_zeros(count, len(bias))
    biases[index] = bias
    return biases
