"""Batch-invariant modules: replacements for modules of transformers whose rounding on CPU depends on the whole step.

Linears and attention use our kernels already. What remains are activations and other elementwise functions (see
kernels/elementwise.py), and the products of a mixture of experts, whose number of rows depends on the routing of the
whole step. Norms, softmax and top-k work row by row; sums, products and casts of single elements follow IEEE 754.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from millrace_shard.kernels.base import Kernels, Linear
from millrace_shard.kernels.elementwise import elementwise

_ACTIVATIONS = {kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()}
_EXACT = {nn.ReLU}
_MIXTURES = ("MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock")


def make_batch_invariant(model: PreTrainedModel, kernels: Kernels) -> None:
    """Replace the modules of `model` that are not batch invariant; its plain projections must use `kernels` already."""
    _replace_children(model, kernels)


def has_own_products(model: nn.Module) -> bool:
    """Whether `model` has matrices, other than embeddings and norms, by which its own code multiplies."""
    return any(
        parameter.ndim > 1
        for module in model.modules()
        if not isinstance(module, nn.Embedding) and "Norm" not in type(module).__name__
        for parameter in module.parameters(recurse=False)
    )


def _replace_children(module: nn.Module, kernels: Kernels) -> None:
    for name, child in list(module.named_children()):
        if type(child) in _ACTIVATIONS - _EXACT:
            setattr(module, name, Activation(child))
            continue
        _replace_children(child, kernels)
        if type(child).__name__ in _MIXTURES:
            setattr(module, name, Mixture(child, kernels))


class Activation(nn.Module):
    """An activation function whose bits do not depend on the place of an element."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to `x` of any shape."""
        return elementwise(self._function, x)


class Mixture(nn.Module):
    """Mixtral's and Qwen2-MoE's mixture of experts, with the linears of our kernels."""

    def __init__(self, block: Any, kernels: Kernels) -> None:  # noqa: ANN401
        """Take over a class's `block`, whose shared expert, if any, is invariant already."""
        super().__init__()
        router = block.gate
        self._router = kernels.linear(router.weight.detach())
        self._top_k: int = router.top_k
        self._normalised = bool(getattr(router, "norm_topk_prob", True))
        self._experts = Experts(block.experts, kernels)
        self._shared: nn.Module | None = getattr(block, "shared_expert", None)
        self._shared_gate: nn.Module | None = getattr(block, "shared_expert_gate", None)

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, T, hidden] to [1, T, hidden]."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        out: Tensor = self._experts(rows, *self._route(rows))
        if self._shared is not None and self._shared_gate is not None:
            out = out + elementwise(torch.sigmoid, self._shared_gate(rows)) * self._shared(rows)
        return out.view(hidden.shape)

    def _route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each row, [T, top_k] int64, and their weights."""
        scores = torch.softmax(self._router(rows), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(scores, self._top_k, dim=-1)
        if self._normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # Qwen2-MoE, the only one with a shared expert, rounds the weights.
        return chosen, weights if self._shared is None else weights.to(rows.dtype)


class Experts(nn.Module):
    """The experts of a mixture, each a gated pair of linears over the rows that are routed to it."""

    def __init__(self, experts: Any, kernels: Kernels) -> None:  # noqa: ANN401
        """Take over the weights of a class's `experts`: [E, 2 * inter, hidden], gates first, and [E, hidden, inter]."""
        super().__init__()
        self._gate_up = [kernels.linear(weight) for weight in experts.gate_up_proj.detach()]
        self._down = [kernels.linear(weight) for weight in experts.down_proj.detach()]
        self._activation = experts.act_fn

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum, [T, hidden], of the `chosen` experts [T, k] of `rows` [T, hidden]; `weights` are [T, k]."""
        num_rows, num_choices = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self._gate_up)).tolist()
        gate_up = _by_expert(self._gate_up, rows[order // num_choices], counts)
        gate, up = gate_up.chunk(2, dim=-1)
        sorted_out = _by_expert(self._down, self._activation(gate) * up, counts)
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        out = out.view(num_rows, num_choices, -1) * weights.unsqueeze(-1)
        total = out[:, 0].float()
        # The order is fixed: a reduction would add in an order that depends on the number of rows.
        for choice in range(1, num_choices):
            total = total + out[:, choice]
        return total.to(rows.dtype)


def _by_expert(linears: list[Linear], rows: Tensor, counts: list[int]) -> Tensor:
    """Apply linear e to the next `counts[e]` of `rows`; returns all results, concatenated."""
    parts = [
        linear(part)
        for linear, part in zip(linears, torch.split(rows, counts), strict=True)
        if len(part)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
