"""Launches a layer's experts without transfers or waits; grids depend only on shapes, for CUDA graphs."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.cuda.expert_stack import ExpertStack, Groups
from millrace_shard.kernels.cuda.triton_choice import choose, group_pairs
from millrace_shard.kernels.cuda.triton_experts import (
    add_experts,
    clamped_swiglu,
)
from millrace_shard.kernels.expert_weights import ExpertsWeights, Scoring
from millrace_shard.kernels.layer_weights import ClampedSwiglu, gate_function

COLUMNS = 1024
"""Columns per program of the kernels without products."""
MANY_ROWS = 256
"""Rows of experts from which fast mode stores results in bfloat16: with many, a step writes and reads them at the
memory's speed."""
LEAST_ROWS = 64
"""Rows of an expert, on average, from which torch's products are worth the copies into the order of the experts."""


class GroupedExperts:
    """Router, experts and their sum; the rows of an expert are multiplied together."""

    def __init__(
        self, kernels: Kernels, weights: ExpertsWeights, *, by_torch: bool = False
    ) -> None:
        """`kernels` computes the logits of the router, and all gates but gpt-oss's.

        `by_torch`, torch's grouped products multiply many rows, if weights are plain, see `ExpertStack.is_plain`.
        """
        self._router = weights.router
        self._is_fast = not kernels.deterministic
        self._logits = kernels.router(weights.router.weight)
        self._gates, self._activation = (
            gate_function(kernels, weights.activation),
            weights.activation,
        )
        count = weights.num_experts
        self._gate_up, self._down = ExpertStack(count), ExpertStack(count)
        for index, expert in enumerate(weights.experts):
            self._gate_up.add(index, expert.gate_up)
            self._down.add(index, expert.down)
        self._gate_up.finish()
        self._down.finish()
        stacks = self._gate_up, self._down
        self._by_torch = by_torch and all(each.is_plain for each in stacks)

    @property
    def num_bytes(self) -> int:
        """Memory of the experts."""
        return self._gate_up.num_bytes + self._down.num_bytes

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
        if self._by_torch and chosen.numel() >= LEAST_ROWS * count:
            results = self._multiply_sorted(x, order.long(), starts)
        else:
            results = self._multiply(x, (order, starts))
        grid = len(x), triton.cdiv(x.shape[1], COLUMNS)
        add_experts[grid](
            out, results, shares, x.shape[1], top_k=top_k, columns=COLUMNS, num_warps=4
        )
        return out

    def _multiply(self, x: Tensor, groups: Groups) -> Tensor:
        """What the experts make of each pair, [pairs, hidden]."""
        (num_pairs,), top_k = groups[0].shape, self._router.rule.top_k
        gate_up = x.new_empty(num_pairs, self._gate_up.num_outputs)
        self._gate_up.multiply(gate_up, x.contiguous(), groups, top_k, expands=self._is_fast)
        gated = self._activate(gate_up)
        results = x.new_empty(num_pairs, x.shape[1], dtype=self._dtype_of_results(gated))
        self._down.multiply(results, gated, groups, 1, expands=self._is_fast)
        return results

    def _multiply_sorted(self, x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        """As `_multiply`, in the dtype of `x`: the pairs stay in the order of the experts between both products."""
        rows = x.index_select(0, order // self._router.rule.top_k)
        gated = self._activate(self._gate_up.multiply_sorted(rows, starts))
        in_order = self._down.multiply_sorted(gated, starts)
        return torch.empty_like(in_order).index_copy_(0, order, in_order)

    def _dtype_of_results(self, gated: Tensor) -> torch.dtype:
        """Of products with experts, before they are added. Float16 might not have their range."""
        is_narrow = self._is_fast and gated.dtype == torch.bfloat16 and len(gated) >= MANY_ROWS
        return gated.dtype if is_narrow else torch.float32

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
            members=rule.group_members,
            has_bias=router.bias is not None,
            has_correction=router.correction is not None,
            num_warps=1,
        )
        return chosen, shares

    def _activate(self, gate_up: Tensor) -> Tensor:
        """[pairs, 2 * inter], gates first, to [pairs, inter]."""
        activation = self._activation
        if not isinstance(activation, ClampedSwiglu):
            return self._gates(gate_up)
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
