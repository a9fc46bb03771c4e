"""Runs the code of transformers' classes on our paged KV cache; their attention must be pluggable.

Some modules are replaced, whose rounding on CPU depends on the whole step. Linears and attention use our kernels
already. What remains are activations and other elementwise functions (see
kernels/elementwise.py). Norms, softmax and top-k work row by row; sums, products and casts of single elements follow
IEEE 754.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.elementwise import elementwise
from millrace_shard.kernels.lora.adapter_table import AdapterRows, AdapterTable, running
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.models.interface import KVGeometry, KVLayer, MakeLayers, ModelInfo
from millrace_shard.models.transformers_backend.paged_attention import PagedAttention, attending
from millrace_shard.models.transformers_backend.supported import ShapeProbe, probed
from millrace_shard.models.transformers_backend.tensor_parallel import layer_shape

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
        return elementwise(self._function, x)


CAPTURED: tuple[str, ...] = ()
"""The types of SUPPORTED whose decodes a test on a GPU has captured in graphs with the results of eager steps.

The code of a class may read a value on the host, such as the longest position, and a graph would keep the value that it
has read during the capture. So the other types run eagerly.
"""


class TransformersModel:
    """A CausalModel around a transformers class.

    Projections and attention use our kernels, the rest is the class's code. On CPU with deterministic kernels, modules
    that are not batch invariant are replaced; elsewhere the model is not batch invariant.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        info: ModelInfo,
        kernels: Kernels,
        adapters: AdapterTable | None = None,
        *,
        ranks: int,
        is_listed: bool,
        scales: Sequence[tuple[float, float]] = (),
    ) -> None:
        """Take over `model`, whose attention implementation must be `paged_attention.NAME`. Raises UnsupportedModel.

        Its projections are sites of `adapters`, and it is one of `ranks` parts. Nothing is known of the operators of a
        class that is not listed, so that it is not batch invariant. `scales` are those
        of the keys and values of each layer, if there are any.
        """
        self._model = model.eval().requires_grad_(requires_grad=False)
        self._kernels = kernels
        self._adapters = adapters
        shapes = probed(self._model)
        _check_windows(model, shapes.windows)
        if ranks > 1:
            _check_heads(model, shapes, ranks)
        windows = set(shapes.windows.values())
        self.info = replace(
            info,
            window_size=windows.pop() if len(windows) == 1 else None,
            capturable=info.model_type in CAPTURED,
            batch_invariant=is_listed
            and wants_invariance(kernels, model.device)
            and not has_own_products(model),
        )
        self.geometry = KVGeometry(
            tuple(
                KVLayer(*shapes.layers[i], scales=scales[i])
                if i < len(scales)
                else KVLayer(*shapes.layers[i])
                for i in range(len(shapes.layers))
            )
        )

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """Logits of `batch.logit_rows` over the whole vocabulary, [R, vocab] float32."""
        with (
            attending(PagedAttention(self._kernels, batch, cache)),
            running(self._adapters, tokens=batch.adapters, logits=batch.logit_adapters),
        ):
            rows = 0 if batch.all_logits else batch.logit_rows
            return self._run(batch.ids, batch.positions, rows).float()

    @torch.inference_mode()
    def states(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """The inputs of the head for `batch.logit_rows`, [R, hidden]."""
        with (
            attending(PagedAttention(self._kernels, batch, cache)),
            running(self._adapters, tokens=batch.adapters),
        ):
            output = self._model.get_decoder()(
                input_ids=batch.ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
            )
        return batch.logit_states(output.last_hidden_state[0])

    @torch.inference_mode()
    def logits(self, states: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Logits [R, vocab] float32 of `states` [R, hidden], by the class's code, which may scale or cap them."""
        with (
            _bypassing(self._model.get_decoder(), states.unsqueeze(0)),
            running(self._adapters, logits=adapters),
        ):
            output = self._model(inputs_embeds=states.unsqueeze(0), use_cache=False)
        logits: Tensor = output.logits[0]
        return logits.float()

    def first_layers(self, count: int) -> TransformersModel:  # noqa: ARG002
        """The whole model: a class may compute anything between its layers."""
        return self

    def with_layers(self, make: MakeLayers) -> TransformersModel:  # noqa: ARG002
        """The same model, for the same reason."""
        return self

    def _run(self, ids: Tensor, positions: Tensor, logit_rows: Tensor | int) -> Tensor:
        """Logits of `logit_rows`, or of all tokens if it is 0."""
        output = self._model(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        logits: Tensor = output.logits[0]
        return logits


@contextmanager
def _bypassing(decoder: nn.Module, states: Tensor) -> Iterator[None]:
    """Make `decoder` return `states` [1, R, hidden] inside, whatever its inputs are."""
    output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states)
    # Classes with a mixture of experts read this attribute.
    output.router_logits = None
    decoder.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del decoder.forward


def _check_windows(model: PreTrainedModel, windows: dict[int, int | None]) -> None:
    """Raise UnsupportedModel if a class does not pass the windows of its config to the attention function."""
    for layer, kind in enumerate(getattr(model.config, "layer_types", None) or ()):
        if kind != ("full_attention" if windows[layer] is None else "sliding_attention"):
            raise UnsupportedModel(
                f"layer_types[{layer}]={kind!r}, but {type(model).__name__} attends with window {windows[layer]}"
            )


def _check_heads(model: PreTrainedModel, shapes: ShapeProbe, ranks: int) -> None:
    """Raise UnsupportedModel unless each layer attends with the heads that this rank ought to have."""
    expected = layer_shape(model.config, ranks)
    for layer, (num_kv_heads, _) in shapes.layers.items():
        heads = shapes.num_heads[layer], num_kv_heads
        if heads != (expected.num_heads, expected.num_kv_heads):
            raise UnsupportedModel(
                f"on one of {ranks} shards, layer {layer} of {type(model).__name__} attends with {heads[0]} heads and "
                f"{heads[1]} key-value heads, not {expected.num_heads} and {expected.num_kv_heads}"
            )
