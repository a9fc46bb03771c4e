"""Copies a model's tensors out of the mapped files in which `transformers` leaves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from millrace_shard.device.transfers import copy_to
from millrace_shard.weights.read_ahead import LoadProgress, ReadAhead
from millrace_shard.weights.safetensor_files import MappedFiles, release_pages


class TensorUnmapper:
    """Moves a model that was just read to `device`, logs progress, and releases the pages of `files`.

    `transformers` leaves tensors that need no conversion in the mapped file. If the checkpoint were overwritten, the
    outputs of the running model would change, or its process would crash.
    """

    def __init__(
        self,
        model: nn.Module,
        files: Sequence[Path],
        device: torch.device,
        ahead: ReadAhead,
        casts: tuple[torch.dtype, torch.dtype] | None = None,
    ) -> None:
        """With `casts`, parameters of the first dtype are converted to the second as they are copied."""
        self.device = device
        self._casts = casts
        self.copy = copy_to(device)
        """Copies a tensor from the host to the device."""
        self._model = model
        self._mapped = MappedFiles(files)
        self._ahead = ahead
        self._progress = LoadProgress(sum(tensor.nbytes for tensor in self._tensors()))
        self._used: set[int] = set()
        """Addresses of counted tensors: a tied weight is read twice, and an unmapped tensor may be read again."""

    def is_unmapped(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type and not self._mapped.contains(tensor)

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        if self._casts is not None and parameter.dtype == self._casts[0]:
            return self._casts[1]
        return parameter.dtype

    @contextmanager
    def releasing(self, tensor: Tensor) -> Iterator[None]:
        """Read `tensor` inside; afterwards its pages are released, and another read costs as much as the first."""
        yield
        if self._mapped.contains(tensor):
            release_pages(tensor)
        if tensor.data_ptr() not in self._used:
            self._used.add(tensor.data_ptr())
            self._ahead.used(tensor.nbytes)
            self._progress.add(tensor.nbytes)

    def release_mapped(self) -> None:
        """Release the pages of all mapped tensors, which were read for another purpose and are not counted."""
        for tensor in self._tensors():
            if self._mapped.contains(tensor):
                release_pages(tensor.detach())

    def unmap_rest(self) -> None:
        """Copy all tensors that are still mapped or elsewhere into memory of the device."""
        for tensor in self._tensors():
            data = tensor.data
            dtype = self.dtype_of(data) if isinstance(tensor, nn.Parameter) else data.dtype
            with self.releasing(data):
                if not self.is_unmapped(data) or data.dtype != dtype:
                    tensor.data = torch.empty_like(data, device=self.device, dtype=dtype)
                    self.copy(tensor.data, data)
            self._used.add(tensor.data_ptr())

    def _tensors(self) -> Iterator[Tensor]:
        return chain(self._model.parameters(), self._model.buffers())
