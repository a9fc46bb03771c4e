"""Cuts an adapter for one rank, and packs it for the rank's linears."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from millrace_shard.adapters.canonical_file import CanonicalModule
from millrace_shard.adapters.pages import num_pages, num_slices
from millrace_shard.errors import AdapterInvalid
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.lora.lora_site import LoraPart, Packing
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
        self._places = {part.name: index for index, part in enumerate(table.parts)}
        self._packing: list[Packing] = [site.packing for site in table.sites for _ in site.parts]

    def num_pages(self, modules: Modules) -> int:
        """Pages of the adapter on this rank. Raises AdapterInvalid for a module that does not fit the model."""
        slices = [
            (self._part(name, module), num_slices(module.rank) + (module.bias is not None))
            for name, module in modules.items()
        ]
        return num_pages(slices, self._dtype)

    def pack(self, modules: Modules) -> dict[int, PackedPart]:
        """The rank's share of every module, by the place of the module. Raises AdapterInvalid as `num_pages`."""
        return {
            self._places[name]: self._pack(self._part(name, module), module)
            for name, module in modules.items()
        }

    def _part(self, name: str, module: CanonicalModule) -> LoraPart:
        place = self._places.get(name)
        if place is None:
            raise AdapterInvalid(f"the model has no module {name} that adapters may change")
        part = self._table.parts[place]
        found = (module.b.shape[0], module.a.shape[1])
        if found != (part.outputs, part.inputs):
            raise AdapterInvalid(
                f"module {name} is {part.outputs} x {part.inputs}, the adapter's {found[0]} x {found[1]}"
            )
        if module.bias is not None and module.bias.shape != (part.outputs,):
            raise AdapterInvalid(f"the bias of {name} has not {part.outputs} elements")
        return part

    def _pack(self, part: LoraPart, module: CanonicalModule) -> PackedPart:
        bias = None
        if module.bias is not None and part.adds_bias:
            bias = module.bias[slice(*part.output_range)]
        return pack_part(
            module.a[:, slice(*part.input_range)].to(self._dtype),
            module.b[slice(*part.output_range)].to(self._dtype),
            module.scales,
            bias,
            self._packing[self._places[part.name]],
            self._device,
        )
