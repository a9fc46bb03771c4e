"""A rank's part of embeddings and experts of a class, and the sums over the ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.models.transformers_backend.tensor_parallel.linear_share import part_of
from millrace_shard.models.transformers_backend.tensor_parallel.plan import (
    Style,
    TensorParallelPlan,
)
from millrace_shard.weights.unmapped_tensors import TensorUnmapper

_HALVED = frozenset((Style.PACKED_COLWISE, Style.PACKED_ROWWISE))
_LAST_AXIS = frozenset((Style.ROWWISE, Style.PACKED_ROWWISE))


def split_modules(
    model: nn.Module, plan: TensorParallelPlan, group: ProcessGroup, unmapper: TensorUnmapper
) -> None:
    """Keep the rank's part of embeddings and experts, copied out of the mapped files; linears are split elsewhere."""
    for name, module in list(model.named_modules()):
        style = plan.style(name)
        if style is Style.EXPERTS:
            _split_experts(name, module, plan, group, unmapper)
        elif style is Style.EMBEDDING:
            parent, _, own = name.rpartition(".")
            assert isinstance(module, nn.Embedding)
            setattr(model.get_submodule(parent), own, _split_embedding(module, group, unmapper))


class SplitEmbedding(nn.Module):
    """An embedding of which each rank has some rows."""

    def __init__(self, weight: Tensor, first: int, group: ProcessGroup) -> None:
        """`weight` [n, width] are the rows of the ids from `first` on; n is at least 1."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._first = first
        self._group = group

    def forward(self, ids: Tensor) -> Tensor:
        """Ids […] to embeddings […, width], on every rank."""
        local = ids - self._first
        elsewhere = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self._group.all_reduce(x.masked_fill_(elsewhere.unsqueeze(-1), 0))


def _split_embedding(
    whole: nn.Embedding, group: ProcessGroup, unmapper: TensorUnmapper
) -> SplitEmbedding:
    weight = whole.weight.detach()
    share = -(-len(weight) // group.world_size)
    first = min(group.rank * share, len(weight))
    rows = weight[first : first + share]
    with unmapper.releasing(weight):
        # The row of a rank without any stands for an id that does not exist.
        own = _copied(rows if len(rows) else weight[:1], unmapper)
    return SplitEmbedding(own, first, group)


def _split_experts(
    name: str,
    experts: nn.Module,
    plan: TensorParallelPlan,
    group: ProcessGroup,
    unmapper: TensorUnmapper,
) -> None:
    """Experts whose code takes its sizes from the parameters; `forward` returns the sum over the ranks."""
    for part, parameter in list(experts.named_parameters(recurse=False)):
        style, whole = plan.style(f"{name}.{part}"), parameter.detach()
        if style is Style.REPLICATED:
            continue
        axis = 2 if style in _LAST_AXIS else 1
        with unmapper.releasing(whole):
            stacked = whole.chunk(2, dim=axis) if style in _HALVED else (whole,)
            start, end = part_of(stacked[0].shape[axis], group.rank, group.world_size)
            own = torch.cat([each.narrow(axis, start, end - start) for each in stacked], dim=axis)
            setattr(experts, part, nn.Parameter(_copied(own, unmapper), requires_grad=False))
    experts.register_forward_hook(lambda _, __, out: group.all_reduce(out))


def _copied(own: Tensor, unmapper: TensorUnmapper) -> Tensor:
    """A copy of `own` on the device."""
    out = torch.empty(own.shape, dtype=unmapper.dtype_of(own), device=unmapper.device)
    unmapper.copy(out, own)
    return out
