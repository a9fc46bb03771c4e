"""Reads what Gemma 4's layers have in addition to attention and a dense feed-forward half."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, LayerEnd, MlpBlock
from millrace_shard.kernels.gemma4_blocks import (
    BesideWeights,
    InputGateWeights,
    LayerInputs,
    LayerInputsWeights,
    MlpBesideExperts,
    ScaledEnd,
)
from millrace_shard.kernels.layer_weights import LinearWeights, MlpWeights, NormWeights
from millrace_shard.models.linear_loader import ExpertsLoader, LinearLoader, Part
from millrace_shard.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, NormSpec
from millrace_shard.weights.weights import Weights

GATE, OUT = "per_layer_input_gate", "per_layer_projection"
"""Modules of a layer's further input."""
PROJECT, TABLE = "model.per_layer_model_projection", "model.embed_tokens_per_layer"
"""Modules that make the further inputs of all layers."""

Norm = Callable[[str, NormSpec, int], NormWeights]
"""Reads a norm by its name and size."""


class Gemma4Loader:
    """Reads further inputs of layers, numbers that scale them, and experts next to dense halves."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        kernels: Kernels,
        linears: LinearLoader,
        experts: ExpertsLoader,
        group: ProcessGroup,
        norm: Norm,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._kernels = kernels
        self._linears = linears
        self._experts = experts
        self._group = group
        self._norm = norm

    def layer_inputs(self) -> tuple[Tensor, LayerInputs] | None:
        """The rank's rows of the table of further inputs, and what makes the inputs of all layers of its rows."""
        inputs, spec = self._spec.layer_inputs, self._spec
        if inputs is None:
            return None
        width = len(spec.layers) * inputs.dim
        table = self._weights.vocabulary(f"{TABLE}.weight", inputs.vocab_size, width)
        norm = self._norm("model.per_layer_projection_norm", spec.norm, inputs.dim)
        project = self._whole("", PROJECT, spec.hidden_size, width)
        weights = LayerInputsWeights(project=project, norm=norm, dim=inputs.dim)
        made = LayerInputs(self._kernels, weights)
        self._weights.release()
        return table, made

    def end(self, index: int, prefix: str, layer: LayerSpec) -> LayerEnd | None:
        """What layer `index` does to the state at last; None: nothing."""
        inputs, hidden = self._spec.layer_inputs, self._spec.hidden_size
        if inputs is None and not layer.scaled:
            return None
        gate = None
        if inputs is not None:
            gate = InputGateWeights(
                index=index,
                gate=self._whole(prefix, GATE, hidden, inputs.dim),
                out=self._whole(prefix, OUT, inputs.dim, hidden),
                norm=self._norm(f"{prefix}post_per_layer_input_norm", layer.norm, hidden),
                activation=inputs.activation,
            )
        scalar = self._weights.replicated(f"{prefix}layer_scalar", 1) if layer.scaled else None
        end = ScaledEnd(self._kernels, gate, scalar)
        self._weights.release()
        return end

    def beside(
        self, prefix: str, mlp: MlpWeights, experts: ExpertsSpec, norm: NormSpec
    ) -> MlpBlock:
        """The dense half `mlp` with `experts` next to it."""
        spec, weights, group = self._spec, self._weights, self._group
        hidden = spec.hidden_size

        read = self._experts.read(prefix, experts, spec.names.layer.experts, None).experts
        count = experts.router.num_experts
        factors = weights.replicated(f"{prefix}router.per_expert_scale", count, dtype=torch.float32)
        scale = weights.replicated(f"{prefix}router.scale", hidden, dtype=torch.float32)
        before = self._norm(f"{prefix}pre_feedforward_layernorm_2", norm, hidden)
        block = MlpBesideExperts(
            self._kernels,
            BesideWeights(
                mlp=mlp,
                after_mlp=self._norm(f"{prefix}post_feedforward_layernorm_1", norm, hidden),
                router_norm=replace(before, weight=scale * hidden**-0.5),
                before_experts=before,
                experts=replace(read, router=replace(read.router, share_factors=factors)),
                after_experts=self._norm(f"{prefix}post_feedforward_layernorm_2", norm, hidden),
            ),
            group.all_reduce if group.world_size > 1 else None,
            is_first=group.rank == 0,
        )
        weights.release()
        return block

    def _whole(self, prefix: str, name: str, inputs: int, outputs: int) -> LinearWeights:
        """A linear that every rank has whole."""
        parts = (Part(name, 1, outputs),)
        return self._linears.columns(prefix, parts, inputs, fused=None, bias=False)
