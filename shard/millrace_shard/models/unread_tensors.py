"""Tensors of a checkpoint that no part of the model asked for, because its config does not name them."""

from __future__ import annotations

import logging

from millrace_shard.errors import WeightsError
from millrace_shard.model_loader.gguf.files import GgufFiles
from millrace_shard.model_loader.safetensor_files import LAYER, SafetensorFiles
from millrace_shard.models.spec.decoder_spec import DecoderSpec

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
NAMED = 3
"""Tensors that a warning names."""

logger = logging.getLogger(__name__)


def check_unread(files: SafetensorFiles | GgufFiles, spec: DecoderSpec) -> None:
    """Raise WeightsError for a bias that is not 0 or a scale of inputs that was not read; log other tensors of layers.

    Tools write zeros as biases of linears that have none. transformers leaves biases out that its class lacks.
    """
    if isinstance(files, GgufFiles):
        return
    unread = [name for name in files.unread() if _is_of_layers(name, len(spec.layers))]
    outside = (f"{name}.bias" for name in (spec.names.norm, spec.names.head))
    biases = [name for name in unread if name.endswith("bias")]
    for name in (*biases, *(name for name in outside if name in files)):
        if files.is_plain(name) and files.whole(name).count_nonzero():
            raise WeightsError(
                f"tensor {name} in {files.file_name(name)} is a bias, and by its config the model has none there"
            )
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


def _is_of_layers(name: str, count: int) -> bool:
    found = LAYER.match(name)
    return found is not None and int(found[1]) < count
