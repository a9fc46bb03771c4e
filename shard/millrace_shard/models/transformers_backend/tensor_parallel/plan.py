"""The tensor-parallel plan of a class of transformers, read as data from its config and its class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from transformers import PretrainedConfig, PreTrainedModel

from millrace_shard.errors import UnsupportedModel


class Style(Enum):
    """What the ranks have of a module or parameter; the values are transformers' names."""

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
    """A mixture's experts, whose parameters have styles of their own; the results are summed."""


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
        """The plan of a single rank."""
        return TensorParallelPlan({})

    def style(self, name: str) -> Style:
        """The style of the module or parameter `name`."""
        return self.styles.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), Style.REPLICATED)

    @property
    def splits_heads(self) -> bool:
        """Whether each rank attends with its part of the heads, since a projection of an attention is split."""
        return any(
            style is Style.COLWISE and "att" in name.rpartition(".")[0].rpartition(".")[2]
            for name, style in self.styles.items()
        )
