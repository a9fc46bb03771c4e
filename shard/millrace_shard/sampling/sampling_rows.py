"""The rows of a step to sample, and their parameters on the host and, by slot, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_proto.sampling import SCALARS
from millrace_shard.arrays import Ints
from millrace_shard.device import transfers
from millrace_shard.device.transfers import upload

MOST_KEPT = 64
TILE_ELEMENTS = 1 << 19
"""Scores per tile on CPU, so that the result of a pass is still in the cache for the next pass."""
DEVICE_TILE_ELEMENTS = 1 << 23
"""Scores per tile elsewhere, which bounds scratch memory to some 40 bytes each whatever the batch is."""


def tile_height(device: torch.device, width: int) -> int:
    most = TILE_ELEMENTS if device.type == "cpu" else DEVICE_TILE_ELEMENTS
    return max(1, most // width)


def tiles(rows: Ints, device: torch.device, width: int) -> Iterator[Ints]:
    """Split `rows`, of `width` elements each, into parts that are processed together."""
    height = tile_height(device, width)
    return (rows[start : start + height] for start in range(0, len(rows), height))


class RowIndexes:
    """Uploads columns of row numbers once, as long as they recur. The results are for reading only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[bytes, Tensor] = {}

    def __call__(self, rows: Ints) -> Tensor:
        """`rows` [n] on the device, int64."""
        if transfers.is_synchronous(self._device):
            return upload(rows, self._device)
        key = rows.tobytes()
        index = self._kept.get(key)
        if index is None:
            if len(self._kept) == MOST_KEPT:
                self._kept.clear()
            index = self._kept[key] = upload(rows, self._device)
        return index


PENALTIES = (
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "openai_frequency_penalty",
)
FLOATS = (
    *PENALTIES,
    *(one.name for one in SCALARS if type(one.default) is float and one.name not in PENALTIES),
)
INTS = ("top_k", "do_sample", "num_prompt")
WORDS = {name: index for index, name in enumerate((*FLOATS, *INTS))}
LARGEST = np.iinfo(np.int32).max


class SlotParameters:
    """A column of words for each slot and one for padding, written when a sequence joins. See DeviceRows."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.indexes = RowIndexes(device)
        self._words = torch.zeros(len(WORDS), num_slots + 1, dtype=torch.int32, device=device)
        self._words[WORDS["temperature"]].view(torch.float32).fill_(1.0)

    def admit(self, slots: Ints, parameters: NDArray[np.void]) -> None:
        """Write the `parameters` [n], of dtype PARAMETERS, of the sequences that take over `slots` [n]."""
        floats = np.stack([parameters[name] for name in FLOATS]).view(np.int32)
        ints = np.stack([np.minimum(parameters[name], LARGEST) for name in INTS])
        columns = np.concatenate([slots[None], floats, ints.astype(np.int32)])
        rows = upload(columns.astype(np.int32), self._words.device)
        self._words.index_copy_(1, rows[0].long(), rows[1:])

    def words(self, slots: Tensor) -> Tensor:
        """[words, n] int32 of `slots` [n]."""
        return self._words.index_select(1, slots)


@dataclass(eq=False)
class DeviceRows:
    """Columns of n rows to sample, on the device."""

    slots: Tensor
    """[n] int64."""
    positions: Tensor
    """[n] int64, as in SamplingRows."""
    uniforms: Tensor
    """[n] int64 of UNIFORM_BITS bits; undefined if no row draws."""
    parameters: SlotParameters

    @cached_property
    def words(self) -> Tensor:
        """[words, n] int32, the parameters of the rows."""
        return self.parameters.words(self.slots)

    def column(self, name: str) -> Tensor:
        """[n, 1] float32 or int64, one parameter."""
        return parameter(self.words, name)[:, None]

    def penalties(self) -> Tensor:
        """[4, n] float32, the parameters PENALTIES."""
        return self.words[: len(PENALTIES)].view(torch.float32)

    def select(self, rows: Ints) -> DeviceRows:
        """Some of the rows, which ascend: without a copy where they are consecutive."""
        first, last = int(rows[0]), int(rows[-1])
        if len(rows) == len(self.slots):
            return self
        index: slice | Tensor = slice(first, last + 1)
        if last - first + 1 > len(rows):
            index = self.parameters.indexes(rows)
        return DeviceRows(
            slots=self.slots[index],
            positions=self.positions[index],
            uniforms=self.uniforms[index],
            parameters=self.parameters,
        )


def parameter(words: Tensor, name: str) -> Tensor:
    """[n], the parameter `name` among `words` [words, n]: float32 or int64."""
    word = words[WORDS[name]]
    return word.view(torch.float32) if name in FLOATS else word.long()


Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingRows:
    """R rows. A sequence of a multi-token step has several rows, at consecutive positions."""

    parameters: NDArray[np.void]
    """[R] of sequence.PARAMETERS."""
    positions: Ints
    """[R], index in its sequence of the token to be sampled, which is the number of tokens before it."""
    table_rows: Ints
    """[R], row of the token table, which is the sequence's slot."""
    device: DeviceRows | None = None
    """The same on the device, if it is there already."""

    def select(self, rows: Ints) -> SamplingRows:
        return SamplingRows(
            parameters=self.parameters[rows],
            positions=self.positions[rows],
            table_rows=self.table_rows[rows],
            device=None if self.device is None else self.device.select(rows),
        )

    def column(self, name: str, target: torch.device, chosen: Ints | None = None) -> Tensor:
        """One parameter of the rows, or of those that are `chosen`, [n, 1] on `target`."""
        if self.device is not None:
            return (self.device if chosen is None else self.device.select(chosen)).column(name)
        values = self.parameters[name]
        return upload(values if chosen is None else values[chosen], target)[:, None]


def is_unfiltered(p: NDArray[np.void]) -> Mask:
    """Which rows keep all tokens and report nothing but a log probability; `p` has dtype PARAMETERS."""
    unfiltered: Mask = (
        (p["top_k"] == 0)
        & (p["top_p"] >= 1)
        & (p["typical_p"] >= 1)
        & (p["min_p"] == 0)
        & (p["top_n_sigma"] == 0)
        & (p["xtc_probability"] == 0)
        & (p["top_n_tokens"] == 0)
    )
    return unfiltered


def is_greedy(p: NDArray[np.void]) -> Mask:
    """Which rows take the best token and report nothing but its log probability."""
    greedy: Mask = ~p["do_sample"] & (p["temperature"] == 1) & is_unfiltered(p)
    return greedy


def is_narrow(p: NDArray[np.void], num_candidates: int) -> Mask:
    """Which rows usually keep few tokens, by a threshold on probability or by a top-k below `num_candidates`."""
    narrow_by_top_k = (p["top_k"] > 0) & (p["top_k"] < num_candidates)
    narrow_by_probability = (p["top_k"] == 0) & (
        (p["top_p"] < 1) | ((p["min_p"] > 0) & (p["typical_p"] >= 1))
    )
    needs_all = (p["top_n_sigma"] > 0) | (p["xtc_probability"] > 0)
    narrow: Mask = p["do_sample"] & (narrow_by_top_k | narrow_by_probability) & ~needs_all
    return narrow


def is_penalised(p: NDArray[np.void]) -> Mask:

    penalised: Mask = (p["repetition_penalty"] != 1) | is_counted(p)
    return penalised


def is_counted(p: NDArray[np.void]) -> Mask:
    """Which rows have a penalty that depends on the counts of their tokens."""
    counted: Mask = (
        (p["frequency_penalty"] != 0)
        | (p["presence_penalty"] != 0)
        | (p["openai_frequency_penalty"] != 0)
    )
    return counted


def is_too_short(rows: SamplingRows) -> Mask:
    """Which rows have generated fewer than `min_new_tokens` tokens."""
    p = rows.parameters
    short: Mask = rows.positions - p["num_prompt"] < p["min_new_tokens"]
    return short


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowGroups:
    """Indexes of R rows by the operations that they need, ascending; they depend only on the parameters."""

    watermarked: Ints
    penalised: Ints
    biased: Ints
    ruled: Ints
    """Rows of sequences with rules."""
    has_minimum: bool
    """Whether any row has a minimum of new tokens."""
    is_greedy: Mask
    """[R]."""
    all_greedy: bool
    all_plain: bool
    """Whether every row is greedy, or draws at its temperature from all tokens, and none has a processor."""
    narrow_by_top_k: Ints
    """Rows that keep few tokens by a top-k."""
    narrow_by_probability: Ints
    """Rows that usually keep few tokens by a threshold on probability."""

    @classmethod
    def of(cls, p: NDArray[np.void], *, num_candidates: int) -> RowGroups:
        """Group rows by their parameters `p` [R], of dtype PARAMETERS; a top-k below `num_candidates` is narrow."""
        greedy, narrow = is_greedy(p), is_narrow(p, num_candidates)
        penalised = is_penalised(p)
        is_processed = p["watermark"] | penalised | p["is_biased"] | p["has_rules"]
        is_processed |= p["min_new_tokens"] > 0
        is_plain = (greedy | (p["do_sample"] & is_unfiltered(p))) & ~is_processed
        return cls(
            watermarked=np.flatnonzero(p["watermark"]),
            penalised=np.flatnonzero(penalised),
            biased=np.flatnonzero(p["is_biased"]),
            ruled=np.flatnonzero(p["has_rules"]),
            has_minimum=bool((p["min_new_tokens"] > 0).any()),
            is_greedy=greedy,
            all_greedy=bool(greedy.all()),
            all_plain=bool(is_plain.all()),
            narrow_by_top_k=np.flatnonzero(narrow & (p["top_k"] > 0)),
            narrow_by_probability=np.flatnonzero(narrow & (p["top_k"] == 0)),
        )
