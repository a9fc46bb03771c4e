"""Loads a model from a folder, by our own decoder or by the transformers backend."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.layer_weights import Activation
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.models.decoder import Decoder
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.families.registry import FAMILIES
from millrace_shard.models.interface import CausalModel, ModelInfo
from millrace_shard.models.layer_loader import LayerLoader
from millrace_shard.models.quantized import quantization_of
from millrace_shard.models.rope import RopeOverride, RopeTables
from millrace_shard.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, NormSpec
from millrace_shard.models.split import check_split
from millrace_shard.models.unread_tensors import check_biases, check_unread
from millrace_shard.weights.gguf.files import MODEL
from millrace_shard.weights.quantized.made_at_load import MadeAtLoad
from millrace_shard.weights.quantized.quantization import Quantization
from millrace_shard.weights.weights import Weights


def uses_plain_torch(spec: DecoderSpec) -> bool:
    """Whether norms, rotations or activations are composed in plain torch.

    On CUDA the order of torch's sums over a row may depend on the number of rows.
    """
    return not (_is_plain_norm(spec.norm) and all(map(_is_plain_layer, set(spec.layers))))


def _is_plain_layer(layer: LayerSpec) -> bool:
    attention, head_norm = layer.attention, layer.attention.head_norm
    rotates = attention.rope is not None and not attention.rope.interleaved
    heads_are = head_norm is None or (
        _is_plain_norm(head_norm.norm)
        and not (head_norm.whole_width or head_norm.weight_per_head or head_norm.after_rope)
    )
    mlp = layer.feed_forward
    if isinstance(mlp, ExpertsSpec):
        is_silu = mlp.activation is not Activation.GELU_TANH
        if mlp.shared is not None:
            is_silu &= mlp.shared.mlp.activation is Activation.SILU and not mlp.shared.gated
    else:
        is_silu = mlp.activation is Activation.SILU
    is_plain = rotates and attention.query_scaling is None and is_silu
    return is_plain and heads_are and _is_plain_norm(layer.norm)


def _is_plain_norm(norm: NormSpec) -> bool:
    return not (norm.centred or norm.plus_one or norm.wide)


def load_model(  # noqa: PLR0913
    folder: Path,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    group: ProcessGroup,
    device: torch.device,
    rope_override: RopeOverride | None = None,
    max_total_tokens: int | None = None,
    adapters: AdapterTable | None = None,
    quantize: str | None = None,
    allow_unlisted: bool = False,
) -> CausalModel:
    """Read this rank's part of the checkpoint in `folder` onto `device`; `quantize` is the value of --quantize.

    `max_total_tokens` is the length of the longest sequence, if known: it bounds the RoPE tables and selects longrope's
    factors. The linears of the model become sites of `adapters`. With `allow_unlisted`, a class of `transformers` that
    is not listed is loaded too, if its logits agree with its own attention's. Raises ModelError.
    """
    model = ModelDescription.read(folder).with_rope(rope_override)
    if model.spec is not None:
        check_split(model.spec, group.world_size)
        quantization = quantization_of(folder, quantize, model.spec, group.world_size)
        is_invariant = device.type == "cpu" or not uses_plain_torch(model.spec)
        info = replace(_info(model, folder, quantization, quantize), batch_invariant=is_invariant)
        ropes = RopeTables(max_total_tokens, device)
        source = Weights(folder, dtype=dtype, device=device, group=group, quantization=quantization)
        with closing(source) as weights:
            check_biases(weights.files, model.spec)
            loader = LayerLoader(model.spec, ropes, weights, kernels, group, adapters)
            decoder = Decoder(model.spec, info, loader, kernels, group, adapters)
            check_unread(weights.files, model.spec)
            return decoder
    _check_class(model, quantize, allow_unlisted=allow_unlisted)
    assert model.config is not None
    # The import takes a second, and models of our own decoder do not need it.
    from millrace_shard.models.transformers_backend import transformers_loader  # noqa: PLC0415

    return transformers_loader.TransformersLoader(
        folder=folder,
        config=model.config,
        info=replace(model.info(), quantization=quantize),
        dtype=dtype,
        kernels=kernels,
        group=group,
        device=device,
        max_total_tokens=max_total_tokens,
        adapters=adapters,
        allow_unlisted=allow_unlisted,
    ).load()


def _info(
    model: ModelDescription,
    folder: Path,
    quantization: Quantization | MadeAtLoad | None,
    flag: str | None,
) -> ModelInfo:
    """The facts about the model that the router needs, with the method of the weights."""
    of_file = "gguf" if (folder / MODEL).is_file() else flag
    return replace(
        model.info(), quantization=of_file if quantization is None else quantization.method
    )


def _check_class(model: ModelDescription, quantize: str | None, *, allow_unlisted: bool) -> None:
    """Raise UnsupportedModel for a class that is not supported, and a method that only our own decoder has."""
    if quantize not in {None, "int8"}:
        families = ", ".join(FAMILIES)
        raise UnsupportedModel(
            f"{model.model_type} runs without --quantize {quantize}, which is for: {families}"
        )
    check_model(model, allow_unlisted=allow_unlisted)


def check_model(model: ModelDescription, *, allow_unlisted: bool) -> None:
    if model.config is not None:
        from millrace_shard.models.transformers_backend.supported import check_supported  # noqa: PLC0415

        check_supported(model.config, own=FAMILIES, allow_unlisted=allow_unlisted)
