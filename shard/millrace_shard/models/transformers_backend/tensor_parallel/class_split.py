"""Whether the ranks of a group can share a class by its tensor-parallel plan, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PretrainedConfig

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.models.transformers_backend.class_of import class_of, skeleton
from millrace_shard.models.transformers_backend.tensor_parallel.linear_share import (
    INPUTS,
    OUTPUTS,
    is_divisible,
)
from millrace_shard.models.transformers_backend.tensor_parallel.plan import (
    Style,
    TensorParallelPlan,
)

_OF_LINEARS = OUTPUTS | INPUTS
_OF_EXPERTS = frozenset((Style.PACKED_COLWISE, Style.PACKED_ROWWISE, Style.COLWISE, Style.ROWWISE))
_Matrix = tuple[Style, int, int]
"""Style, outputs and inputs."""


def plan_for(config: PretrainedConfig, ranks: int) -> TensorParallelPlan:
    """How `ranks` share the class of `config`. Raises UnsupportedModel, naming the possible numbers of ranks."""
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
