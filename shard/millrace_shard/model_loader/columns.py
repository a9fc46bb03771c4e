"""Outputs of a linear in a checkpoint, and how the ranks share them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows of a tensor: `units` of `unit_size` rows from `first` on, split over the ranks by units.

    If there are fewer units than ranks, neighbouring ranks hold the same unit.
    """

    name: str
    units: int
    unit_size: int = 1
    first: int = 0
    total: int | None = None
    """Rows of the whole tensor, which may have others before and after these; None: these are all."""

    @property
    def rows(self) -> int:
        """Rows of the whole tensor."""
        return self.units * self.unit_size if self.total is None else self.total

    def of(self, kind: str) -> Columns:
        """The same rows of the tensor `kind` of the module that `name` names."""
        return replace(self, name=f"{self.name}.{kind}")

    def span(self, rank: int, world_size: int) -> tuple[int, int]:
        """The half-open range of rows of one rank."""
        count = max(1, self.units // world_size)
        first = rank * self.units // world_size
        start = self.first + first * self.unit_size
        return start, start + count * self.unit_size
