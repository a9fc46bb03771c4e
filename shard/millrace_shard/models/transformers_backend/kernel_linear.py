"""The projections of a class of transformers, computed by our kernels, with the adapters of their rows."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from millrace_shard.kernels.base import Kernels, Linear
from millrace_shard.kernels.layer.layer_weights import LinearWeights
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.lora.lora_site import LoraPart, LoraSite
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_shard.model_loader.unmapped_tensors import TensorUnmapper


class KernelLinear(nn.Module):
    """A projection of a class, computed by our kernels."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] to […, out]."""
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class ProjectionReplacement:
    """Replaces every plain projection of a model; each becomes a site of the adapters, under its own name."""

    def __init__(
        self,
        kernels: Kernels,
        unmapper: TensorUnmapper,
        adapters: AdapterTable | None,
        head: nn.Module | None,
    ) -> None:
        """`head` is the module that computes logits."""
        self._kernels = kernels
        self._unmapper = unmapper
        self._adapters = adapters
        self._head = head

    def apply(self, module: nn.Module, prefix: str = "") -> None:
        """Replace the projections below `module`, whose names begin with `prefix`."""
        for name, child in list(module.named_children()):
            if type(child) in {nn.Linear, Conv1D}:
                setattr(module, name, KernelLinear(self._linear(child, prefix + name)))
            else:
                self.apply(child, f"{prefix}{name}.")

    def _linear(self, projection: nn.Module, name: str) -> Linear:
        kernels, unmapper = self._kernels, self._unmapper
        own = dict(projection.named_parameters(recurse=False))
        weight = own["weight"].detach()
        bias = own["bias"].detach().to(unmapper.device, copy=True) if "bias" in own else None
        with unmapper.releasing(weight):
            out_first = weight if type(projection) is nn.Linear else weight.t().contiguous()
            site = self._site(name, *out_first.shape, is_head=projection is self._head)
            if unmapper.is_unmapped(out_first):
                return kernels.adapted(kernels.linear(out_first, bias), site)
            stored = StoredWeight((out_first,), out_first.dtype, unmapper.device, unmapper.copy)
            return kernels.linear_from(LinearWeights(stored, bias, site))

    def _site(self, name: str, outputs: int, inputs: int, *, is_head: bool) -> LoraSite | None:
        if self._adapters is None:
            return None
        part = LoraPart(
            name=name,
            inputs=inputs,
            outputs=outputs,
            input_range=(0, inputs),
            output_range=(0, outputs),
        )
        return self._adapters.add_site([part], is_head=is_head)
