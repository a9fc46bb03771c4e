"""Random adapters of rank 16 for a checkpoint, and the flags that register them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.parts.fixture import Fixture
from millrace.verify.adapter_files import linears, write_adapter

RANK = 16
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUERY_VALUE = ("q_proj", "v_proj")
"""The modules that PEFT targets by default."""
MEMORY = "--adapter-memory=4GiB"
"""Room for every adapter that an experiment has in memory."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for adapters and caches, which is removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="millrace-adapters-") as folder:
        yield Path(folder)


def write(
    fixture: Fixture, folder: Path, targets: Sequence[str], count: int, *, name: str
) -> dict[str, Path]:
    """Write `count` adapters with different weights; their folders by name."""
    shapes = {
        module: shape
        for module, shape in linears(fixture.model).items()
        if module.rpartition(".")[2] in targets
    }
    names = [f"{name}-{number}" for number in range(count)]
    return {each: write_adapter(folder / each, shapes, rank=RANK) for each in names}


def flags(adapters: Mapping[str, Path], cache: Path) -> list[str]:
    """Register the adapters of a server whose checked copies are in `cache`."""
    modules = [f"--lora-modules={name}={path}" for name, path in adapters.items()]
    return [f"--adapter-cache={cache}", MEMORY, *modules]
