"""One flag over a range of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Self


@dataclass(frozen=True, slots=True)
class Sweep:
    """A flag, without its dashes, and the values it takes."""

    flag: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `flag=value,value`.

        Raises:
            ValueError: it is something else.

        """
        flag, equals, values = text.partition("=")
        given = tuple(value.strip() for value in values.split(","))
        if not flag or not equals or not all(given):
            raise ValueError(f"{text!r} is no sweep: give FLAG=VALUE,VALUE")
        return cls(flag.strip().lstrip("-").replace("_", "-"), given)

    @property
    def field(self) -> str:
        """The setting's name."""
        return self.flag.replace("-", "_")

    @staticmethod
    def points(sweeps: Sequence[Sweep]) -> list[tuple[str, ...]]:
        """Every combination of values, the first sweep changing last; without sweeps, the one empty combination."""
        return list(product(*(sweep.values for sweep in sweeps)))
