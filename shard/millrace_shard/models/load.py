"""Loads a model from a folder, by our own decoder or by the transformers backend."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.layer_weights import Activation
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.models.decoder import Decoder
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.families.registry import FAMILIES, nearest_family
from millrace_shard.models.interface import CausalModel, ModelInfo
from millrace_shard.models.layer_loader import LayerLoader
from millrace_shard.models.quantized import quantization_of
from millrace_shard.models.rope import RopeOverride, RopeTables
from millrace_shard.models.spec import DecoderSpec, ExpertsSpec, Halves, LayerSpec, NormSpec
from millrace_shard.models.split import check_split
from millrace_shard.models.unread_tensors import check_biases, check_unread
from millrace_shard.weights.gguf.known_folders import MODEL
from millrace_shard.weights.packed_weights import PackedWeights
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
    if layer.recurrent is not None or layer.halves is not Halves.BOTH:
        return False
    if attention.gated or layer.side_experts or layer.scaled:
        return False
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
    is_plain = rotates and attention.latent is None and attention.query_scaling is None and is_silu
    return is_plain and heads_are and _is_plain_norm(layer.norm)


def _is_plain_norm(norm: NormSpec) -> bool:
    return not (norm.centred or norm.plus_one or norm.wide or norm.bias)


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
    packed: PackedWeights | None = None,
) -> CausalModel:
    """Read this rank's part of the checkpoint in `folder` onto `device`; `quantize` is the value of --quantize.

    `max_total_tokens` is the length of the longest sequence, if known: it bounds the RoPE tables and selects longrope's
    factors. The linears of the model become sites of `adapters`. With `allow_unlisted`, a class of `transformers` that
    is not listed is loaded too, if its logits agree with its own attention's; `packed` is optional. Raises ModelError.
    """
    model = ModelDescription.read(folder).with_rope(rope_override)
    if model.spec is not None:
        check_split(model.spec, group.world_size)
        quantization = quantization_of(folder, quantize, model.spec, group.world_size)
        info = _info(model, folder, quantization, quantize, device)
        ropes = RopeTables(max_total_tokens, device)
        form: dict[str, Any] = {"dtype": dtype, "device": device, "quantization": quantization}
        weights = Weights(folder, group=group, packed=packed, **form)
        return _decoder(model.spec, info, ropes, weights, kernels, group, adapters)
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


def _decoder(
    spec: DecoderSpec,
    info: ModelInfo,
    ropes: RopeTables,
    weights: Weights,
    kernels: Kernels,
    group: ProcessGroup,
    adapters: AdapterTable | None,
) -> Decoder:
    """Our own decoder with these weights, whose files are closed then."""
    with closing(weights):
        check_biases(weights.files, spec)
        loader = LayerLoader(spec, ropes, weights, kernels, group, adapters)
        decoder = Decoder(spec, info, loader, kernels, group, adapters)
        check_unread(weights.files, spec)
    return decoder


def _info(
    model: ModelDescription,
    folder: Path,
    quantization: Quantization | MadeAtLoad | None,
    flag: str | None,
    device: torch.device,
) -> ModelInfo:
    """The facts about the model of our own decoder that the router needs, with the method of the weights."""
    assert model.spec is not None
    of_file = "gguf" if (folder / MODEL).is_file() else flag
    return replace(
        model.info(),
        quantization=of_file if quantization is None else quantization.method,
        batch_invariant=device.type == "cpu" or not uses_plain_torch(model.spec),
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

        check_supported(
            model.config, own=FAMILIES, nearest=nearest_family, allow_unlisted=allow_unlisted
        )
