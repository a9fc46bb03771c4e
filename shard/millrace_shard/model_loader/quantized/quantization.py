"""How the linears of a checkpoint are quantised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.quantized.quantized_tensor import QuantizedTensor
from millrace_shard.model_loader.quantized.cut import SMALLEST_GROUP, Cut, group_size_at
from millrace_shard.model_loader.quantized.module_tensors import ModuleTensors


class LinearFormat(Protocol):
    """The tensors that hold the weight of a linear."""

    @property
    def splits_inputs(self) -> bool:
        """Whether ranks may have parts of the inputs; not if the file has them in another order."""

    def group_size(self, inputs: int) -> int:
        """Inputs that share a scale; all `inputs` if an output has one scale."""

    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        """The rank's part. Raises WeightsError, naming the tensor."""


FormatOf = Callable[[Sequence[str]], LinearFormat | None]
"""The format of a module by its names, of which any may be in the config; None if it is not quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The method of a checkpoint."""

    method: str
    """As TGI's `--quantize` names it where it does, else as `quant_method`."""
    summary: str
    """The method and its settings, for the log."""
    format_of: FormatOf
    notes: tuple[str, ...] = ()
    """What differs from the settings of the checkpoint, for the log."""

    def check_ranks(self, modules: Sequence[tuple[str, int]], world_size: int) -> None:
        """Raise UnsupportedModel unless `world_size` ranks can share the inputs of each (module, inputs)."""
        for module, inputs in modules:
            found = self.format_of((module,))
            if found is None or _splits(found, inputs, world_size):
                continue
            possible = [n for n in range(1, inputs + 1) if _splits(found, inputs, n)]
            if not possible:
                raise UnsupportedModel(
                    f"{self.method}: groups of {found.group_size(inputs)} do not fit the {inputs} inputs of {module}"
                )
            reason = (
                f"share groups of {found.group_size(inputs)} among {inputs} inputs"
                if found.splits_inputs
                else "share inputs in the order of activations (desc_act)"
            )
            raise UnsupportedModel(
                f"{self.method}: {world_size} shards cannot {reason}, as {module} has; "
                f"these numbers of shards work: {', '.join(map(str, possible))}"
            )


def _splits(found: LinearFormat, inputs: int, ranks: int) -> bool:
    if ranks == 1:
        return min(found.group_size(inputs), inputs) >= min(SMALLEST_GROUP, inputs)
    if not found.splits_inputs or inputs % ranks:
        return False
    size, share = found.group_size(inputs), inputs // ranks
    return size >= inputs or group_size_at(size, share) >= SMALLEST_GROUP
