"""Reads parts of a tensor's data, decoding only the blocks that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from millrace_shard.errors import WeightsError
from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor
from millrace_shard.model_loader.gguf.block_formats import BlockCodes
from millrace_shard.model_loader.gguf.header import StoredTensor
from millrace_shard.model_loader.quantized.cut import Groups, Span

ELEMENTS_PER_PASS = 1 << 21
"""Values that are decoded at a time: the intermediate tensors of a block format take several bytes for each."""


def read_part(file: BufferedReader, tensor: StoredTensor, rows: Span, columns: Span) -> Tensor:
    """The rows and columns of a tensor, [rows, columns] in its format's dtype; a vector is one row.

    Raises WeightsError for a file that became shorter, and for values that are not finite.
    """
    out = torch.empty((rows[1] - rows[0], columns[1] - columns[0]), dtype=tensor.format.dtype)
    cut = columns[0] - columns[0] // tensor.format.elements * tensor.format.elements
    for start, end, blocks in _pieces(file, tensor, rows, columns):
        values = tensor.format.decode(blocks)
        values = values.view(end - start, -1)[:, cut : cut + out.shape[1]]
        _check_finite(file, tensor, values)
        out[start - rows[0] : end - rows[0]] = values
    return out


def read_codes(
    file: BufferedReader, tensor: StoredTensor, rows: Span, columns: Span
) -> QuantizedTensor:
    """The same rows and columns as codes, of a tensor whose blocks hold codes. Raises as `read_part`."""
    form = tensor.format
    assert form.split is not None
    first = columns[0] // form.elements * form.elements
    groups = Groups.of(form.group, columns)
    of_blocks = groups.index - first // form.group
    inside = slice(columns[0] - first, columns[1] - first)
    found = []
    for start, end, blocks in _pieces(file, tensor, rows, columns):
        parts = form.split(blocks)
        scales, offsets = (
            None if each is None else each.view(end - start, -1)[:, of_blocks]
            for each in (parts.scales, parts.offsets)
        )
        for each in (scales, offsets):
            if each is not None:
                _check_finite(file, tensor, each)
        assert scales is not None
        found.append(BlockCodes(parts.codes.view(end - start, -1)[:, inside], scales, offsets))
    offsets_found = [part.offsets for part in found if part.offsets is not None]
    return QuantizedTensor(
        codes=torch.cat([part.codes for part in found]),
        values=form.table(),
        scales=torch.cat([part.scales for part in found]),
        offsets=torch.cat(offsets_found) if offsets_found else None,
        group_size=groups.size,
    )


def _pieces(
    file: BufferedReader, tensor: StoredTensor, rows: Span, columns: Span
) -> Iterator[tuple[int, int, Tensor]]:
    """Some rows at a time: the first, the one after the last, and the blocks [n, num_bytes] that hold the columns."""
    size, num_bytes = tensor.format.elements, tensor.format.num_bytes
    first, last = columns[0] // size, -(-columns[1] // size)
    step = max(1, ELEMENTS_PER_PASS // tensor.shape[-1])
    for start in range(rows[0], rows[1], step):
        end = min(start + step, rows[1])
        stored = _read(file, tensor, start, end)
        blocks = stored.view(end - start, -1, num_bytes)[:, first:last]
        yield start, end, blocks.reshape(-1, num_bytes)


def _check_finite(file: BufferedReader, tensor: StoredTensor, values: Tensor) -> None:
    if not values.isfinite().all():
        raise WeightsError(
            f"tensor {tensor.name} in {_name(file)} has values that are not finite numbers"
        )


def _read(file: BufferedReader, tensor: StoredTensor, start: int, end: int) -> Tensor:
    """The bytes of the rows from `start` to `end`."""
    stored = torch.empty((end - start) * tensor.row_bytes, dtype=torch.uint8)
    try:
        file.seek(tensor.offset + start * tensor.row_bytes)
        found = file.readinto(stored.numpy().data)
    except OSError as error:
        raise WeightsError(
            f"tensor {tensor.name} in {_name(file)} cannot be read: {error}"
        ) from error
    if found != len(stored):
        raise WeightsError(f"{_name(file)} was cut short while tensor {tensor.name} was read")
    return stored


def _name(file: BufferedReader) -> str:
    """The name of the file itself, to which a model's folder has a link."""
    return Path(file.name).resolve().name
