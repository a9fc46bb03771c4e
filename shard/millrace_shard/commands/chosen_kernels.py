"""Chooses the kernels, and what they multiply codes with, for the flags."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from millrace_shard.commands.device_settings import choose_cache_dtype, is_deterministic
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.cpu.activation_gain import GainUnknown, kept_gain
from millrace_shard.kernels.cpu.int8_linear import is_fast, with_int8
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.kv_cache import cache_dtype_name, is_coded
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.load import check_model
from millrace_shard.models.quantized import INT8, code_formats, coded_linears
from millrace_shard.models.spec import DecoderSpec
from millrace_shard.models.split import layer_shape
from millrace_shard.server.address import is_local
from millrace_shard.speculation.checkpoints import is_eagle, is_head
from millrace_shard.speculation.head_spec import HeadSpec, read_head
from millrace_shard.weights.quantized.quantization_config import is_quantized

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Activations:
    """The activations that quantised weights are multiplied with."""

    are_int8: bool
    gain: float | None = None
    """How many times as fast linears are with int8, if that was measured for the choice."""

    @property
    def name(self) -> str:
        """The value of --quantize-activations that makes this choice."""
        return "int8" if self.are_int8 else "exact"


@dataclass(frozen=True, slots=True)
class ChosenKernels:
    """The kernels, and the activations; None for weights that are not quantised."""

    kernels: Kernels
    activations: Activations | None


def chosen_kernels(
    config: ShardConfig, device: torch.device, dtype: torch.dtype, group: ProcessGroup
) -> ChosenKernels:
    """The kernels for the model and the draft model, whose folders are local. Raises UnsupportedModel.

    A collective where `needs_group`: rank 0 measures for all.
    """
    keeps_activations = config.quantize_activations == "exact"
    kernels = choose_kernels(
        device,
        dtype,
        deterministic=is_deterministic(config, device),
        shapes=_layer_shapes(config, device, choose_cache_dtype(config, dtype)),
        custom=not config.disable_custom_kernels,
        adapters=config.enable_lora,
        disabled=(*config.disable_operators, *(["scaled_mm"] if keeps_activations else [])),
    )
    is_made_int8 = config.quantize == INT8
    if is_made_int8 and (device.type != "cpu" or dtype != torch.bfloat16):
        raise UnsupportedModel(f"--quantize int8 is for bfloat16 on CPU, not {dtype} on {device}")
    if config.quantize is None and not is_quantized(config.model_folder):
        _note_without_effect(config)
        return ChosenKernels(kernels, None)
    if device.type != "cpu" or dtype != torch.bfloat16:
        _note_without_effect(config)
        return ChosenKernels(kernels, Activations(are_int8=False))
    is_compiled = isinstance(kernels, CpuKernels)
    activations, reason = _choice(config, group, is_compiled=is_compiled)
    if is_made_int8:
        logger.info("weights of all linears but the output head are int8; %s", reason)
        if not is_fast():
            logger.warning(
                "int8 is slower than bfloat16 here: its operator needs x86 with AVX2, and a compiler"
            )
        kernels = with_int8(kernels, integer=activations.are_int8)
    elif isinstance(kernels, CpuKernels):
        kernels.integer = activations.are_int8
        logger.info("%s", reason)
    else:
        _note_without_effect(config)
        activations = Activations(are_int8=False)
    return ChosenKernels(kernels, activations)


def _note_without_effect(config: ShardConfig) -> None:
    if config.quantize_activations == "int8":
        logger.warning(
            "--quantize-activations int8 has no effect:"
            " it needs quantised weights, compiled kernels on CPU and bfloat16"
        )


LEAST_PARAMETERS = 10**9
"""Smaller models answer wrongly more often with rounded activations, and are fast enough without."""
LEAST_GAIN = 1.2
ROUNDED = "activations are rounded to int8 where the weights are quantised to integers"
KEEPS = "--quantize-activations exact keeps them"
ROUNDS = "--quantize-activations int8 rounds them"
PER_GAIN = 1000
"""Gains are kept and sent in thousandths."""


def needs_group(config: ShardConfig) -> bool:
    """Whether ranks choose activations together; under one launcher they read one file."""
    address = f"{config.master_addr}:{config.master_port}"
    return (
        (config.launcher_fd is None or not is_local(address))
        and config.quantize_activations == "auto"
        and (config.quantize is not None or is_quantized(config.model_folder))
    )


def _choice(
    config: ShardConfig, group: ProcessGroup, *, is_compiled: bool
) -> tuple[Activations, str]:
    """The activations of all ranks, and the sentence for the log."""
    exact = Activations(are_int8=False)
    if config.quantize_activations == INT8:
        return Activations(are_int8=True), f"{ROUNDED}; {KEEPS}"
    if config.quantize_activations == "exact":
        return exact, f"activations are exact; {ROUNDS}, which is faster on most CPUs"
    parameters = ModelDescription.read(config.model_folder).num_parameters() or 0
    if parameters < LEAST_PARAMETERS:
        reason = f"rounding harms small models: this has {parameters / 1e9:.2f} billion parameters"
        return exact, f"activations are exact, as {reason}; {ROUNDS}"
    gain, unknown = None, "rank 0 has not measured the gain by int8"
    together = needs_group(config)
    if group.rank == 0 or not together:
        try:
            gain = _gain(config, is_compiled=is_compiled)
        except GainUnknown as error:
            unknown = str(error)
    if together:
        # The measurements of ranks may differ by chance.
        gain = group.broadcast(round((gain or 0) * PER_GAIN)) / PER_GAIN or None
    return by_gain(gain, unknown)


def by_gain(gain: float | None, unknown: str) -> tuple[Activations, str]:
    """The activations for a gain by int8, and the sentence for the log; `unknown` is the reason where there is none."""
    activations = Activations(are_int8=gain is not None and gain >= LEAST_GAIN, gain=gain)
    if activations.are_int8:
        return activations, f"{ROUNDED}, {gain:.2f} times as fast here; {KEEPS}"
    if gain is not None:
        pays = f"less than {LEAST_GAIN:g} does not pay for what rounding costs"
        unknown = f"int8 is {gain:.2f} times as fast here, and {pays}"
    return activations, f"activations are exact, as {unknown}; {ROUNDS}"


def _gain(config: ShardConfig, *, is_compiled: bool) -> float:
    """The gain by int8 on rank 0's part of the model. Raises GainUnknown."""
    spec = ModelDescription.read(config.model_folder).spec
    if spec is None or not is_compiled:
        raise GainUnknown("there are no compiled kernels to measure")
    return kept_gain(
        coded_linears(
            config.model_folder,
            spec,
            quantize=config.quantize,
            rank=0,
            world_size=config.world_size,
        )
    )


def _layer_shapes(
    config: ShardConfig, device: torch.device, cache_dtype: torch.dtype
) -> tuple[LayerShape, ...]:
    """The shapes of the model and of the draft model, which share the kernels."""
    folders = [(config.model_folder, config.quantize)]
    if config.draft_model is not None and not is_head(Path(config.draft_model)):
        folders.append((Path(config.draft_model), None))
    shapes = list[LayerShape]()
    for folder, quantize in folders:
        model = ModelDescription.read(folder)
        check_model(model, allow_unlisted=config.allow_unlisted_model)
        of_model = model.layer_shapes(config.world_size)
        if model.spec is not None and model.spec.has_slopes and is_coded(cache_dtype):
            raise UnsupportedModel(
                f"{model.model_type} keeps positions in its keys (ALiBi), which codes would round:"
                f" it runs without --kv-cache-dtype {cache_dtype_name(cache_dtype)}"
            )
        if of_model[0].latent_dim is not None and is_coded(cache_dtype):
            raise UnsupportedModel(
                f"{model.model_type} caches latents in place of keys and values, in the type of the model:"
                f" it runs without --kv-cache-dtype {cache_dtype_name(cache_dtype)}"
            )
        of_model = tuple(replace(shape, cache_dtype=cache_dtype) for shape in of_model)
        # Kernels on CPU are compiled for all formats, and compare each when they first pack it.
        if device.type == "cuda" and model.spec is not None:
            of_model = _with_formats(of_model, config, folder, model.spec, quantize)
        shapes += of_model
    if head := _eagle_head(config):
        shape = layer_shape(head.decoder, config.world_size)
        shapes.append(replace(shape, cache_dtype=cache_dtype))
    return tuple(shapes)


def _with_formats(
    shapes: Iterable[LayerShape],
    config: ShardConfig,
    folder: Path,
    spec: DecoderSpec,
    quantize: str | None,
) -> tuple[LayerShape, ...]:
    rank, world_size = config.rank, config.world_size
    formats = code_formats(folder, spec, quantize=quantize, rank=rank, world_size=world_size)
    coded = coded_linears(folder, spec, quantize=quantize, rank=rank, world_size=world_size)
    of_experts = tuple(dict.fromkeys(each.format for each in coded))
    return tuple(
        replace(shape, formats=formats, expert_formats=of_experts if shape.experts else ())
        for shape in shapes
    )


def _eagle_head(config: ShardConfig) -> HeadSpec | None:
    """The EAGLE head that drafts, if one does: its heads may have other sizes than the model's."""
    draft, spec = config.draft_model, ModelDescription.read(config.model_folder).spec
    if draft is None or config.speculate == 0 or spec is None or not is_eagle(Path(draft)):
        return None
    return read_head(Path(draft), config.model_folder, spec, config.world_size)
