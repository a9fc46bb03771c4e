"""Takes a model's tensors out of the mapped files that `transformers` leaves them in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from millrace_shard.model_loader.load_progress import LoadProgress
from millrace_shard.model_loader.mapped_files import MappedFiles, release_pages
from millrace_shard.model_loader.read_ahead import ReadAhead


class TensorUnmapper:
    """Brings a model that was just read to `device`, tells progress, and leaves nothing of `files` resident.

    What `transformers` need not convert it leaves where the file is mapped, so that a checkpoint written anew would
    change the answers of a model that runs, or end it.
    """

    def __init__(
        self, model: nn.Module, files: Sequence[Path], device: torch.device, ahead: ReadAhead
    ) -> None:
        self.device = device
        self._model = model
        self._mapped = MappedFiles(files)
        self._ahead = ahead
        self._progress = LoadProgress(sum(tensor.nbytes for tensor in self._tensors()))
        self._used: set[int] = set()
        """Addresses: a tied weight is used twice, and what is owned may be used once more."""

    def is_unmapped(self, tensor: Tensor) -> bool:
        """Whether `tensor` is where it has to be."""
        return tensor.device.type == self.device.type and not self._mapped.contains(tensor)

    @contextmanager
    def releasing(self, tensor: Tensor) -> Iterator[None]:
        """Afterwards `tensor` is not read any more, or may be read again at the price of the first time."""
        yield
        if self._mapped.contains(tensor):
            release_pages(tensor)
        if tensor.data_ptr() not in self._used:
            self._used.add(tensor.data_ptr())
            self._ahead.used(tensor.nbytes)
            self._progress.add(tensor.nbytes)

    def unmap_rest(self) -> None:
        """Have all that is left of the model in memory of its own."""
        for tensor in self._tensors():
            found = tensor.data
            with self.releasing(found):
                tensor.data = found.to(self.device, copy=not self.is_unmapped(found))
            self._used.add(tensor.data_ptr())

    def _tensors(self) -> Iterator[Tensor]:
        return chain(self._model.parameters(), self._model.buffers())
