"""Reads parts of a tensor's data, decoding only the blocks that hold them."""

from __future__ import annotations

from io import BufferedReader

import torch
from torch import Tensor

from millrace_shard.errors import WeightsError
from millrace_shard.model_loader.gguf.header import StoredTensor

ELEMENTS_PER_PASS = 1 << 21
"""Values that are decoded at a time: the intermediate tensors of a block format take several bytes for each."""


def read_part(
    file: BufferedReader, tensor: StoredTensor, rows: tuple[int, int], columns: tuple[int, int]
) -> Tensor:
    """The rows and columns of a tensor, [rows, columns] in its format's dtype; a vector is one row.

    Raises WeightsError for a file that became shorter, and for values that are not finite.
    """
    size = tensor.format.elements
    first, last = columns[0] // size, -(-columns[1] // size)
    step = max(1, ELEMENTS_PER_PASS // tensor.shape[-1])
    out = torch.empty((rows[1] - rows[0], columns[1] - columns[0]), dtype=tensor.format.dtype)
    for start in range(rows[0], rows[1], step):
        end = min(start + step, rows[1])
        stored = _read(file, tensor, start, end)
        blocks = stored.view(end - start, -1, tensor.format.num_bytes)[:, first:last]
        values = tensor.format.decode(blocks.reshape(-1, tensor.format.num_bytes))
        cut = columns[0] - first * size
        values = values.view(end - start, -1)[:, cut : cut + out.shape[1]]
        if not values.isfinite().all():
            raise WeightsError(f"tensor {tensor.name} has values that are not finite numbers")
        out[start - rows[0] : end - rows[0]] = values
    return out


def _read(file: BufferedReader, tensor: StoredTensor, start: int, end: int) -> Tensor:
    """The bytes of the rows from `start` to `end`."""
    stored = torch.empty((end - start) * tensor.row_bytes, dtype=torch.uint8)
    try:
        file.seek(tensor.offset + start * tensor.row_bytes)
        found = file.readinto(stored.numpy().data)
    except OSError as error:
        raise WeightsError(f"tensor {tensor.name} cannot be read: {error}") from error
    if found != len(stored):
        raise WeightsError(f"the file was cut short while tensor {tensor.name} was read")
    return stored
