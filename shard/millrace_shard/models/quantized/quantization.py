"""How a model's weights are quantised, checked before any is read."""

from __future__ import annotations

import logging
from pathlib import Path

from millrace_shard.models.quantized.named_linears import expert_linears, named_linears
from millrace_shard.models.spec.decoder_spec import DecoderSpec
from millrace_shard.weights.quantized.made_at_load import MadeAtLoad, made_at_load
from millrace_shard.weights.quantized.quantization import Quantization
from millrace_shard.weights.quantized.quantization_config import read_quantization

logger = logging.getLogger(__name__)


def quantization_of(
    folder: Path, flag: str | None, spec: DecoderSpec, world_size: int
) -> Quantization | MadeAtLoad | None:
    """The quantisation of the checkpoint, or the one that --quantize asks for; None for plain weights.

    Raises UnsupportedModel, also for ranks that cannot share the groups of inputs.
    """
    found = read_quantization(folder, flag)
    if found is None:
        made = made_at_load(flag)
        if made is not None:
            logger.info("--quantize %s: %s", made.method, made.summary)
        return made
    linears = (*named_linears(spec), *expert_linears(spec))
    found.check_groups([(each.module, each.inputs) for each in linears])
    shared = [(each.module, each.inputs) for each in linears if each.shares_inputs]
    found.check_ranks(shared, world_size)
    logger.info("quantised weights: %s", found.summary)
    for note in found.notes:
        logger.info("quantised weights: %s", note)
    return found
