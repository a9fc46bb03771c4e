"""AWQ in the layout `gemm`: words of 4-bit codes along the outputs, in an order of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor
from millrace_shard.model_loader.quantized.cut import Cut, Groups
from millrace_shard.model_loader.quantized.methods.gptq import summary
from millrace_shard.model_loader.quantized.module_tensors import ModuleTensors
from millrace_shard.model_loader.quantized.quantization import Quantization
from millrace_shard.model_loader.quantized.settings import Settings
from millrace_shard.model_loader.quantized.unpacking import codes_of_words, integers, word_span

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, from the low bits on, of each of its eight outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqLinear:
    """`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]."""

    group: int | None
    splits_inputs: bool = True
    whole_groups: bool = False

    def group_size(self, inputs: int) -> int:
        """See LinearFormat."""
        return self.group or inputs

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        """See LinearFormat."""
        size, words = self.group_size(cut.inputs), -(-cut.outputs // 8)
        num_groups = -(-cut.inputs // size)
        groups, rows = Groups.of(size, cut.columns), slice(*cut.rows)
        weight = tensors.read("qweight", [(cut.inputs, words)], [torch.int32], rows=cut.columns)
        zeros = tensors.read("qzeros", [(num_groups, words)], [torch.int32])
        scales = tensors.scales("scales", [(num_groups, cut.outputs)])[groups.index, rows].T
        offsets = _codes(zeros, cut)[:, groups.index].float() - 8
        return QuantizedTensor(
            codes=_codes(weight, cut),
            values=integers(4),
            scales=scales.contiguous(),
            offsets=-offsets * scales if offsets.any() else None,
            group_size=groups.size,
        )


def _codes(words: Tensor, cut: Cut) -> Tensor:
    """The codes [rows, n] of the outputs in words [n, out / 8]."""
    span = word_span(*cut.rows, 8)
    found = codes_of_words(words[:, slice(*span)], 4).view(len(words), -1, 8)
    codes = found[..., PLACES].flatten(1)
    first = cut.rows[0] - span[0] * 8
    return codes[:, first : first + cut.rows[1] - cut.rows[0]].T.contiguous()


def awq(settings: Settings) -> Quantization:
    """Read the settings of an AWQ checkpoint. Raises UnsupportedModel."""
    version = settings.value("version", "format")
    lower = version.lower() if isinstance(version, str) else version
    settings.overridden({"version": lower}).choice("version", allowed=("gemm",), default="gemm")
    return _awq("awq", settings)


def auto_round_awq(settings: Settings) -> Quantization:
    """Read the settings of auto-round, whose tensors are those of AWQ. Raises UnsupportedModel."""
    return _awq("auto-round", settings)


def _awq(name: str, settings: Settings) -> Quantization:
    settings.choice("bits", "w_bit", allowed=(4,))
    linear = AwqLinear(group=settings.group_size("group_size", "q_group_size"))
    return Quantization(method="awq", summary=summary(name, settings), format_of=lambda _: linear)
