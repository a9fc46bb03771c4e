"""Random adapters for the demo model: those that stay as they are, those that change, and corrupt ones."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.harness.paths import DEMO
from millrace.verify.adapter_files import linears, write_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
STEADY: Mapping[str, tuple[int, bool]] = {
    "rank-1": (1, True),
    "rank-4": (4, False),
    "rank-16": (16, True),
    "rank-24": (24, True),
    "rank-40": (40, False),
}
"""Rank of each registered adapter, and whether it has all linear layers or two in each block."""
SHELVED = "shelved"
"""An unregistered adapter, below the root of folders that clients may name."""
REPLACED, OVERWRITTEN = "replaced", "overwritten"
"""Registered adapters of two versions: the operator loads another folder, or overwrites the files."""
CHANGING: Mapping[str, tuple[int, int]] = {REPLACED: (8, 24), OVERWRITTEN: (8, 8)}
"""Ranks of their versions; files that are overwritten one by one have the same configuration."""
LATE = tuple(f"late-{number}" for number in range(4))
"""Adapters below the root that only requests during a fault name."""
WHOLE = "whole"
"""An adapter below the root that needs nearly all memory."""
MAX_LORAS = 6
NUM_PAGES = 38
"""Memory for fewer adapters than there are, in pages of 64 KiB."""
CYCLE_SECONDS = 0.5
ADMIN_KEY = "chaos"


class Adapters:
    """The folders of a campaign's adapters."""

    def __init__(self, folder: Path) -> None:
        """Write them all below `folder`."""
        self.root = folder / "root"
        self._folder = folder
        self._all = linears(DEMO)
        self._two = {
            name: shape for name, shape in self._all.items() if name.endswith(("q_proj", "v_proj"))
        }
        for name, (rank, is_wide) in STEADY.items():
            self._write(folder / name, rank, is_wide=is_wide)
        for name, ranks in CHANGING.items():
            for version, rank in enumerate(ranks):
                self._write(self.version(name, version), rank)
        shutil.copytree(self.version(OVERWRITTEN, 0), folder / OVERWRITTEN)
        self._write(self.root / SHELVED, 12)
        self._write(self.root / WHOLE, 64)
        for number, name in enumerate(LATE):
            self._write(self.root / name, 4 + 8 * number)

    def flags(self) -> list[str]:
        """Flags of the launcher."""
        folders = {name: self._folder / name for name in (*STEADY, OVERWRITTEN)}
        folders[REPLACED] = self.version(REPLACED, 0)
        return [
            *(f"--lora-modules={name}={folder}" for name, folder in folders.items()),
            f"--adapter-root={self.root}",
            f"--adapter-cache={self._folder / 'cache'}",
            f"--adapter-memory={NUM_PAGES * 64}KiB",
            f"--max-loras={MAX_LORAS}",
            f"--adapter-cycle-time-s={CYCLE_SECONDS:g}",
            f"--admin-key={ADMIN_KEY}",
        ]

    def version(self, name: str, number: int) -> Path:
        """The folder of a version of a changing adapter."""
        return self._folder / f"{name}-{number}"

    def steady(self, name: str) -> Path:
        """The folder of an adapter of `STEADY`."""
        return self._folder / name

    def overwrite(self, number: int) -> None:
        """Replace the weights in the folder `OVERWRITTEN` by one version's, in one rename."""
        partial = self._folder / f"{WEIGHTS}.partial"
        shutil.copyfile(self.version(OVERWRITTEN, number) / WEIGHTS, partial)
        partial.replace(self._folder / OVERWRITTEN / WEIGHTS)

    def shelve(self, name: str, source: str) -> None:
        """Copy an adapter of `STEADY` into a new folder below the root."""
        shutil.copytree(self.steady(source), self.root / name)

    def corrupt(self, name: str, drawing: random.Random) -> str:
        """Write a new folder below the root that no server can use; returns what is wrong with it."""
        wrong = drawing.choice(list(CORRUPTIONS))
        folder = self.root / name
        self._write(folder, drawing.randint(1, 40))
        CORRUPTIONS[wrong](folder, drawing)
        return wrong

    def partials(self) -> list[str]:
        """Names of incomplete versions in the adapter cache."""
        return [path.name for path in (self._folder / "cache").glob(".*")]

    def _write(self, folder: Path, rank: int, *, is_wide: bool = True) -> None:
        write_adapter(folder, self._all if is_wide else self._two, rank=rank)


def _cut(folder: Path, drawing: random.Random) -> None:
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(weights[: drawing.randrange(len(weights))])


def _not_finite(folder: Path, _: random.Random) -> None:
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(weights[:-2] + b"\xff\xff")


def _other_header(folder: Path, drawing: random.Random) -> None:
    weights = bytearray((folder / WEIGHTS).read_bytes())
    weights[8 + drawing.randrange(64)] ^= 0x80
    (folder / WEIGHTS).write_bytes(weights)


def _pickle(folder: Path, _: random.Random) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def _configure(folder: Path, **fields: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


CORRUPTIONS: dict[str, Callable[[Path, random.Random], None]] = {
    "cut short": _cut,
    "a value that is not finite": _not_finite,
    "a damaged header": _other_header,
    "a pickle alone": _pickle,
    "another rank": lambda folder, _: _configure(folder, r=50),
    "an unknown field": lambda folder, _: _configure(folder, new_kind_of_adapter=True),
    "DoRA": lambda folder, _: _configure(folder, use_dora=True),
}
"""Functions that break an adapter, by what is wrong then."""
