"""The adapters of a model by slot, the linears that they change, and the adapters of the rows that run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload

BLOCK_ROWS = 16
"""Rows of a block of `AdapterRows.blocks`."""


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """The rows of one adapter."""

    slot: int
    """Its adapter slot, at least 1."""
    rows: Tensor
    """[n] int64 on the device, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterRows:
    """The adapter slot of each of T rows, at least one of which has an adapter. It outlives the step."""

    host: Ints
    """[T], the adapter slot of each row; 0 for rows of the base model."""
    slots: Tensor
    """[T] int32 on the device: `host`, as operators take it in `lora_rows`."""
    groups: tuple[AdapterGroup, ...]
    """The rows of each adapter, by ascending slot."""
    blocks: Tensor
    """[N, 1 + BLOCK_ROWS] int32 on the device: an adapter slot, then rows that have it, -1 in the end.

    A block of zeros is without an adapter.
    """
    logits: AdapterRows | None
    """The same for the rows whose logits are needed; None if none of them has an adapter."""

    @staticmethod
    def of(
        host: Ints, device: torch.device, *, logit_rows: Ints | None = None
    ) -> AdapterRows | None:
        """Rows with the adapter slots `host` [T], of which `logit_rows` need logits, or all; None without adapters."""
        if not host.any():
            return None
        groups = tuple(
            AdapterGroup(int(slot), upload(np.flatnonzero(host == slot), device))
            for slot in np.unique(host[host > 0])
        )
        slots = upload(host.astype(np.int32), device)
        blocks = upload(_blocks(host), device)
        alone = AdapterRows(host=host, slots=slots, groups=groups, blocks=blocks, logits=None)
        logits = alone if logit_rows is None else AdapterRows.of(host[logit_rows], device)
        return replace(alone, logits=logits)

    def select(self, rows: Ints) -> AdapterRows | None:
        """The adapters of `rows` [n] of these rows; None if none of them has one."""
        return AdapterRows.of(self.host[rows], self.slots.device)


def most_blocks(num_rows: int, max_adapters: int) -> int:
    """The most blocks that `num_rows` rows of at most `max_adapters` adapters have."""
    return min(num_rows, num_rows // BLOCK_ROWS + max_adapters)


def _blocks(host: Ints) -> NDArray[np.int32]:
    """The blocks of rows with the adapter slots `host`."""
    rows = np.flatnonzero(host)
    rows = rows[np.argsort(host[rows], kind="stable")]
    slots, starts, counts = np.unique(host[rows], return_index=True, return_counts=True)
    num_blocks = -(-counts // BLOCK_ROWS)
    ends = np.cumsum(num_blocks)
    within = np.arange(len(rows)) - np.repeat(starts, counts)
    block = np.repeat(ends - num_blocks, counts) + within // BLOCK_ROWS
    blocks = np.full((ends[-1], 1 + BLOCK_ROWS), -1, dtype=np.int32)
    blocks[:, 0] = np.repeat(slots, num_blocks)
    blocks[block, 1 + within % BLOCK_ROWS] = rows
    return blocks


Packing = Literal["plain", "tiles", "slices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPart:
    """One module of the model, as PEFT names it, in the linear of this rank that computes it."""

    name: str
    """Such as "model.layers.0.self_attn.q_proj"."""
    inputs: int
    """Inputs of the whole module; `outputs` likewise."""
    outputs: int
    input_range: tuple[int, int]
    """The inputs that this rank multiplies."""
    output_range: tuple[int, int]
    """The outputs that this rank computes."""
    first_output: int = 0
    """The place of `output_range[0]` among the outputs of the linear."""
    adds_bias: bool = True
    """Whether this rank adds the bias of an adapter: one rank of those whose results are summed."""

    @property
    def num_inputs(self) -> int:
        start, end = self.input_range
        return end - start

    @property
    def num_outputs(self) -> int:
        start, end = self.output_range
        return end - start


@dataclass(slots=True, kw_only=True, eq=False)
class LoraSite:
    """A linear of this rank with the modules that it computes."""

    table: AdapterTable
    parts: tuple[LoraPart, ...]
    """In the order of the linear's outputs."""
    first: int
    """The place of the first part among all parts of the model; the others follow."""
    is_head: bool = False
    """Whether its rows are those whose logits are needed, instead of all tokens."""
    packing: Packing = "plain"
    """The layout of adapters for this linear, set by the kernels that make the linear.

    With "tiles", A and B are packed by `pack_lora_a` and `pack_lora_b`; with "slices", they lie
    slice by slice, see PackedPart. `lora_table` holds the addresses of both.
    """

    @property
    def rows(self) -> AdapterRows | None:
        """The adapters of the rows of the running product; None if no row has one."""
        return self.table.logit_rows if self.is_head else self.table.token_rows

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """`lora_rows` [T] int32 and `lora_table` of the running product; both are empty if no row has an adapter."""
        rows = self.rows
        if rows is None:
            return self.table.nothing
        return rows.slots, self.table.lora_table


SLICE = 16
"""Ranks of a slice, and the multiple to which outputs are rounded up."""
DEPTH = 32
"""The multiple to which inputs are rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedPart:
    """The summand of an adapter for one module: `((x Aᵀ) * factors) Bᵀ + bias`, with ranks padded to slices of 16."""

    a: Tensor
    """Plain: [16 * slices, inputs of this rank] in the model's dtype; tiles: as `pack_lora_a` returns it.

    Slices: as plain, with inputs rounded up to a multiple of 32.
    """
    b: Tensor
    """Plain: [outputs of this rank, 16 * slices] in the model's dtype; tiles: as `pack_lora_b` returns it.

    Slices: [slices, outputs of this rank rounded up to a multiple of 16, 16] in the model's dtype.
    """
    factors: Tensor
    """[16 * slices] float32, zeros past the last rank."""
    bias: Tensor | None
    """[outputs of this rank] float32, unless plain rounded up to a multiple of 16; None if this rank adds none."""
    num_slices: int


def pack_part(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    packing: Packing,
    device: torch.device,
) -> PackedPart:
    """Pack one module: `a` [r, in] and `b` [out, r] in the model's dtype, `scales` [r] and `bias` [out] float32.

    The result has new memory on `device`.
    """
    rank, padding = len(scales), -len(scales) % SLICE
    if packing == "tiles":
        a = torch.ops.millrace.pack_lora_a(a.contiguous())
        b = torch.ops.millrace.pack_lora_b(b.contiguous())
    elif packing == "slices":
        a = F.pad(a, (0, -a.shape[1] % DEPTH, 0, padding))
        b = F.pad(b, (0, padding, 0, -len(b) % SLICE))
        b = b.view(len(b), -1, SLICE).transpose(0, 1)
    else:
        a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))

    if packing != "plain" and bias is not None:
        bias = F.pad(bias, (0, -len(bias) % SLICE))

    def own(values: Tensor) -> Tensor:
        return values.to(device, copy=True).contiguous()

    return PackedPart(
        a=own(a),
        b=own(b),
        factors=own(F.pad(scales, (0, padding))),
        bias=None if bias is None else own(bias),
        num_slices=-(-rank // SLICE),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedAdapter:
    """An adapter that is ready for use on this rank."""

    digest: str
    parts: Mapping[int, PackedPart]
    """By the module's index among all parts of the model; other modules are unchanged."""
    num_pages: int
    """Pages of 64 KiB that it counts for."""
    first_page: int | None = None
    """Its first page in the memory that is reserved for adapters; None if its tensors are separate allocations."""

    @property
    def most_slices(self) -> int:
        return max((part.num_slices for part in self.parts.values()), default=0)


ENTRY = 5
"""Numbers of an entry of `lora_table`."""
LEAST_GRID_SLICES = 4
"""Slices of the launches in graphs, which are captured without adapters: ranks up to 64."""


class AdapterTable:
    """The adapters in slots 1 … `max_adapters` of one model; slot 0 stands for no adapter.

    Only the engine thread changes it, between two steps, and only the engine thread runs forward passes.
    """

    def __init__(self, device: torch.device) -> None:
        """Without slots at first. The model adds its sites while it is loaded."""
        self.device = device
        self.parts: list[LoraPart] = []
        """All modules, in order of execution."""
        self.sites: list[LoraSite] = []
        self.token_rows: AdapterRows | None = None
        """The adapters of the tokens of the running pass."""
        self.logit_rows: AdapterRows | None = None
        """The adapters of the rows of the running head."""
        self._adapters: dict[int, PackedAdapter] = {}
        self.max_adapters = 0
        self.num_changes = 0
        """Adapters that were put into a slot or removed."""
        self.versions: Ints = np.zeros(1, dtype=np.int64)
        """[max_adapters + 1], a number that grows when a slot gets or loses an adapter."""
        self.lora_table = self._empty_table()
        """[max_adapters + 1, number of parts, 5] int64 on the device, for the sites that are not plain.

        An entry holds the addresses of A, B, factors and bias, 0 for no bias, then the number of slices. An entry of
        zeros is a module that the adapter does not change.
        """
        self.nothing = (
            torch.empty(0, dtype=torch.int32, device=device),
            torch.empty(0, 0, ENTRY, dtype=torch.int64, device=device),
        )
        """The operands of a step without adapters."""

    def add_site(self, parts: Sequence[LoraPart], *, is_head: bool = False) -> LoraSite:
        """A new site behind the others, in order of execution."""
        site = LoraSite(table=self, parts=tuple(parts), first=len(self.parts), is_head=is_head)
        self.parts += parts
        self.sites.append(site)
        return site

    def resize(self, max_adapters: int) -> None:
        """Drop all adapters, and have `max_adapters` slots."""
        self._adapters.clear()
        self.max_adapters = max_adapters
        self.versions = np.zeros(max_adapters + 1, dtype=np.int64)
        self.lora_table = self._empty_table()

    @property
    def grid_slices(self) -> int:
        """Slices that launches have programs for: as many as a module of any adapter has, or more."""
        return max(LEAST_GRID_SLICES, *(each.most_slices for each in self._adapters.values()), 0)

    @property
    def reads_on_device(self) -> bool:
        """Whether every linear reads on the device which adapters its rows have."""
        return all(site.packing == "slices" for site in self.sites)

    def get(self, slot: int) -> PackedAdapter | None:
        return self._adapters.get(slot)

    def adapters(self) -> dict[int, PackedAdapter]:
        return dict(self._adapters)

    def part(self, slot: int, index: int) -> PackedPart | None:
        """The weights of the adapter in `slot` for part `index`; None if it does not change this module."""
        return self._adapters[slot].parts.get(index)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """Put `adapter` into `slot`, in place of another one."""
        assert 1 <= slot <= self.max_adapters, "the slot is checked before"
        self.move(slot, adapter)
        self._changed(slot)

    def move(self, slot: int, adapter: PackedAdapter) -> None:
        """Replace the adapter in `slot` by itself at other addresses."""
        self._adapters[slot] = adapter
        row = np.zeros((len(self.parts), ENTRY), dtype=np.int64)
        for site in self.sites:
            for index in range(site.first, site.first + len(site.parts)):
                part = adapter.parts.get(index)
                if part is not None and site.packing != "plain":
                    row[index] = _entry(part)
        self.lora_table[slot] = upload(row, self.device)

    def remove(self, slot: int) -> None:
        if self._adapters.pop(slot, None) is not None:
            self.lora_table[slot] = 0
            self._changed(slot)

    def _changed(self, slot: int) -> None:
        self.num_changes += 1
        self.versions[slot] = self.num_changes

    def _empty_table(self) -> Tensor:
        shape = (self.max_adapters + 1, len(self.parts), ENTRY)
        return torch.zeros(shape, dtype=torch.int64, device=self.device)


@contextmanager
def running(
    table: AdapterTable | None,
    *,
    tokens: AdapterRows | None = None,
    logits: AdapterRows | None = None,
) -> Iterator[None]:
    """Let the sites of `table` apply the adapters of these rows inside."""
    if table is None:
        yield
        return
    table.token_rows, table.logit_rows = tokens, logits
    try:
        yield
    finally:
        table.token_rows = table.logit_rows = None


def _entry(part: PackedPart) -> list[int]:
    bias = 0 if part.bias is None else part.bias.data_ptr()
    return [part.a.data_ptr(), part.b.data_ptr(), part.factors.data_ptr(), bias, part.num_slices]
