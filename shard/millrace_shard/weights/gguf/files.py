"""The tensors of a GGUF file under the names of transformers' classes, decoded when they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from millrace_shard.errors import WeightsError
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.weights.gguf.block_formats import BlockCodes, BlockFormat
from millrace_shard.weights.gguf.header import GgufHeader, StoredTensor
from millrace_shard.weights.gguf.metadata import Metadata
from millrace_shard.weights.gguf.tensor_names import is_rotated, stored_name
from millrace_shard.weights.quantized.module_tensors import Cut, Groups, Span

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
    parts_read = []
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
        parts_read.append(BlockCodes(parts.codes.view(end - start, -1)[:, inside], scales, offsets))
    offsets_read = [part.offsets for part in parts_read if part.offsets is not None]
    return QuantizedTensor(
        codes=torch.cat([part.codes for part in parts_read]),
        values=form.table(),
        scales=torch.cat([part.scales for part in parts_read]),
        offsets=torch.cat(offsets_read) if offsets_read else None,
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
    stored = torch.empty((end - start) * tensor.row_bytes, dtype=torch.uint8)
    try:
        file.seek(tensor.offset + start * tensor.row_bytes)
        num_read = file.readinto(stored.numpy().data)
    except OSError as error:
        raise WeightsError(
            f"tensor {tensor.name} in {_name(file)} cannot be read: {error}"
        ) from error
    if num_read != len(stored):
        raise WeightsError(f"{_name(file)} was cut short while tensor {tensor.name} was read")
    return stored


def _name(file: BufferedReader) -> str:
    """The name of the file itself, to which a model's folder has a link."""
    return Path(file.name).resolve().name


MODEL = "model.gguf"
PREFIX = "model."


class GgufFiles:
    """A reader with the methods of SafetensorFiles. Methods raise WeightsError, naming the tensor.

    Files of the llama architecture hold the rows of the query and key projections so that the pairs that RoPE rotates
    are neighbours: row 2j + i of a head is row i * D/2 + j of transformers. `read` undoes that.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / MODEL
        self._header = GgufHeader.read(self._path)
        self._file = self._path.open("rb")
        metadata = Metadata(self._header.metadata, self._path.name)
        self._num_heads = {}
        if metadata.text("general.architecture") == "llama":
            heads = metadata.needed("llama.attention.head_count")
            kv_heads = metadata.count("llama.attention.head_count_kv") or heads
            self._num_heads = {"attn_q": heads, "attn_k": kv_heads}

    def __contains__(self, name: str) -> bool:
        return stored_name(_full(name)) in self._header.tensors

    def is_plain(self, name: str) -> bool:
        """Whether there is such a tensor: `read` gives floating-point numbers for every format."""
        return name in self

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def format(self, name: str) -> BlockFormat:
        return self._tensor(name).format

    def stored_bytes(self, name: str) -> int:
        return self._tensor(name).num_bytes

    def read(self, name: str, *, dim: int, span: tuple[int, int]) -> Tensor:
        """Rows (dim 0) or columns (dim 1) `span` of a tensor: float32 for quantised blocks, else the file's dtype."""
        tensor = self._tensor(name)
        if not is_rotated(tensor.name) or not self._num_heads:
            return self._part(tensor, dim, span)
        size = self._head_dim(tensor)
        if dim == 1:
            return _unrotated(self._part(tensor, dim, span), size)
        start, end = span[0] // size * size, -(-span[1] // size) * size
        whole_heads = _unrotated(self._part(tensor, 0, (start, end)), size)
        return whole_heads[span[0] - start : span[1] - start]

    def codes(self, name: str, cut: Cut) -> QuantizedTensor | None:
        """A part of a matrix as codes; None if its blocks are plain numbers."""
        tensor = self._tensor(name)
        if tensor.format.split is None:
            return None
        if tensor.shape != (cut.outputs, cut.inputs):
            raise WeightsError(
                f"tensor {name} has shape {list(tensor.shape)}, its config says {[cut.outputs, cut.inputs]}"
            )
        if not is_rotated(tensor.name) or not self._num_heads:
            return read_codes(self._file, tensor, cut.rows, cut.columns)
        size, (start, end) = self._head_dim(tensor), cut.rows
        whole = start // size * size, -(-end // size) * size
        codes = read_codes(self._file, tensor, whole, cut.columns)
        offsets = None if codes.offsets is None else _unrotated(codes.offsets, size)
        heads = replace(
            codes,
            codes=_unrotated(codes.codes, size),
            scales=_unrotated(codes.scales, size),
            offsets=offsets,
        )
        return heads.rows(start - whole[0], end - whole[0])

    def release(self, values: Tensor) -> None:
        """Do nothing: `values` are a copy, whose memory ends with it."""

    def check_layers(self, count: int) -> None:
        """Do nothing: all tensors were compared with the metadata when the folder was made."""

    def unread(self) -> list[str]:
        """None, for the same reason."""
        return []

    def differ(self, name: str, other: str) -> bool:  # noqa: ARG002
        """False: a head that the file has is not tied."""
        return False

    def paths(self) -> list[Path]:
        return [self._path]

    def num_bytes(self) -> int:
        return self._header.size

    def close(self) -> None:
        self._file.close()

    def _tensor(self, name: str) -> StoredTensor:
        stored = stored_name(_full(name))
        tensor = None if stored is None else self._header.tensors.get(stored)
        if tensor is None:
            raise WeightsError(f"tensor {name} is missing from the checkpoint")
        return tensor

    def _head_dim(self, tensor: StoredTensor) -> int:
        heads = self._num_heads[tensor.name.split(".")[2]]
        if tensor.shape[0] % (2 * heads):
            raise WeightsError(f"tensor {tensor.name} has {tensor.shape[0]} rows for {heads} heads")
        return tensor.shape[0] // heads

    def _part(self, tensor: StoredTensor, dim: int, span: tuple[int, int]) -> Tensor:
        if len(tensor.shape) == 1:
            return read_part(self._file, tensor, (0, 1), span)[0]
        rows = (0, math.prod(tensor.shape[:-1]))
        columns = (0, tensor.shape[-1])
        return read_part(self._file, tensor, *((span, columns) if dim == 0 else (rows, span)))


def _full(name: str) -> str:
    return name if name.startswith((PREFIX, "lm_head.")) else PREFIX + name


def _unrotated(values: Tensor, head_dim: int) -> Tensor:
    """`values` [heads * head_dim, …] with the rows of each head in the order of transformers."""
    heads = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return heads.transpose(1, 2).reshape(values.shape)
