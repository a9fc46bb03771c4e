"""A linear layer of the base that adapters may change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """A linear layer of the whole model, by its name in the class of `transformers`."""

    name: str
    inputs: int
    outputs: int
