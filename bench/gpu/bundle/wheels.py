"""Wheels in a folder: their tags, metadata and sizes."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

GLIBC = (2, 39)
"""The newest glibc that a wheel may need."""
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC[1], 4, -1)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
    "linux_x86_64",
)
"""Every platform by name, because pip does not infer older ones from a named one."""
PYTHON_VERSION = "3.12.3"


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel, with the facts of its name and its METADATA."""

    path: Path
    name: str
    version: Version
    tags: frozenset[Tag]
    requires: tuple[str, ...]
    requires_python: SpecifierSet

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """Read a wheel; raises ValueError for another file."""
        name, version, _, tags = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            members = [
                m for m in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", m)
            ]
            if len(members) != 1:
                raise ValueError(f"{path.name} has {len(members)} METADATA files")
            message = Parser().parsestr(archive.read(members[0]).decode())
        return cls(
            path,
            canonicalize_name(name),
            version,
            tags,
            tuple(message.get_all("Requires-Dist") or ()),
            SpecifierSet(message.get("Requires-Python") or ""),
        )

    @property
    def is_for_machine(self) -> bool:
        """Whether CPython 3.12 on x86-64 Linux can install it."""
        return bool(self.tags & SUPPORTED) and self.requires_python.contains(PYTHON_VERSION)


def wheels_in(folder: Path) -> list[Wheel]:
    """Return the wheels of `folder` by name."""
    return [Wheel.read(path) for path in sorted(folder.glob("*.whl"))]


def _supported() -> Iterator[Tag]:
    yield from cpython_tags((3, 12), ["cp312"], PLATFORMS)
    yield from compatible_tags((3, 12), "cp312", PLATFORMS)


SUPPORTED = frozenset(_supported())
