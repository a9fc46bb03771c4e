"""The tensors of a GGUF file under the names of transformers' classes, decoded when they are read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from millrace_shard.errors import WeightsError
from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor
from millrace_shard.model_loader.gguf.block_formats import BlockFormat
from millrace_shard.model_loader.gguf.header import GgufHeader, StoredTensor
from millrace_shard.model_loader.gguf.metadata import Metadata
from millrace_shard.model_loader.gguf.tensor_data import read_codes, read_part
from millrace_shard.model_loader.gguf.tensor_names import is_rotated, stored_name
from millrace_shard.model_loader.quantized.cut import Cut

MODEL = "model.gguf"
PREFIX = "model."


class GgufFiles:
    """A reader with the methods of SafetensorFiles. Methods raise WeightsError, naming the tensor.

    Files of the llama architecture hold the rows of the query and key projections so that the pairs that RoPE rotates
    are neighbours: row 2j + i of a head is row i * D/2 + j of transformers. `read` undoes that.
    """

    def __init__(self, folder: Path) -> None:
        """Open `folder`/model.gguf."""
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
        """The shape of the whole tensor."""
        return self._tensor(name).shape

    def format(self, name: str) -> BlockFormat:
        """The format of a tensor's blocks."""
        return self._tensor(name).format

    def stored_bytes(self, name: str) -> int:
        """The bytes of the whole tensor in the file."""
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
        found = read_codes(self._file, tensor, whole, cut.columns)
        offsets = None if found.offsets is None else _unrotated(found.offsets, size)
        heads = replace(
            found,
            codes=_unrotated(found.codes, size),
            scales=_unrotated(found.scales, size),
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
        """The path of the file."""
        return [self._path]

    def num_bytes(self) -> int:
        """The size of the file."""
        return self._header.size

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _tensor(self, name: str) -> StoredTensor:
        stored = stored_name(_full(name))
        found = None if stored is None else self._header.tensors.get(stored)
        if found is None:
            raise WeightsError(f"tensor {name} is missing from the checkpoint")
        return found

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
