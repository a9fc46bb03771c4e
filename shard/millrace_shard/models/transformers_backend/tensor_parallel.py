"""A rank's part of a class of transformers, by the tensor-parallel plan of the class, which is read as data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.models.transformers_backend.supported import class_of, skeleton
from millrace_shard.weights.unmapped_tensors import TensorUnmapper


class Style(Enum):
    """The parts of a module or parameter that ranks have; the values are transformers' names."""

    REPLICATED = "replicate"
    """Each rank has the whole."""
    COLWISE = "colwise"
    """Its part of the outputs."""
    COLWISE_GATHER = "colwise_gather_output"
    """Its part of the outputs, which are then gathered: the class's code sees all of them."""
    ROWWISE = "rowwise"
    """Its part of the inputs, which arrive split; the results are summed."""
    ROWWISE_SPLIT = "rowwise_split_input"
    """Its part of the inputs, which arrive whole; the results are summed."""
    PACKED_COLWISE = "packed_colwise"
    """Its part of the outputs of each of two matrices, which are stacked in one."""
    PACKED_ROWWISE = "packed_rowwise"
    """Its part of the inputs, or last axis, of each of two matrices that lie side by side."""
    EMBEDDING = "embedding_rowwise"
    """Its rows of an embedding; the results are summed."""
    EXPERTS = "moe_tp_experts"
    """A mixture's experts, whose parameters have their own styles; the results are summed."""


_ALIASES = {
    "colwise_rep": Style.COLWISE_GATHER,
    "replicated_with_grad_allreduce": Style.REPLICATED,
    "rowwise_rep": Style.ROWWISE_SPLIT,
}
_STYLES = {style.value: style for style in Style} | _ALIASES


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """Styles by the name of a module or parameter, in which `*` stands for a number; the rest is replicated."""

    styles: Mapping[str, Style]

    @staticmethod
    def of(config: PretrainedConfig, kind: type[PreTrainedModel]) -> TensorParallelPlan:
        """The plan for `kind`. Raises UnsupportedModel if there is none, or if it has an unknown style."""
        base = config.base_model_tp_plan
        if not base:
            raise UnsupportedModel(
                f"{config.model_type} runs on one shard only: {kind.__name__} has no tensor-parallel plan"
            )
        named = {f"{kind.base_model_prefix}.{name}": style for name, style in base.items()}
        named |= getattr(kind, "_tp_plan", None) or {}
        for name, style in named.items():
            if style not in _STYLES:
                raise UnsupportedModel(
                    f"{config.model_type} runs on one shard only: its tensor-parallel plan has style {style!r} for "
                    f"{name}; the known styles are: {', '.join(sorted(_STYLES))}"
                )
        return TensorParallelPlan({name: _STYLES[style] for name, style in named.items()})

    @staticmethod
    def whole() -> TensorParallelPlan:
        return TensorParallelPlan({})

    def style(self, name: str) -> Style:
        return self.styles.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), Style.REPLICATED)

    @property
    def splits_heads(self) -> bool:
        """Whether each rank attends with its part of the heads, since a projection of an attention is split."""
        return any(
            style is Style.COLWISE and "att" in name.rpartition(".")[0].rpartition(".")[2]
            for name, style in self.styles.items()
        )


Span = tuple[int, int]
"""A half-open range."""
OUTPUTS = frozenset((Style.COLWISE, Style.COLWISE_GATHER, Style.PACKED_COLWISE))
"""Styles that split the outputs."""
INPUTS = frozenset((Style.ROWWISE, Style.ROWWISE_SPLIT))
"""Styles that split the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShare:
    """The part of a linear [outputs, inputs] that one rank has."""

    style: Style
    outputs: tuple[Span, ...]
    """Ranges of the outputs, one after the other."""
    inputs: Span
    padding: int = 0
    """Zero rows behind the outputs, so that the parts of all ranks have one size."""

    @staticmethod
    def of(style: Style, outputs: int, inputs: int, group: ProcessGroup) -> LinearShare:
        """The share of `group.rank`; `outputs` or `inputs` must be as `is_divisible` requires."""
        rank, ranks = group.rank, group.world_size
        if style is Style.PACKED_COLWISE:
            half = outputs // 2
            first, second = (_shifted(part_of(half, rank, ranks), by) for by in (0, half))
            return LinearShare(style=style, outputs=(first, second), inputs=(0, inputs))
        if style is Style.COLWISE_GATHER:
            size = -(-outputs // ranks)
            start, end = (min(each * size, outputs) for each in (rank, rank + 1))
            return LinearShare(
                style=style,
                outputs=((start, end),),
                inputs=(0, inputs),
                padding=size - (end - start),
            )
        return LinearShare(
            style=style,
            outputs=(part_of(outputs, rank, ranks) if style is Style.COLWISE else (0, outputs),),
            inputs=part_of(inputs, rank, ranks) if style in INPUTS else (0, inputs),
        )

    @property
    def is_summed(self) -> bool:
        return self.style in INPUTS

    def weights(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The parts of `weight` [outputs, inputs], as views, and the padding."""
        slices = tuple(weight[slice(*span), slice(*self.inputs)] for span in self.outputs)
        if not self.padding:
            return slices
        return (*slices, weight.new_zeros(self.padding, weight.shape[1]))

    def bias(self, bias: Tensor) -> Tensor:
        """The part of `bias` [outputs] and zeros for the padding."""
        slices = [bias[slice(*span)] for span in self.outputs]
        return torch.cat([*slices, bias.new_zeros(self.padding)])


def is_divisible(style: Style, outputs: int, inputs: int, ranks: int) -> bool:
    """Whether `ranks` can share a linear, or the matrices of experts, of `style`."""
    if style is Style.PACKED_COLWISE:
        return outputs % (2 * ranks) == 0
    if style is Style.PACKED_ROWWISE:
        return inputs % (2 * ranks) == 0
    if style is Style.COLWISE:
        return outputs % ranks == 0
    return style not in INPUTS or inputs % ranks == 0


def part_of(size: int, rank: int, ranks: int) -> Span:
    """The range of a rank in `size` items, which `ranks` divides."""
    share = size // ranks
    return rank * share, (rank + 1) * share


def _shifted(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by


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
            parent, _, attribute = name.rpartition(".")
            assert isinstance(module, nn.Embedding)
            setattr(
                model.get_submodule(parent), attribute, _split_embedding(module, group, unmapper)
            )


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
    out = torch.empty(own.shape, dtype=unmapper.dtype_of(own), device=unmapper.device)
    unmapper.copy(out, own)
    return out


_OF_LINEARS = OUTPUTS | INPUTS
_OF_EXPERTS = frozenset((Style.PACKED_COLWISE, Style.PACKED_ROWWISE, Style.COLWISE, Style.ROWWISE))
_Matrix = tuple[Style, int, int]
"""Style, outputs and inputs."""


def plan_for(config: PretrainedConfig, ranks: int) -> TensorParallelPlan:
    """The split of the class of `config` over `ranks`. Raises UnsupportedModel with the possible numbers."""
    if ranks == 1:
        return TensorParallelPlan.whole()
    kind = class_of(config)
    plan = TensorParallelPlan.of(config, kind)
    matrices = set(_matrices(skeleton(config), plan, kind.__name__))
    heads, kv_heads = head_counts(config)
    possible = [
        each
        for each in range(1, heads + 1)
        if not (plan.splits_heads and (heads % each or kv_heads % each))
        and all(is_divisible(*matrix, each) for matrix in matrices)
    ]
    if ranks not in possible:
        raise UnsupportedModel(
            f"{ranks} shards cannot share {heads} attention heads, {kv_heads} key-value heads and the linears of "
            f"{config.model_type}; these numbers of shards work: {', '.join(map(str, possible))}"
        )
    return plan


def layer_shape(config: PretrainedConfig, ranks: int) -> LayerShape:
    """The shape of the attention of one rank. Raises as `plan_for`."""
    shared = ranks if plan_for(config, ranks).splits_heads else 1
    heads, kv_heads = head_counts(config)
    softcap = getattr(config, "attn_logit_softcapping", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return LayerShape(
        num_heads=heads // shared,
        num_kv_heads=kv_heads // shared,
        head_dim=int(head_dim),
        kinds=tuple((window, softcap) for window in _windows(config)),
    )


def head_counts(config: PretrainedConfig) -> tuple[int, int]:
    """Attention heads and key-value heads of the whole model."""
    heads = int(config.num_attention_heads)
    ungrouped = 1 if getattr(config, "multi_query", False) else heads
    return heads, int(getattr(config, "num_key_value_heads", None) or ungrouped)


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """The attention windows that layers of a class may have, each once."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    return tuple(dict.fromkeys(window if kind == "sliding_attention" else None for kind in kinds))


def _matrices(model: nn.Module, plan: TensorParallelPlan, kind: str) -> Iterator[_Matrix]:
    """The matrices that are split. Raises UnsupportedModel for a style that does not fit its module."""
    for name, module in model.named_modules():
        style = plan.style(name)
        if style in _OF_LINEARS:
            _check(isinstance(module, nn.Linear), kind, name, module, style)
            assert isinstance(module, nn.Linear)
            yield style, module.out_features, module.in_features
        elif style is not Style.EXPERTS:
            is_embedding = style is Style.EMBEDDING and type(module) is nn.Embedding
            _check(is_embedding or style is Style.REPLICATED, kind, name, module, style)
        for part, parameter in module.named_parameters(recurse=False):
            own = plan.style(f"{name}.{part}")
            if own is Style.REPLICATED:
                continue
            fits = style is Style.EXPERTS and own in _OF_EXPERTS and parameter.ndim == 3
            _check(fits, kind, f"{name}.{part}", parameter, own)
            yield own, parameter.shape[1], parameter.shape[2]


def _check(fits: bool, kind: str, name: str, found: object, style: Style) -> None:  # noqa: FBT001
    if not fits:
        raise UnsupportedModel(
            f"the tensor-parallel plan of {kind} has style {style.value!r} for {name}, "
            f"a {type(found).__name__}, and is not supported"
        )
