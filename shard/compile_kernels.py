"""Compile the CPU kernels for a wheel: a build hook.

A wheel gets a library of each variant. An editable install gets this machine's variant, in the cache where a start
looks for it. Without a compiler, or with MILLRACE_KERNELS=none, there are none; MILLRACE_KERNELS="avx2 avx512" is a
choice.
"""

from __future__ import annotations

import atexit
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))

from millrace_shard.kernels.toolchain import (
    PACKAGED,
    SOURCES,
    BuildError,
    Toolchain,
    TorchPackage,
    cache_base,
    compile_library,
    find_compiler,
    library_name,
)
from millrace_shard.kernels.variants import (
    AVX512,
    VARIANTS,
    Variant,
    cpu_features,
    fitting_variants,
)

CHOICE = "MILLRACE_KERNELS"
MANYLINUX = ((28, 24, 11), (31, 28, 12), (34, 29, 13), (35, 30, 13), (36, 30, 13), (39, 33, 15))
"""Minor versions of glibc in tags, each with the GLIBCXX_3.4 and CXXABI_1.3 of its systems. The first is torch's."""

Report = Callable[[str], object]


def missing_torch(requirements: Iterable[str]) -> list[str]:
    """The requirement of torch among these, where kernels can be compiled and no torch is installed for them.

    With an NVIDIA GPU it is gigabytes for kernels that this machine does not need, so there they have to be chosen.
    """
    is_wanted = CHOICE in os.environ or shutil.which("nvidia-smi") is None
    can_compile = is_wanted and chosen_variants() and find_compiler(os.environ.get("CXX"))
    if not can_compile or installed_torch():
        return []
    return [line for line in requirements if re.match(r"torch\b(?![-.])", line)]


def include_kernels(version: str, build_data: dict[str, Any], report: Report) -> None:
    """Compile, and let the wheel have the libraries and a tag that fits them.

    What fails leaves the wheel without kernels, and is reported in a line: a start compiles them, or runs without.
    """
    try:
        if version == "editable":
            variants = [
                one for one in chosen_variants() if one in fitting_variants(cpu_features(), AVX512)
            ]
            compile_variants(variants[:1], report)
            return
        libraries = compile_variants(chosen_variants(), report)
    except BuildError as error:
        report(f"CPU kernels are left out: {error}")
        return
    if libraries:
        folder = PACKAGED.relative_to(Path(__file__).parent)
        for name, library in libraries.items():
            build_data["force_include"][str(library)] = str(folder / f"{name}.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(libraries.values())}"


def chosen_variants() -> list[Variant]:
    """The variants to compile on this system. Ends the build for a name that is not a variant's."""
    chosen = set(os.environ.get(CHOICE, "all").split())
    names = [variant.name for variant in VARIANTS]
    if unknown := chosen - {"all", "none", *names}:
        sys.exit(f"{CHOICE} takes all, none, {', '.join(names)}, but not {', '.join(unknown)}")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return []
    return [variant for variant in VARIANTS if "all" in chosen or variant.name in chosen]


def installed_torch() -> TorchPackage | None:
    """The torch of this process, or of the environment to which an isolated build belongs."""
    return TorchPackage.find([*sys.path, *map(sysconfig.get_path, ("platlib", "purelib"))])


def compile_variants(variants: Iterable[Variant], report: Report) -> dict[str, Path]:
    """The libraries of these variants by name, those that the compiler does not know left out. Raises BuildError."""
    if not (chosen := list(variants)):
        return {}
    compiler, torch = find_compiler(os.environ.get("CXX")), installed_torch()
    if compiler is None or torch is None:
        raise BuildError("no C++ compiler" if compiler is None else "torch is not installed")
    folder = build_folder()

    def compile_one(variant: Variant) -> tuple[str, Path] | None:
        toolchain = Toolchain.of(variant, torch, compiler)
        try:
            return library_name(SOURCES, toolchain), compile_library(SOURCES, folder, toolchain)
        except BuildError as error:
            report(f"the CPU kernels for {variant.name} are left out: {error}")
            return None

    with ThreadPoolExecutor(len(chosen)) as pool:
        return dict(filter(None, pool.map(compile_one, chosen)))


def build_folder() -> Path:
    """The cache of compiled kernels, so that nothing is compiled twice; a temporary one where it cannot be written."""
    named, xdg = (os.environ.get(name) for name in ("MILLRACE_CACHE", "XDG_CACHE_HOME"))
    try:
        folder = cache_base(Path(named) if named else None, Path(xdg) if xdg else None) / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (BuildError, OSError):
        scratch = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, scratch)
        return scratch


def platform_tag(libraries: Iterable[Path]) -> str:
    """The oldest manylinux tag whose systems have all symbols that the libraries name; else linux_x86_64."""
    needed = b"\0".join(library.read_bytes() for library in libraries)

    def newest(prefix: bytes) -> int:
        return max(
            map(int, re.findall(rb"\0" + prefix + rb"(\d+)(?:\.\d+)*(?=\0)", needed)), default=0
        )

    versions = newest(rb"GLIBC_2\."), newest(rb"GLIBCXX_3\.4\."), newest(rb"CXXABI_1\.3\.")
    for policy in MANYLINUX:
        if all(version <= most for version, most in zip(versions, policy, strict=True)):
            return f"manylinux_2_{policy[0]}_x86_64"
    return "linux_x86_64"


class KernelsHook(BuildHookInterface[Any]):
    """Hatch asks this what a build needs, and calls it before it packs a wheel or an editable install."""

    def dependencies(self) -> list[str]:
        """Torch, for its headers."""
        return missing_torch(self.metadata.core.dependencies)

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels."""
        include_kernels(version, build_data, self.app.display_warning)
