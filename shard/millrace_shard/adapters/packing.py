"""Cuts an adapter for one rank, and packs it for the rank's linears."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from millrace_shard.adapters.canonical_file import CanonicalModule
from millrace_shard.adapters.pages import num_pages, num_slices
from millrace_shard.errors import AdapterInvalid
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.lora.lora_site import Packing
from millrace_shard.kernels.lora.packed_adapter import PackedPart, pack_part

Modules = Mapping[str, CanonicalModule]


class AdapterPacker:
    """Packs adapters for the sites of one table, in the dtype of the model."""

    def __init__(
        self, table: AdapterTable, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        """The table has all its sites; results are on `device`, by default that of the table."""
        self._device = device or table.device
        self._table = table
        self._dtype = dtype
        self._places: dict[str, list[int]] = {}
        for index, part in enumerate(table.parts):
            self._places.setdefault(part.name, []).append(index)
        self._packing: list[Packing] = [site.packing for site in table.sites for _ in site.parts]

    def num_pages(self, modules: Modules) -> int:
        """Pages of the adapter on this rank. Raises AdapterInvalid for a module that does not fit the model."""
        slices = [
            (self._table.parts[place], num_slices(module.rank) + (module.bias is not None))
            for name, module in modules.items()
            for place in self._places_of(name, module)
        ]
        return num_pages(slices, self._dtype)

    def pack(self, modules: Modules) -> dict[int, PackedPart]:
        """The rank's share of every module, by the place of the module. Raises AdapterInvalid as `num_pages`."""
        return {
            place: self._pack(place, module)
            for name, module in modules.items()
            for place in self._places_of(name, module)
        }

    def _places_of(self, name: str, module: CanonicalModule) -> list[int]:
        """The places of a module: more than one if its outputs are in several parts of the linear."""
        places = self._places.get(name)
        if places is None:
            raise AdapterInvalid(f"the model has no module {name} that adapters may change")
        part = self._table.parts[places[0]]
        found = (module.b.shape[0], module.a.shape[1])
        if found != (part.outputs, part.inputs):
            raise AdapterInvalid(
                f"module {name} is {part.outputs} x {part.inputs}, the adapter's {found[0]} x {found[1]}"
            )
        if module.bias is not None and module.bias.shape != (part.outputs,):
            raise AdapterInvalid(f"the bias of {name} has not {part.outputs} elements")
        return places

    def _pack(self, place: int, module: CanonicalModule) -> PackedPart:
        part = self._table.parts[place]
        bias = None
        if module.bias is not None and part.adds_bias:
            bias = module.bias[slice(*part.output_range)]
        return pack_part(
            module.a[:, slice(*part.input_range)].to(self._dtype),
            module.b[slice(*part.output_range)].to(self._dtype),
            module.scales,
            bias,
            self._packing[place],
            self._device,
        )
