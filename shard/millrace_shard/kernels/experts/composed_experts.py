"""Experts as linears, one after the other: the oracle of the compiled experts, and the fallback without them."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.experts.expert_weights import ExpertsWeights
from millrace_shard.kernels.layer.activation import gate_function


class ComposedExperts:
    """Computes each expert over the rows that chose it, and adds up the results of a row in the order of its choice.

    A row's bits depend on the row alone if those of the linears do. The host waits for the choice.
    """

    def __init__(self, kernels: Kernels, weights: ExpertsWeights) -> None:
        router = weights.router
        self._logits = kernels.router(router.weight)
        self._bias, self._correction, self._rule = router.bias, router.correction, router.rule
        self._activate = gate_function(kernels.silu_mul, weights.activation)
        self._experts = [
            (kernels.linear_from(each.gate_up), kernels.linear_from(each.down))
            for each in weights.experts
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        logits = self._logits(x.float())
        if self._bias is not None:
            logits = logits + self._bias
        chosen, shares = self._rule.choose(logits, self._correction)
        results = x.new_zeros(*chosen.shape, x.shape[1])
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, ranks = torch.where(chosen == expert)
            gate_up, down = self._experts[expert]
            results[rows, ranks] = down(self._activate(gate_up(x[rows])))
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for result, share in zip(results.unbind(1), shares.unbind(1), strict=True):
            total = total + result.float() * share.unsqueeze(1)
        return total.to(x.dtype)
