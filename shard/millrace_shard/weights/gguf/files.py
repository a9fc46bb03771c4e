"""The tensors of a GGUF file under the names of transformers' classes, decoded when they are read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from millrace_shard.errors import WeightsError
from millrace_shard.kernels.quantized import UNIT_INPUTS, QuantizedTensor, ScaleUnits
from millrace_shard.weights.checkpoint_files import file_state
from millrace_shard.weights.gguf.block_formats import BlockCodes, BlockFormat
from millrace_shard.weights.gguf.config import architecture_of
from millrace_shard.weights.gguf.encoders import Stored
from millrace_shard.weights.gguf.header import GgufHeader, StoredTensor
from millrace_shard.weights.gguf.known_folders import model_files
from millrace_shard.weights.gguf.metadata import Metadata
from millrace_shard.weights.gguf.mmproj import Mmproj
from millrace_shard.weights.gguf.row_orders import HeadOrders, reordered, rotated, with_columns
from millrace_shard.weights.gguf.tensor_names import (
    CONVOLUTION,
    GATE_OF_SHARED,
    RATES,
    is_norm,
    stored_name,
)
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
    largest = form.table().abs().max()
    parts_read = []
    for start, end, blocks in _pieces(file, tensor, rows, columns):
        parts = form.split(blocks)
        scales, offsets = (
            None if each is None else each.view(end - start, -1)[:, of_blocks]
            for each in (parts.scales, parts.offsets)
        )
        assert scales is not None
        for each in (scales * largest, offsets):
            if each is not None:
                _check_finite(file, tensor, each)
        units = parts.units and parts.units.each(partial(torch.reshape, shape=(end - start, -1)))
        codes = parts.codes.view(end - start, -1)[:, inside]
        parts_read.append(BlockCodes(codes, scales, offsets, units))
    units_read = [part.units for part in parts_read if part.units is not None]
    # Units of a block that is cut would belong to other inputs than kernels assume.
    has_units = bool(units_read) and columns[0] == first and UNIT_INPUTS % groups.size == 0
    offsets_read = [part.offsets for part in parts_read if part.offsets is not None]
    return QuantizedTensor(
        codes=torch.cat([part.codes for part in parts_read]),
        values=form.table(),
        scales=torch.cat([part.scales for part in parts_read]),
        offsets=torch.cat(offsets_read) if offsets_read else None,
        group_size=groups.size,
        units=ScaleUnits(
            torch.cat([each.scales for each in units_read]),
            torch.cat([each.offsets for each in units_read]),
        )
        if has_units
        else None,
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


@lru_cache(maxsize=4)
def _header(paths: tuple[Path, ...], states: tuple[str, ...]) -> GgufHeader:  # noqa: ARG001
    """The header of files in these states, without its lists of tokens, which only the preparation needs."""
    return GgufHeader.read(*paths, with_lists=False)


PREFIX = "model."
FEWEST_BITS = 4
"""Of a code in kernels."""


class GgufFiles:
    """A reader with the methods of SafetensorFiles. Methods raise WeightsError, naming the tensor.

    Files of some architectures hold the rows of the query and key projections so that the pairs that RoPE rotates are
    neighbours: row 2j + i of a head is row i * D/2 + j of transformers; files of Qwen 3.5 hold the value heads of delta
    nets in another order. `read` undoes that. It also takes 1 from norms to which the file adds it. Experts, which the
    file stacks, are tensors for themselves, named by their numbers.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = model_files(folder)
        states = (file_state(path) if path.is_file() else "" for path in self._paths)
        self._header = _header(tuple(self._paths), tuple(states))
        self._files = [path.open("rb") for path in self._paths]
        metadata = Metadata(self._header.metadata, self._paths[0].name)
        self._architecture = architecture_of(metadata, self._paths[0].name)
        self._orders = HeadOrders(
            metadata,
            str(metadata.text("general.architecture")),
            is_rotated=self._architecture.is_rotated,
            is_recurrent=self._architecture.is_hybrid,
        )

    def __contains__(self, name: str) -> bool:
        return stored_name(_full(name), self._architecture.modules)[0] in self._header.tensors

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
        if self._architecture.norms_plus_one and is_norm(tensor.name):
            return self._part(tensor, dim, span).float() - 1
        values = self._orders.read(tensor, dim, span, partial(self._part, tensor))
        if tensor.name.endswith(RATES):
            # The file has them as minus their exponentials.
            if not bool((values < 0).all()):
                raise WeightsError(f"tensor {tensor.name} must have values below 0 only")
            return values.float().neg().log()
        return values[:, None] if CONVOLUTION in tensor.name else values

    def codes(self, name: str, cut: Cut) -> QuantizedTensor | None:
        """A part of a matrix as codes; None if its blocks are plain numbers."""
        tensor = self._tensor(name)
        if tensor.format.split is None:
            return None
        if tensor.shape != (cut.outputs, cut.inputs):
            raise WeightsError(
                f"tensor {name} has shape {list(tensor.shape)}, its config says {[cut.outputs, cut.inputs]}"
            )
        read, order = partial(read_codes, self._file_of(tensor), tensor), self._orders.rows(tensor)
        if (inputs := self._orders.columns(tensor)) is not None:
            return with_columns(read(cut.rows, (0, cut.inputs)), inputs, cut.columns)
        if order is None:
            return read(cut.rows, cut.columns)
        start, end = order.cover(cut.rows)
        whole = reordered(read((start, end), cut.columns), order, start)
        return whole.rows(cut.rows[0] - start, cut.rows[1] - start)

    def costs(self) -> list[str]:
        """A line for each block type of fewer than FEWEST_BITS bits, which kernels do not have."""
        names = defaultdict[BlockFormat, list[str]](list)
        for tensor in self._header.tensors.values():
            if tensor.format.split is not None and tensor.format.stored_bits < FEWEST_BITS:
                names[tensor.format].append(tensor.name)
        return [_cost(form, tensors) for form, tensors in names.items()]

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
        return self._paths

    def num_bytes(self) -> int:
        return self._header.size

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _tensor(self, name: str) -> StoredTensor:
        stored, expert = stored_name(_full(name), self._architecture.modules)
        tensor = None if stored is None else self._header.tensors.get(stored)
        if tensor is None or (expert is not None and expert >= tensor.shape[0]):
            raise WeightsError(f"tensor {name} is missing from the checkpoint")
        if GATE_OF_SHARED in tensor.name:
            return replace(tensor, shape=(1, tensor.shape[-1]))
        if CONVOLUTION in tensor.name:
            return replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[-1]))
        return tensor if expert is None else tensor.element(expert)

    def _file_of(self, tensor: StoredTensor) -> BufferedReader:
        return self._files[tensor.part]

    def _part(self, tensor: StoredTensor, dim: int, span: tuple[int, int]) -> Tensor:
        file = self._file_of(tensor)
        if len(tensor.shape) == 1:
            return read_part(file, tensor, (0, 1), span)[0]
        rows = (0, math.prod(tensor.shape[:-1]))
        columns = (0, tensor.shape[-1])
        return read_part(file, tensor, *((span, columns) if dim == 0 else (rows, span)))


def _cost(form: BlockFormat, names: Sequence[str]) -> str:
    layers = {name.split(".")[1] for name in names if name.startswith("blk.")}
    return (
        f"no kernel has {form.name}: {len(names)} tensors of {len(layers)} layers run as codes of"
        f" {FEWEST_BITS} bits, with scales on top, where the file has {form.stored_bits:.2f} bits a weight in all"
    )


def _full(name: str) -> str:
    return name if name.startswith((PREFIX, "lm_head.")) else PREFIX + name


class MmprojFiles:
    """A reader of an mmproj file with the same methods, by transformers' names; all blocks become plain numbers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = GgufHeader.read(path, with_lists=False)
        self._stored = Mmproj.read(self._header).encoder.tensors
        self._file = path.open("rb")

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def is_plain(self, name: str) -> bool:
        return name in self

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def stored_bytes(self, name: str) -> int:
        return sum(self._header.tensors[part].num_bytes for part in self._tensor(name).names)

    def read(self, name: str, *, dim: int, span: tuple[int, int]) -> Tensor:
        """Rows (dim 0) or columns (dim 1) `span` of a tensor: float32 for quantised blocks, else the file's dtype."""
        stored = self._tensor(name)
        if stored.shape[0] == 1:
            return self._whole(stored).narrow(dim, span[0], span[1] - span[0])
        is_whole = dim == 1 or stored.num_heads > 0
        start, end = (0, stored.shape[0]) if is_whole else span
        if stored.has_frames:
            values = torch.stack([self._rows(part, start, end) for part in stored.names], 2)
        else:
            values = torch.cat(list(self._joined(stored, start, end)))
        if stored.num_heads:
            values = rotated(stored.shape[0] // stored.num_heads).undone(values)
        if stored.is_plus_one:
            values = values.float() - 1
        return values.narrow(dim, span[0], span[1] - span[0]) if is_whole else values

    def release(self, values: Tensor) -> None:
        """Do nothing: `values` are a copy, whose memory ends with it."""

    def check_layers(self, count: int) -> None:
        """Do nothing: all tensors were compared with the metadata when the folder was made."""

    def unread(self) -> list[str]:
        """None, for the same reason."""
        return []

    def differ(self, name: str, other: str) -> bool:  # noqa: ARG002
        """False: nothing is tied."""
        return False

    def paths(self) -> list[Path]:
        return [self._path]

    def num_bytes(self) -> int:
        return self._header.size

    def close(self) -> None:
        self._file.close()

    def _tensor(self, name: str) -> Stored:
        if name not in self._stored:
            raise WeightsError(f"tensor {name} is missing from {self._path.resolve().name}")
        return self._stored[name]

    def _whole(self, stored: Stored) -> Tensor:
        """A tensor whose first axis, which the file may lack, has one element."""
        tensor = self._header.tensors[stored.names[0]]
        rows = (0, math.prod(stored.shape[:-1]))
        return read_part(self._file, tensor, rows, (0, stored.shape[-1])).view(stored.shape)

    def _joined(self, stored: Stored, start: int, end: int) -> Iterator[Tensor]:
        """The rows from `start` to `end` that each part has."""
        size = stored.part_shape[0]
        for number, part in enumerate(stored.names):
            first, last = max(start - number * size, 0), min(end - number * size, size)
            if first < last or stored.names == (part,):
                yield self._rows(part, first, last)

    def _rows(self, name: str, start: int, end: int) -> Tensor:
        tensor = self._header.tensors[name]
        if len(tensor.shape) == 1:
            return read_part(self._file, tensor, (0, 1), (start, end))[0]
        inner = math.prod(tensor.shape[1:-1])
        rows, columns = (start * inner, end * inner), (0, tensor.shape[-1])
        return read_part(self._file, tensor, rows, columns).view(end - start, *tensor.shape[1:])
