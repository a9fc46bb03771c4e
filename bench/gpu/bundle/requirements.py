"""The packages that Millrace needs beside torch and transformers, from the metadata of packages.

All functions are pure. Markers are evaluated for the machine of the bundle, not for this one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PREINSTALLED = {
    "torch": "2.11.0",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "tokenizers": "0.23.2",
    "huggingface-hub": "1.33.0",
    "safetensors": "0.8.0",
    "numpy": "2.5.2",
}
"""The oldest versions on the machine. The bundle never replaces them."""
TOOLS = ("hypothesis", "psutil", "pytest")
"""The development tools that the benchmark and the tests on a GPU need."""
FOR_CPU_ALONE = frozenset({"intel-openmp"})
MARKERS = {
    "extra": "",
    "implementation_name": "cpython",
    "implementation_version": "3.12.3",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_release": "",
    "platform_system": "Linux",
    "platform_version": "",
    "python_full_version": "3.12.3",
    "python_version": "3.12",
    "sys_platform": "linux",
}

Requires = Callable[[str], Iterable[str]]
"""From a package's name to its Requires-Dist lines."""


def declared(pyproject: Path) -> list[Requirement]:
    """Return the project's own requirements that apply to the machine."""
    project = tomllib.loads(pyproject.read_text())["project"]
    tools = [Requirement(line) for line in project["optional-dependencies"]["dev"]]
    wanted = [
        *map(Requirement, project["dependencies"]),
        *(tool for tool in tools if tool.name in TOOLS),
    ]
    return [each for each in wanted if name_of(each) not in FOR_CPU_ALONE and applies(each)]


def closure(roots: Iterable[Requirement], requires: Requires) -> list[str]:
    """Return the names of `roots` and of all packages that they require, without the preinstalled ones."""
    waiting = list(roots)
    found: dict[tuple[str, frozenset[str]], None] = {}
    while waiting:
        requirement = waiting.pop()
        key = (name_of(requirement), frozenset(requirement.extras))
        if key in found or key[0] in PREINSTALLED:
            continue
        found[key] = None
        waiting += needed(requires(key[0]), requirement.extras)
    return sorted({name for name, _ in found})


def needed(lines: Iterable[str], extras: Collection[str] = ()) -> Iterator[Requirement]:
    """Yield the requirements of Requires-Dist `lines` that apply to the machine."""
    for line in lines:
        requirement = Requirement(line)
        if applies(requirement, extras):
            yield requirement


def applies(requirement: Requirement, extras: Collection[str] = ()) -> bool:
    """Return whether the marker holds on the machine with any of `extras`."""
    marker = requirement.marker
    if marker is None:
        return True
    return any(marker.evaluate({**MARKERS, "extra": extra}) for extra in ("", *extras))


def unmet(
    requirements: Iterable[tuple[str, Requirement]], versions: Mapping[str, Version]
) -> list[str]:
    """Return one line for each requirement that `versions` do not satisfy; each comes with the package that has it."""
    problems = []
    for who, requirement in requirements:
        found = versions.get(name_of(requirement))
        if found is None:
            problems.append(f"{who} needs {requirement}, which is missing")
        elif not requirement.specifier.contains(found, prereleases=True):
            problems.append(f"{who} needs {requirement}, but {found} is there")
    return problems


def name_of(requirement: Requirement) -> str:
    """Return the normalised name."""
    return canonicalize_name(requirement.name)
