"""Cuts an adapter for one rank, and packs it for the rank's linears."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.adapters.canonical_file import CanonicalModule
from millrace_shard.adapters.pages import SLICE, num_pages, num_slices
from millrace_shard.errors import AdapterInvalid
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.kernels.lora.lora_site import LoraPart, Packing
from millrace_shard.kernels.lora.packed_adapter import PackedPart

Modules = Mapping[str, CanonicalModule]


class AdapterPacker:
    """Packs adapters for the sites of one table, in the dtype of the model."""

    def __init__(self, table: AdapterTable, dtype: torch.dtype) -> None:
        """The table has all its sites."""
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
        a = module.a[:, slice(*part.input_range)].to(self._dtype)
        b = module.b[slice(*part.output_range)].to(self._dtype)
        bias = None
        if module.bias is not None and part.adds_bias:
            bias = module.bias[slice(*part.output_range)]
        padding = -module.rank % SLICE
        if self._packing[self._places[part.name]] == "tiles":
            a = torch.ops.millrace.pack_lora_a(a.contiguous())
            b = torch.ops.millrace.pack_lora_b(b.contiguous())
            bias = None if bias is None else F.pad(bias, (0, -len(bias) % SLICE))
        else:
            a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))
        return PackedPart(
            a=self._own(a),
            b=self._own(b),
            factors=self._own(F.pad(module.scales, (0, padding))),
            bias=None if bias is None else self._own(bias),
            num_slices=num_slices(module.rank),
        )

    def _own(self, values: Tensor) -> Tensor:
        """A copy on the device, so that the memory of the file can be freed."""
        return values.to(self._table.device, copy=True).contiguous()
