"""How GGUF files order rows and columns differently from transformers, and how that is undone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millrace_shard.errors import WeightsError
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.weights.gguf.header import StoredTensor
from millrace_shard.weights.gguf.metadata import Metadata
from millrace_shard.weights.gguf.tensor_names import is_rotated
from millrace_shard.weights.quantized.module_tensors import Span


@dataclass(frozen=True, slots=True)
class Order:
    """Rows from `first` on are in blocks: row (o, i, s) of a block in the file is row (i, o, s) of transformers."""

    outer: int
    inner: int
    size: int = 1
    first: int = 0

    def cover(self, span: Span) -> Span:
        """The least span of whole blocks, or rows before them, that has all rows of `span`."""
        start, end = span
        if end <= self.first:
            return span
        block = self.outer * self.inner * self.size
        if start >= self.first:
            start = self.first + (start - self.first) // block * block
        return start, self.first - (self.first - end) // block * block

    def undone(self, values: Tensor, start: int = 0) -> Tensor:
        """Rows of a span that `cover` returned, which begins at `start`, in the order of transformers."""
        plain = max(self.first - start, 0)
        rest = values[plain:]
        blocks = rest.reshape(-1, self.outer, self.inner, self.size, *values.shape[1:])
        ordered = blocks.transpose(1, 2).reshape(rest.shape)
        return torch.cat((values[:plain], ordered)) if plain else ordered


def rotated(head_dim: int) -> Order:
    """Of a projection whose rows stand in pairs that rotary embeddings rotate, head by head."""
    return Order(head_dim // 2, 2)


def reordered(codes: QuantizedTensor, order: Order, start: int) -> QuantizedTensor:
    """`codes` with its rows as `Order.undone` has them."""
    offsets = None if codes.offsets is None else order.undone(codes.offsets, start)
    return replace(
        codes,
        codes=order.undone(codes.codes, start),
        scales=order.undone(codes.scales, start),
        offsets=offsets,
        units=codes.units and codes.units.each(lambda each: order.undone(each, start)),
    )


def with_columns(codes: QuantizedTensor, order: Order, span: Span) -> QuantizedTensor:
    """Columns `span` of `codes` with all columns, in the order of transformers; groups become as narrow as runs."""
    size = math.gcd(codes.group_size, order.size)
    of_groups = replace(order, size=order.size // size)

    def groups(values: Tensor) -> Tensor:
        fine = values.repeat_interleave(codes.group_size // size, 1)
        return _columns(fine, of_groups)[:, span[0] // size : span[1] // size]

    return replace(
        codes,
        codes=_columns(codes.codes, order)[:, slice(*span)],
        scales=groups(codes.scales),
        offsets=None if codes.offsets is None else groups(codes.offsets),
        group_size=size,
        units=None,
    )


def _columns(values: Tensor, order: Order) -> Tensor:
    return order.undone(values.t()).t().contiguous()


class HeadOrders:
    """The orders of rows of a file's tensors, by the numbers of heads in its metadata."""

    def __init__(
        self, metadata: Metadata, arch: str, *, is_rotated: bool, is_recurrent: bool
    ) -> None:
        self._heads: dict[str, int] = {}
        self._rows: dict[str, Order] = {}
        self._columns: dict[str, Order] = {}
        if is_rotated:
            heads = metadata.needed(f"{arch}.attention.head_count")
            kv_heads = metadata.count(f"{arch}.attention.head_count_kv") or heads
            self._heads = {"attn_q": heads, "attn_k": kv_heads}
        if is_recurrent:
            keys, values, inner, key_dim = (
                metadata.needed(f"{arch}.ssm.{name}")
                for name in ("group_count", "time_step_rank", "inner_size", "state_size")
            )
            # The file has the first value head of all keys, then the second of all, and so on.
            repeated = values // keys
            wide, narrow = (Order(repeated, keys, size) for size in (inner // values, 1))
            behind_keys = replace(wide, first=2 * keys * key_dim)
            self._rows = {
                **dict.fromkeys(("attn_qkv", "ssm_conv1d"), behind_keys),
                **dict.fromkeys(("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"), narrow),
                "attn_gate": wide,
            }
            self._columns = {"ssm_out": wide}

    def rows(self, tensor: StoredTensor) -> Order | None:
        """None: in the order of transformers. Raises WeightsError for rows that heads do not divide."""
        module = _module(tensor)
        if is_rotated(tensor.name) and (heads := self._heads.get(module)):
            if tensor.shape[0] % (2 * heads):
                raise WeightsError(
                    f"tensor {tensor.name} has {tensor.shape[0]} rows for {heads} heads"
                )
            return rotated(tensor.shape[0] // heads)
        return self._rows.get(module)

    def columns(self, tensor: StoredTensor) -> Order | None:
        return self._columns.get(_module(tensor))

    def read(
        self, tensor: StoredTensor, dim: int, span: Span, part: Callable[[int, Span], Tensor]
    ) -> Tensor:
        """Rows (`dim` 0) or columns `span` of a tensor, of which `part` gives those in the order of the file."""
        rows, columns = self.rows(tensor), self.columns(tensor)
        if columns is not None:
            if dim == 0:
                return _columns(part(0, span), columns)
            return _columns(part(1, (0, tensor.shape[-1])), columns)[:, slice(*span)]
        if rows is None:
            return part(dim, span)
        if dim == 1:
            return rows.undone(part(1, span))
        whole = rows.cover(span)
        return rows.undone(part(0, whole), whole[0])[span[0] - whole[0] : span[1] - whole[0]]


def _module(tensor: StoredTensor) -> str:
    parts = tensor.name.split(".")
    return parts[2] if len(parts) > 2 else ""
