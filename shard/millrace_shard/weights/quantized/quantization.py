"""The quantisation of a checkpoint's linears."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.weights.quantized.module_tensors import (
    SMALLEST_GROUP,
    Cut,
    ModuleTensors,
    group_size_at,
)


class LinearFormat(ABC):
    """The tensors that hold the weight of a linear."""

    __slots__ = ()
    splits_inputs: bool
    """Whether ranks may have parts of the inputs; not if the file has them in another order."""
    whole_groups: ClassVar[bool] = False
    """Whether the last group must be as large as the others."""

    @abstractmethod
    def group_size(self, inputs: int) -> int:
        """Inputs that share a scale; all `inputs` if an output has one scale."""

    @abstractmethod
    def read(self, tensors: ModuleTensors, cut: Cut) -> QuantizedTensor:
        """The rank's part. Raises WeightsError, naming the tensor."""


MOST_RANKS = 1024
"""Numbers of ranks that are tried for a message."""
FormatOf = Callable[[Sequence[str]], LinearFormat | None]
"""The format of a module by its names, of which any may be in the config; None if it is not quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The method of a checkpoint."""

    method: str
    """The name of TGI's `--quantize` if it has one, else of `quant_method`."""
    summary: str
    """The method and its settings, for the log."""
    format_of: FormatOf
    notes: tuple[str, ...] = ()
    """Differences from the settings of the checkpoint, for the log."""

    def check_groups(self, modules: Sequence[tuple[str, int]]) -> None:
        """Raise UnsupportedModel unless kernels take the groups of each (module, inputs)."""
        for module, inputs in modules:
            linear_format = self.format_of((module,))
            if linear_format is not None and not _splits(linear_format, inputs, 1):
                size = linear_format.group_size(inputs)
                remedy = (
                    f"multiples of {size}"
                    if size >= SMALLEST_GROUP
                    else f"groups of {SMALLEST_GROUP} or more"
                )
                raise UnsupportedModel(
                    f"{self.method}: groups of {size} do not fit the {inputs} inputs of {module}; {remedy} do"
                )

    def check_ranks(self, modules: Sequence[tuple[str, int]], world_size: int) -> None:
        """Raise UnsupportedModel unless `world_size` ranks can share the inputs of each (module, inputs).

        `check_groups` must have accepted the modules.
        """
        for module, inputs in modules:
            linear_format = self.format_of((module,))
            if linear_format is None or _splits(linear_format, inputs, world_size):
                continue
            most = min(inputs, MOST_RANKS)
            possible = [n for n in range(1, most + 1) if _splits(linear_format, inputs, n)]
            reason = (
                f"share groups of {linear_format.group_size(inputs)} among {inputs} inputs"
                if linear_format.splits_inputs
                else "share inputs in the order of activations (desc_act)"
            )
            raise UnsupportedModel(
                f"{self.method}: {world_size} shards cannot {reason}, as {module} has; "
                f"these numbers of shards work: {', '.join(map(str, possible))}"
            )


def _splits(linear_format: LinearFormat, inputs: int, ranks: int) -> bool:
    if linear_format.whole_groups and inputs % linear_format.group_size(inputs):
        return False
    if ranks == 1:
        return min(linear_format.group_size(inputs), inputs) >= min(SMALLEST_GROUP, inputs)
    if not linear_format.splits_inputs or inputs % ranks:
        return False
    size, share = linear_format.group_size(inputs), inputs // ranks
    return size >= inputs or group_size_at(size, share) >= SMALLEST_GROUP
