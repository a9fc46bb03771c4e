"""Reads linears of a quantised checkpoint by their modules' names."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor
from millrace_shard.model_loader.quantized.cut import Cut
from millrace_shard.model_loader.quantized.module_tensors import ModuleTensors
from millrace_shard.model_loader.quantized.quantization import Quantization
from millrace_shard.model_loader.safetensor_files import SafetensorFiles

WEIGHT = ".weight"


class LinearReader:
    """The linears of a checkpoint that are not plain tensors."""

    def __init__(
        self,
        files: SafetensorFiles,
        quantization: Quantization,
        on_read: Callable[[Tensor, int], None],
    ) -> None:
        """`on_read` takes each view of a file, and the bytes of its whole tensor."""
        self._files = files
        self._quantization = quantization
        self._on_read = on_read

    def read(self, name: str, cut: Cut) -> QuantizedTensor | None:
        """A part of the tensor `name`, which ends in `.weight`; None if the file has it as plain numbers.

        Raises WeightsError, naming tensor and file.
        """
        if self._files.is_plain(name):
            return None
        tensors = ModuleTensors(self._files, name.removesuffix(WEIGHT), self._on_read)
        found = self._quantization.format_of(tensors.names())
        return None if found is None else found.read(tensors, cut)
