"""Reads the canonical file of an adapter, cuts it for one rank, and packs it for the rank's linears."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from millrace_shard.adapters.arena import num_pages, num_slices
from millrace_shard.errors import AdapterInvalid
from millrace_shard.kernels.lora.adapter_table import AdapterTable, PackedPart, Packing, pack_part

FILE = "adapter.safetensors"
FORMAT = "millrace-adapter-1"
HEADER_LENGTH = 8
"""Bytes before the header of a safetensors file, which hold its length."""
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CanonicalModule:
    """The summand of an adapter for one module over all ranks: `((x Aᵀ) * scales) Bᵀ + bias`."""

    a: Tensor
    """[rank, inputs] in the dtype of the file, as is `b`."""
    b: Tensor
    """[outputs, rank]."""
    scales: Tensor
    """[rank] float32."""
    bias: Tensor | None
    """[outputs] float32."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def read_canonical(cache: Path, digest: str) -> dict[str, CanonicalModule]:
    """The modules of the adapter `digest` below the folder `cache`, by PEFT's names. Raises AdapterInvalid."""
    if not DIGEST.fullmatch(digest):
        raise AdapterInvalid(f"{digest!r} is not the SHA-256 of an adapter")
    try:
        content = (cache / digest / FILE).read_bytes()
    except OSError as error:
        raise AdapterInvalid(f"adapter {digest} cannot be read: {error}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise AdapterInvalid(f"adapter {digest} is damaged: its file has another SHA-256")
    try:
        modules = _modules(content)
        tensors = load(content)
        return {name: _module(tensors, name, bool(each["bias"])) for name, each in modules.items()}
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterInvalid(f"adapter {digest} is not in the format {FORMAT}: {error}") from error


def _modules(content: bytes) -> Mapping[str, Any]:
    length = int.from_bytes(content[:HEADER_LENGTH], "little")
    header = json.loads(content[HEADER_LENGTH : HEADER_LENGTH + length])["__metadata__"]
    if header["format"] != FORMAT:
        raise ValueError(f"its format is {header['format']!r}")
    modules: Mapping[str, Any] = json.loads(header["modules"])
    return modules


def _module(tensors: Mapping[str, Tensor], name: str, has_bias: bool) -> CanonicalModule:  # noqa: FBT001
    module = CanonicalModule(
        a=tensors[f"{name}.lora_A"],
        b=tensors[f"{name}.lora_B"],
        scales=tensors[f"{name}.scales"].float(),
        bias=tensors[f"{name}.bias"].float() if has_bias else None,
    )
    fits = module.a.ndim == module.b.ndim == 2 and module.b.shape[1] == module.rank
    if not fits or module.scales.shape != (module.rank,) or not module.rank:
        raise ValueError(f"the tensors of {name} do not fit together")
    return module


Modules = Mapping[str, CanonicalModule]


class AdapterPacker:
    """Packs adapters for the sites of one table, in the dtype of the model."""

    def __init__(
        self, table: AdapterTable, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        """The table has all its sites; results are on `device`, by default the table's."""
        self._device = device or table.device
        self._table = table
        self._dtype = dtype
        self._indexes: dict[str, list[int]] = {}
        for index, part in enumerate(table.parts):
            self._indexes.setdefault(part.name, []).append(index)
        self._packing: list[Packing] = [site.packing for site in table.sites for _ in site.parts]

    def num_pages(self, modules: Modules) -> int:
        """Pages of the adapter on this rank. Raises AdapterInvalid for a module that does not fit the model."""
        slices = [
            (self._table.parts[index], num_slices(module.rank) + (module.bias is not None))
            for name, module in modules.items()
            for index in self._indexes_of(name, module)
        ]
        return num_pages(slices, self._dtype)

    def pack(self, modules: Modules) -> dict[int, PackedPart]:
        """The rank's share of every module, by the index of the part. Raises AdapterInvalid as `num_pages`."""
        return {
            index: self._pack(index, module)
            for name, module in modules.items()
            for index in self._indexes_of(name, module)
        }

    def _indexes_of(self, name: str, module: CanonicalModule) -> list[int]:
        """The indexes of a module's parts: more than one if its outputs are in several parts of the linear."""
        indexes = self._indexes.get(name)
        if indexes is None:
            raise AdapterInvalid(
                f"module {name} is not a part of the model that adapters may change"
            )
        part = self._table.parts[indexes[0]]
        shape = (module.b.shape[0], module.a.shape[1])
        if shape != (part.outputs, part.inputs):
            raise AdapterInvalid(
                f"module {name} is {part.outputs} x {part.inputs}, the adapter's {shape[0]} x {shape[1]}"
            )
        if module.bias is not None and module.bias.shape != (part.outputs,):
            raise AdapterInvalid(f"the bias of {name} has not {part.outputs} elements")
        return indexes

    def _pack(self, index: int, module: CanonicalModule) -> PackedPart:
        part = self._table.parts[index]
        bias = None
        if module.bias is not None and part.adds_bias:
            bias = module.bias[slice(*part.output_range)]
        return pack_part(
            module.a[:, slice(*part.input_range)].to(self._dtype),
            module.b[slice(*part.output_range)].to(self._dtype),
            module.scales,
            bias,
            self._packing[index],
            self._device,
        )
