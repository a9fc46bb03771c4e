"""Tensors of a checkpoint that no part of the model has read, because its config does not name them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from millrace_shard.errors import WeightsError
from millrace_shard.models.spec import DecoderSpec, GatedSpec, LayerNames, LayerSpec
from millrace_shard.weights.safetensor_files import LAYER, SafetensorFiles
from millrace_shard.weights.weights import CheckpointFiles

WITHOUT_EFFECT = (
    ".inv_freq",
    ".input_global_scale",
    ".input_scale",
    ".k_scale",
    ".output_scale",
    ".q_scale",
    ".v_scale",
    ".weight_format",
    "_zero_point",
)
"""Ends of the names of tensors that other fields tell, or by which activations and caches are quantised."""
OF_INPUTS = ".pre_quant_scale"
"""Ends the names of factors by which the inputs of linears are multiplied."""
MASKS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Ends of the names of masks that older versions of transformers saved."""
BIAS = "bias"
"""Ends the names of biases."""
NAMED = 3
"""Tensors that a warning names."""

logger = logging.getLogger(__name__)


def check_biases(files: CheckpointFiles, spec: DecoderSpec) -> None:
    """Raise WeightsError for a bias that is not 0 and that `spec` does not have, before other tensors are read.

    Tools write zeros as biases of linears that have none. transformers leaves biases out that its class lacks.
    """
    if isinstance(files, SafetensorFiles):
        denied = {spec.names.norm: not spec.norm.bias, spec.names.head: not spec.head_bias}
        outside = (f"{name}.bias" for name, is_denied in denied.items() if is_denied)
        of_layers = (name for name in files.names() if _is_denied(name, spec))
        _refuse_biases(files, (*of_layers, *(name for name in outside if name in files)))


def check_unread(files: CheckpointFiles, spec: DecoderSpec) -> None:
    """Raise WeightsError for a bias or a scale of inputs that was not read; log other tensors of layers."""
    if not isinstance(files, SafetensorFiles):
        return
    of_layers = (name for name in files.unread() if _is_of_layers(name, len(spec.layers)))
    unread = [name for name in of_layers if not name.endswith(MASKS)]
    biases = [name for name in unread if name.endswith(BIAS)]
    _refuse_biases(files, biases)
    scaled = next((name for name in unread if name.endswith(OF_INPUTS)), None)
    if scaled is not None:
        raise WeightsError(
            f"tensor {scaled} in {files.file_name(scaled)} scales the inputs of a linear, which is not supported"
        )
    others = [n for n in unread if n not in biases and not n.endswith(WITHOUT_EFFECT)]
    if others:
        logger.warning(
            "%d tensors of the checkpoint are not used, since its config does not name them: %s%s",
            len(others),
            ", ".join(others[:NAMED]),
            ", …" if len(others) > NAMED else "",
        )


def _refuse_biases(files: SafetensorFiles, names: Iterable[str]) -> None:
    for name in names:
        if files.is_plain(name) and files.whole(name).count_nonzero():
            raise WeightsError(
                f"tensor {name} in {files.file_name(name)} is a bias, and by its config the model has none there"
            )


def _is_denied(name: str, spec: DecoderSpec) -> bool:
    """Whether the tensor is a bias of a layer, and the layer has none there."""
    match = LAYER.match(name)
    if match is None or not name.endswith(BIAS) or int(match[1]) >= len(spec.layers):
        return False
    if name.endswith(MASKS):
        return False
    biases = _biases(spec.layers[int(match[1])], spec.names.layer)
    return not name[match.end() :].startswith(biases)


def _biases(layer: LayerSpec, names: LayerNames) -> tuple[str, ...]:
    """Prefixes of the names of all biases of a layer, relative to the layer."""
    attention, half = layer.attention, layer.feed_forward
    norms = (names.before_attention, names.after_attention, names.before_mlp, names.after_mlp)
    prefixes = [f"{name}." for name in norms if name is not None and layer.norm.bias]
    if layer.recurrent is not None:
        recurrent = layer.recurrent
        prefixes += [f"{recurrent.module}.{name}" for name in recurrent.biases]
    if layer.attends and attention.qkv_bias:
        qkv = (names.query, names.key, names.value) if names.qkv is None else (names.qkv,)
        prefixes += [f"{name}." for name in qkv]
    if layer.attends and attention.latent is not None and attention.latent.bias:
        prefixes += [f"{names.latent.queries_in}.", f"{names.latent.latent}."]
    if layer.attends and attention.out_bias:
        prefixes.append(f"{names.out}.")
    if not layer.has_feed_forward:
        return tuple(prefixes)
    if isinstance(half, GatedSpec):
        gate_up = (names.gate, names.up) if names.gate_up is None else (names.gate_up,)
        prefixes += [f"{name}." for name in (*gate_up, names.down) if half.bias]
        return tuple(prefixes)
    for each in names.experts:
        prefixes += [f"{each.experts}."] * half.bias
        prefixes += [f"{each.router}.bias"] * half.router.bias
        prefixes += [each.correction_tensor] * half.router.correction
    return tuple(prefixes)


def _is_of_layers(name: str, count: int) -> bool:
    match = LAYER.match(name)
    return match is not None and int(match[1]) < count
