"""The projections of a class of transformers, computed by our kernels, with the adapters of their rows."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, Linear
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.lora.adapter_table import AdapterTable, LoraPart, LoraSite
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_shard.models.transformers_backend.tensor_parallel import (
    LinearShare,
    Style,
    TensorParallelPlan,
)
from millrace_shard.weights.unmapped_tensors import TensorUnmapper


class KernelLinear(nn.Module):
    """A projection of a class, computed by our kernels."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] to […, out]."""
        y = self._rows(x.reshape(-1, x.shape[-1]))
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _rows(self, rows: Tensor) -> Tensor:
        return self._linear(rows)


class SharedLinear(KernelLinear):
    """A projection of which each rank has a share, with what the ranks exchange before or after it."""

    def __init__(
        self, linear: Linear, share: LinearShare, outputs: int, group: ProcessGroup
    ) -> None:
        """`outputs` counts the outputs of the whole projection."""
        super().__init__(linear)
        self._share = share
        self._outputs = outputs
        self._group = group

    def _rows(self, rows: Tensor) -> Tensor:
        share = self._share
        if share.style is Style.ROWWISE_SPLIT:
            rows = rows[:, slice(*share.inputs)].contiguous()
        y = self._linear(rows)
        if share.style is Style.COLWISE_GATHER:
            return self._group.all_gather(y)[:, : self._outputs]
        return self._group.all_reduce(y) if share.is_summed else y


class ProjectionReplacement:
    """Replaces every plain projection of a model; each becomes a site of the adapters, under its own name."""

    def __init__(
        self,
        kernels: Kernels,
        unmapper: TensorUnmapper,
        adapters: AdapterTable | None,
        head: nn.Module | None,
        plan: TensorParallelPlan,
        group: ProcessGroup,
    ) -> None:
        """`head` is the module that computes logits."""
        self._kernels = kernels
        self._unmapper = unmapper
        self._adapters = adapters
        self._head = head
        self._plan = plan
        self._group = group

    def apply(self, module: nn.Module, prefix: str = "") -> None:
        """Replace the projections below `module`, whose names begin with `prefix`."""
        for name, child in list(module.named_children()):
            if type(child) in {nn.Linear, Conv1D}:
                setattr(module, name, self._replaced(child, prefix + name))
            else:
                self.apply(child, f"{prefix}{name}.")

    def _replaced(self, projection: nn.Module, name: str) -> KernelLinear:
        parameters = dict(projection.named_parameters(recurse=False))
        weight = parameters["weight"].detach()
        bias = parameters["bias"].detach() if "bias" in parameters else None
        with self._unmapper.releasing(weight):
            whole = weight if type(projection) is nn.Linear else weight.t().contiguous()
            style, (outputs, inputs) = self._plan.style(name), whole.shape
            share = LinearShare.of(style, outputs, inputs, self._group)
            is_head = projection is self._head
            site = self._site(name, share, outputs, inputs, is_head=is_head)
            linear = (self._head_linear if is_head else self._linear)(whole, bias, share, site)
        if style is Style.REPLICATED:
            return KernelLinear(linear)
        return SharedLinear(linear, share, outputs, self._group)

    def _linear(
        self, whole: Tensor, bias: Tensor | None, share: LinearShare, site: LoraSite | None
    ) -> Linear:
        """Pack or copy the rank's share of `whole` [out, in] and `bias` [out]."""
        own_bias = self._own_bias(bias, share)
        if self._is_ready(whole, share):
            return self._kernels.adapted(self._kernels.linear(whole, own_bias), site)
        return self._kernels.linear_from(LinearWeights(self._stored(whole, share), own_bias, site))

    def _head_linear(
        self, whole: Tensor, bias: Tensor | None, share: LinearShare, site: LoraSite | None
    ) -> Linear:
        """The same for the output head, whose results are float32, and which kernels for int8 do not quantise."""
        own_bias = self._own_bias(bias, share)
        ready = self._is_ready(whole, share)
        head = self._kernels.head(whole if ready else self._stored(whole, share).copied(), site)
        return head if own_bias is None else lambda x: head(x) + own_bias

    def _own_bias(self, bias: Tensor | None, share: LinearShare) -> Tensor | None:
        # The results of the ranks are summed, so only rank 0 adds the bias.
        if bias is None or (share.is_summed and self._group.rank):
            return None
        unmapper = self._unmapper
        return share.bias(bias).to(unmapper.device, unmapper.dtype_of(bias), copy=True)

    def _is_ready(self, whole: Tensor, share: LinearShare) -> bool:
        """Whether kernels can take `whole` over as it is."""
        unmapper = self._unmapper
        is_cast = whole.dtype != unmapper.dtype_of(whole)
        return share.style is Style.REPLICATED and unmapper.is_unmapped(whole) and not is_cast

    def _stored(self, whole: Tensor, share: LinearShare) -> StoredWeight:
        unmapper = self._unmapper
        dtype = unmapper.dtype_of(whole)
        return StoredWeight(share.weights(whole), dtype, unmapper.device, unmapper.copy)

    def _site(
        self, name: str, share: LinearShare, outputs: int, inputs: int, *, is_head: bool
    ) -> LoraSite | None:
        if self._adapters is None:
            return None
        parts, first = list[LoraPart](), 0
        for start, end in share.outputs:
            parts.append(
                LoraPart(
                    name=name,
                    inputs=inputs,
                    outputs=outputs,
                    input_range=share.inputs,
                    output_range=(start, end),
                    first_output=first,
                    adds_bias=not (share.is_summed and self._group.rank),
                )
            )
            first += end - start
        return self._adapters.add_site(parts, is_head=is_head)
