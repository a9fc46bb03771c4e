"""A weight in the mapped files of a checkpoint, before a model has packed or copied it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from millrace_shard.device.transfers import Copy, copy_directly
from millrace_shard.kernels.quantized import QuantizedTensor

ELEMENTS_PER_PASS = 1 << 18
"""Elements that are widened to float32 at a time: intermediate tensors stay in the cache."""


logger = logging.getLogger(__name__)

Part = Tensor | QuantizedTensor


class PackedStore(Protocol):
    """Packed weights that are kept from start to start, by name."""

    def get(self, name: str) -> Tensor | None:
        """The packed weight, which the caller takes over; None if there is none."""

    def put(self, name: str, packed: Tensor) -> None:
        """Keep a packed weight, which must not change."""

    def __contains__(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The tensors that a weight consists of."""

    name: str
    """Of the tensors, with the rows and columns of each: equal names are equal weights."""
    warn: Callable[[str, str], object]
    """Takes a reason why the weight is slow or large, and its name; the reason is logged once for all weights."""
    packed: PackedStore | None = None


class UnreadParts(Sequence[Part]):
    """Parts of a weight of `shape` [out, in], codes all of them, which `read` reads at the first use."""

    def __init__(self, shape: tuple[int, int], read: Callable[[], Iterable[Part]]) -> None:
        self.shape = shape
        self._read = read

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        return tuple(self._read())

    def __getitem__(self, index):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
        return self._parts[index]

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [out, in], the concatenation of `parts` [n, in], for a model that computes in `dtype` on `device`.

    The parts are tensors in the dtype of the files, or codes with scales, and may be views of the files. A function
    that takes a stored weight must have read it when it returns, and must not keep the parts: if a mapped file is
    truncated, the next access kills the process.
    """

    parts: Sequence[Part]
    dtype: torch.dtype
    device: torch.device
    copy: Copy = copy_directly
    """Copies a part to the device."""
    origin: Origin | None = None

    @staticmethod
    def of(weight: Tensor) -> StoredWeight:
        """A stored weight of one tensor, which has the model's dtype and device."""
        return StoredWeight((weight,), weight.dtype, weight.device)

    @property
    def shape(self) -> tuple[int, int]:
        if isinstance(self.parts, UnreadParts):
            return self.parts.shape
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...] | None:
        """The parts, if all are tensors of the model's dtype."""
        if isinstance(self.parts, UnreadParts):
            return None
        tensors = tuple(part for part in self.parts if isinstance(part, Tensor))
        is_whole = len(tensors) == len(self.parts)
        return tensors if is_whole and all(part.dtype is self.dtype for part in tensors) else None

    def has_packed(self, route: str) -> bool:
        """Whether an earlier start has kept the weight as it is packed for `route`."""
        store = None if self.origin is None else self.origin.packed
        return store is not None and self._packed_name(route) in store

    def packed(self, route: str) -> Tensor | None:
        """What `has_packed` says is there; the caller takes it over."""
        store = None if self.origin is None else self.origin.packed
        return None if store is None else store.get(self._packed_name(route))

    def keep(self, route: str, packed: Tensor) -> None:
        """Keep `packed`, which must not change, for later starts."""
        if self.origin is not None and self.origin.packed is not None:
            self.origin.packed.put(self._packed_name(route), packed)

    def _packed_name(self, route: str) -> str:
        assert self.origin is not None
        return f"{self.origin.name} {route}"

    def part_of(self, parts: Sequence[Part], first: int) -> StoredWeight:
        """Only `parts` of this weight, whose first output is `first`."""
        origin = self.origin
        if origin is not None:
            origin = replace(origin, name=f"{origin.name} from {first}", packed=None)
        return replace(self, parts=tuple(parts), origin=origin)

    def warn(self, reason: str) -> None:
        """Log a reason why the weight is slow or large; one line names all such weights of a model."""
        if self.origin is None:
            logger.warning("%s", reason)
        else:
            self.origin.warn(reason, self.origin.name)

    def copied(self) -> Tensor:
        """A copy [out, in] in the model's dtype and device; codes are multiplied in float32, then rounded once."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        sizes = [part.shape[0] for part in self.parts]
        for rows, part in zip(torch.split(whole, sizes), self.parts, strict=True):
            if isinstance(part, Tensor):
                self.copy(rows, part)
            else:
                self._copy_codes(rows, part)
        return whole

    def _copy_codes(self, out: Tensor, part: QuantizedTensor) -> None:
        step = max(1, ELEMENTS_PER_PASS // part.shape[1])
        for start in range(0, part.shape[0], step):
            piece = part.rows(start, min(start + step, part.shape[0]))
            self.copy(out[start : start + step], piece.dequantized())
