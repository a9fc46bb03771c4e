"""Loads the CPU operators: the library that the wheel has for this CPU and torch, or else one that is compiled, once.

A compiled library is kept in $MILLRACE_CACHE, or millrace below $XDG_CACHE_HOME or ~/.cache. A lock serialises
concurrent builds, and a library is published atomically. Its name ends with an identity of the compiler: a process with
a compiler uses only this compiler's libraries, a process without one any compiler's. Triton's kernels are kept there.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from millrace_shard.device.pulse import PULSE
from millrace_shard.kernels.toolchain import (
    PACKAGED,
    SOURCES,
    Toolchain,
    TorchPackage,
    cache_base,
    compile_library,
    find_compiler,
    find_library,
    library_name,
)
from millrace_shard.kernels.toolchain import BuildError as BuildError
from millrace_shard.kernels.toolchain import check_owners as check_owners
from millrace_shard.kernels.variants import Variant, cpu_features, fitting_variants
from millrace_shard.variables import Variables

logger = logging.getLogger(__name__)


def toolchains() -> tuple[Toolchain, ...]:
    """A toolchain for each variant that this CPU runs, the best first. Raises BuildError for a CPU without any.

    The compiler is $CXX, or g++ if there is one. A limit of torch's capability limits the variants, too.
    """
    capability = torch.backends.cpu.get_cpu_capability().split("_")[0]
    variants: tuple[Variant, ...] = ()
    if platform.machine() in ("x86_64", "AMD64"):
        variants = fitting_variants(cpu_features(), capability)
    if not variants:
        raise BuildError(f"they need x86 with AVX2, not {platform.machine()} {capability}")
    package = TorchPackage(Path(torch.__file__).parent, torch.__version__)
    compiler = find_compiler(Variables().cxx)
    return tuple(Toolchain.of(variant, package, compiler) for variant in variants)


def packaged_library(toolchain: Toolchain) -> Path | None:
    """The library that the wheel has for this variant; None where it was built without, or for another torch."""
    library = PACKAGED / f"{library_name(SOURCES, toolchain)}.so"
    return library if library.exists() else None


@functools.cache
def load_operators() -> str:
    """Load the CPU operators into torch.ops.millrace; they are compiled if neither wheel nor cache has some that load.

    Returns the name of their library, which has the digest of everything that they depend on. Raises BuildError if they
    cannot be compiled or loaded.
    """
    best, *others = toolchains()
    library = _load_packaged(best)
    if library is not None:
        return library
    try:
        return _load_compiled(best)
    except BuildError as error:
        for other in others:
            if (library := _load_packaged(other)) is not None:
                logger.warning("CPU kernels of %s, which are slower here: %s", other.name, error)
                return library
        raise


def _load_packaged(toolchain: Toolchain) -> str | None:
    """Load the wheel's library for this variant; None, with a warning, where it does not load."""
    library = packaged_library(toolchain)
    if library is None:
        return None
    try:
        _load(library)
    except BuildError as error:
        logger.warning("%s", error)
        return None
    return library.name


def _load_compiled(toolchain: Toolchain) -> str:
    """Load a library from the cache, where it is compiled if there is none that loads. Raises BuildError."""
    folder = cache_folder()
    built = find_library(SOURCES, folder, toolchain)
    if built is not None:
        try:
            _load(built)
        except BuildError as error:
            if toolchain.compiler is None:
                raise
            logger.warning("%s; it is compiled again", error)
            # If it cannot be removed, `compile_library` finds it again and loading fails with the same error.
            with suppress(OSError):
                built.unlink()
        else:
            return built.name
    packaged_for = torches_packaged()
    mismatch = f"this package has CPU kernels for torch {packaged_for}, not {torch.__version__}"
    try:
        if packaged_for and toolchain.compiler:
            logger.info("%s", mismatch)
        built = compile_library(SOURCES, folder, toolchain)
    except BuildError as error:
        raise BuildError(f"{error}; {mismatch}" if packaged_for else str(error)) from error
    _load(built)
    return built.name


def torches_packaged() -> str:
    """The versions of torch, joined, for which the wheel has libraries; empty if it has some for the installed one."""
    versions = {file.name.split("-torch")[1].split("-")[0] for file in PACKAGED.glob("*.so")}
    installed = TorchPackage(Path(), torch.__version__).abi
    return "" if installed in versions else ", ".join(sorted(versions))


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(f"{library} does not load: {error}") from error
    PULSE.follow(torch.ops.millrace.units_taken)


def operators_loaded() -> bool:
    """Whether `load_operators` has succeeded, and the operators have not been disabled."""
    return load_operators.cache_info().currsize > 0


def disable_operators() -> None:
    """Disable the loaded operators, because they are wrong on this machine."""
    load_operators.cache_clear()


def cache_folder(kind: str = "kernels") -> Path:
    """The folder of libraries, or of another kind of compiled code. Raises BuildError if there is no home directory."""
    variables = Variables()
    return cache_base(variables.millrace_cache, variables.xdg_cache_home) / kind


VARIABLE = "TRITON_CACHE_DIR"
DRIVER_LIBRARY = "libcuda.so.1"


def use_triton_cache() -> None:
    """Let Triton use TRITON_CACHE_DIR, or else the folder triton in Millrace's cache; call this before Triton compiles.

    Raises BuildError if the folder cannot be written, or if other users can write to Millrace's.
    """
    named = Variables().triton_cache_dir
    folder = named or cache_folder("triton")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if named is None:
            check_owners(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        changed = "MILLRACE_CACHE" if named is None else VARIABLE
        raise BuildError(
            f"Triton cannot keep compiled kernels: {error}; {changed} names another folder"
        ) from error
    os.environ[VARIABLE] = str(folder)


def missing_for_triton() -> str | None:
    """What Triton cannot compile its launchers without, and this host lacks; None if all is there.

    A cache that has the launchers already needs none of it.
    """
    compiler = Variables().cc
    if compiler is None and not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler: install gcc, or name one by CC"
    if compiler is not None and shutil.which(compiler) is None:
        return f"Triton needs a C compiler, and CC names {compiler}, which is not there"
    scheme = sysconfig.get_default_scheme()
    # As Triton looks for them: Debian's own scheme lacks the headers.
    headers = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not (Path(headers) / "Python.h").exists():
        return (
            f"Triton needs Python's headers, and {headers} has no Python.h: install python3-dev on Debian"
            " and Ubuntu, python3-devel on Fedora and RHEL"
        )
    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return f"Triton needs {DRIVER_LIBRARY} of NVIDIA's driver where ldconfig or LD_LIBRARY_PATH finds it"
    return None


def warn_of_compilations(*, active: bool) -> None:
    """Whether to log a warning for each kernel that Triton compiles; it compiles nothing if it is not imported."""
    if (triton := sys.modules.get("triton")) is not None:
        triton.knobs.compilation.listener = _log_compilation if active else None


def _log_compilation(*, src: Any, cache_hit: bool, **_: object) -> None:  # noqa: ANN401
    if not cache_hit:
        logger.warning(
            "Triton has compiled %s while the server was serving, and all streams waited: please report it",
            src.name,
        )
