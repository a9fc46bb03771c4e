"""Runs the code of transformers' classes on our paged KV cache; their attention must be pluggable."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.logging import disable_progress_bar

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.lora.adapter_rows import AdapterRows
from millrace_shard.kernels.lora.adapter_table import AdapterTable, running
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.model_loader.read_ahead import ReadAhead
from millrace_shard.model_loader.safetensor_files import SafetensorFiles
from millrace_shard.model_loader.unmapped_tensors import TensorUnmapper
from millrace_shard.models.interface import KVGeometry, MakeLayers, ModelInfo
from millrace_shard.models.transformers_backend.batch_invariant import (
    has_own_products,
    make_batch_invariant,
)
from millrace_shard.models.transformers_backend.kernel_linear import ProjectionReplacement
from millrace_shard.models.transformers_backend.paged_attention import (
    NAME,
    PagedAttention,
    ShapeProbe,
    attending,
)
from millrace_shard.models.transformers_backend.table_rotary import use_rotary_table

SUPPORTED = (
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "opt",
    "stablelm",
    "starcoder2",
)
"""Tests compare the logits of each with eager attention, since a class that ignores the hook is silently wrong."""

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
    ) -> None:
        """Take over `model`, which must have been built with attention implementation NAME. Raises UnsupportedModel.

        Its projections are sites of `adapters`.
        """
        self._model = model.eval().requires_grad_(requires_grad=False)
        self._kernels = kernels
        self._adapters = adapters
        shapes = self._probe()
        _check_windows(model, shapes.windows)
        windows = set(shapes.windows.values())
        self.info = replace(
            info,
            window_size=windows.pop() if len(windows) == 1 else None,
            capturable=info.model_type in CAPTURED,
            batch_invariant=_wants_invariance(kernels, model.device)
            and not has_own_products(model),
        )
        self.geometry = KVGeometry(tuple(shapes.layers[i] for i in range(len(shapes.layers))))

    @classmethod
    def load(  # noqa: PLR0913
        cls,
        folder: Path,
        config: PretrainedConfig,
        info: ModelInfo,
        *,
        dtype: torch.dtype,
        kernels: Kernels,
        device: torch.device,
        max_total_tokens: int | None = None,
        adapters: AdapterTable | None = None,
    ) -> TransformersModel:
        """Read the checkpoint in `folder` tensor by tensor. Raises UnsupportedModel or WeightsError."""
        check_supported(config)
        files = SafetensorFiles(folder)
        files.close()
        with ReadAhead(files.paths()) as ahead:
            model = _read(folder, config, dtype)
            unmapper = TensorUnmapper(model, files.paths(), device, ahead)
            if device.type != "cpu":
                # Only CPU packs weights; elsewhere a tied head shares memory with the embeddings.
                unmapper.unmap_rest()
            head = model.get_output_embeddings()
            ProjectionReplacement(kernels, unmapper, adapters, head).apply(model)
            unmapper.unmap_rest()
        use_rotary_table(model, info.max_position_embeddings, max_total_tokens)
        if _wants_invariance(kernels, device):
            make_batch_invariant(model, kernels)
        return cls(model, info, kernels, adapters)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """Logits of `batch.logit_rows` over the whole vocabulary, [R, vocab] float32."""
        with (
            attending(PagedAttention(self._kernels, batch, cache)),
            running(self._adapters, tokens=batch.adapters, logits=batch.logit_adapters),
        ):
            wanted = 0 if batch.all_logits else batch.logit_rows
            return self._run(batch.ids, batch.positions, wanted).float()

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

    @torch.inference_mode()
    def _probe(self) -> ShapeProbe:
        """Run two tokens to find the shapes, since a class may differ from its config."""
        probe = ShapeProbe()
        tokens = torch.arange(2, device=self._model.device)
        with attending(probe):
            self._run(tokens, tokens, tokens)
        if not probe.layers or sorted(probe.layers) != list(range(len(probe.layers))):
            raise UnsupportedModel(f"{type(self._model).__name__} does not attend in every layer")
        return probe

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


def check_supported(config: PretrainedConfig) -> None:
    """Raise UnsupportedModel for architectures and quantised weights that are not supported."""
    if config.model_type not in SUPPORTED:
        raise UnsupportedModel(
            f"model_type {config.model_type!r} is not supported; beside the families of our own decoder these are: "
            f"{', '.join(SUPPORTED)}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            f"quantization_config is not supported for {config.model_type}, only for the families of our own decoder"
        )


def _check_windows(model: PreTrainedModel, windows: dict[int, int | None]) -> None:
    """Raise UnsupportedModel if a class does not pass the windows of its config to the attention function."""
    for layer, kind in enumerate(getattr(model.config, "layer_types", None) or ()):
        if kind != ("full_attention" if windows[layer] is None else "sliding_attention"):
            raise UnsupportedModel(
                f"layer_types[{layer}]={kind!r}, but {type(model).__name__} attends with window {windows[layer]}"
            )


def _wants_invariance(kernels: Kernels, device: torch.device) -> bool:
    """Only on CPU: on CUDA the order of a class's own sums depends on the number of rows."""
    return kernels.deterministic and device.type == "cpu"


def _read(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The class with its weights, which stay in the mapped file unless they need conversion."""
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, SafetensorError, RuntimeError) as error:
        raise WeightsError(f"the weights in {folder} cannot be read: {error}") from error
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise WeightsError(
            f"tensor {name} has shape {list(found)}, its config says {list(expected)}"
        )
    for name in sorted(report["missing_keys"]):
        raise WeightsError(f"tensor {name} is missing from the checkpoint")
    found_model: PreTrainedModel = model
    return found_model
