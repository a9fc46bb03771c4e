"""Batch-invariant modules: replacements for modules of transformers whose rounding on CPU depends on the whole step.

Linears and attention use our kernels already. What remains are activations and other elementwise functions (see
kernels/elementwise.py). Norms, softmax and top-k work row by row; sums, products and casts of single elements follow
IEEE 754.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.elementwise import elementwise

_ACTIVATIONS = {kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()}
_EXACT = {nn.ReLU}


def wants_invariance(kernels: Kernels, device: torch.device) -> bool:
    """Only on CPU: on CUDA the order of a class's own sums depends on the number of rows."""
    return kernels.deterministic and device.type == "cpu"


def make_batch_invariant(module: nn.Module) -> None:
    """Replace the modules below `module` that are not batch invariant; its projections must use our kernels already."""
    for name, child in list(module.named_children()):
        if type(child) in _ACTIVATIONS - _EXACT:
            setattr(module, name, Activation(child))
        else:
            make_batch_invariant(child)


def has_own_products(model: nn.Module) -> bool:
    """Whether `model` has matrices, other than embeddings and norms, by which its own code multiplies."""
    return any(
        parameter.ndim > 1
        for module in model.modules()
        if not isinstance(module, nn.Embedding) and "Norm" not in type(module).__name__
        for parameter in module.parameters(recurse=False)
    )


class Activation(nn.Module):
    """An activation function whose bits do not depend on the place of an element."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to `x` of any shape."""
        return elementwise(self._function, x)
