"""Reads linears of a quantised checkpoint by their modules' names."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.weights.quantized.module_tensors import KINDS, Cut, ModuleTensors
from millrace_shard.weights.quantized.quantization import Quantization
from millrace_shard.weights.safetensor_files import SafetensorFiles

WEIGHT = ".weight"
OF_CODES = ("weight_scale", "weight_scale_inv", "SCB", "weight.absmax")
"""Tensors that accompany a weight of codes with the name of a plain weight."""


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

    def has_codes(self, name: str) -> bool:
        """Whether the file has the weight `name`, which ends in `.weight`, in a format that the config gives it."""
        tensors = ModuleTensors(self._files, name.removesuffix(WEIGHT), self._on_read)
        is_there = any(suffix in tensors for suffix in KINDS) and not self._files.is_plain(name)
        return is_there and self._quantization.format_of(tensors.names()) is not None

    def read(self, name: str, cut: Cut) -> QuantizedTensor | None:
        """A part of the tensor `name`, which ends in `.weight`; None if the file has it as plain numbers.

        Raises WeightsError, naming tensor and file.
        """
        tensors = ModuleTensors(self._files, name.removesuffix(WEIGHT), self._on_read)
        linear_format = self._quantization.format_of(tensors.names())
        if self._files.is_plain(name):
            if linear_format is not None:
                _check_plain(tensors)
            return None
        return None if linear_format is None else linear_format.read(tensors, cut)


def _check_plain(tensors: ModuleTensors) -> None:
    """Raise WeightsError if a weight that the config leaves unquantised has scales."""
    for suffix in OF_CODES:
        if suffix in tensors:
            dtype = str(tensors.dtype("weight")).removeprefix("torch.")
            raise tensors.error(
                "weight", f"has dtype {dtype}, and {tensors.module}.{suffix} is of codes"
            )
