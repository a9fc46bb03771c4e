"""Compiles the CPU operators, once per machine and torch, into a cache folder, and loads them.

The folder is $MILLRACE_CACHE, or millrace below $XDG_CACHE_HOME or ~/.cache. Processes that build at the same time
wait for one another; a library appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cpu_ops.cpp")
BUILD_SECONDS = 600
ERROR_CHARS = 2000

logger = logging.getLogger(__name__)


class BuildError(Exception):
    """The operators cannot be had on this machine; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """A C++ compiler and the flags that suit the torch of this process."""

    compiler: str | None
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    @classmethod
    def find(cls) -> Toolchain:
        """$CXX or g++, if there is one. Raises BuildError on a CPU that the operators are not for."""
        capability = torch.backends.cpu.get_cpu_capability().split("_")[0]
        if platform.machine() not in ("x86_64", "AMD64") or capability not in ("AVX2", "AVX512"):
            raise BuildError(f"they need x86 with AVX2, not {platform.machine()} {capability}")
        root = Path(torch.__file__).parent
        return cls(
            compiler=shutil.which(os.environ.get("CXX") or "g++"),
            compile_flags=(
                "-std=c++20",
                "-O2",
                "-fPIC",
                "-fopenmp",
                "-fno-math-errno",
                "-march=native",
                # Torch may have been told to do without what the CPU has.
                *(("-mno-avx512f",) if capability == "AVX2" else ()),
                f"-DCPU_CAPABILITY={capability}",
                f"-DCPU_CAPABILITY_{capability}",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                "-isystem",
                str(root / "include"),
            ),
            link_flags=(f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", _openmp(root / "lib")),
        )


def compile_library(source: Path, folder: Path, toolchain: Toolchain) -> Path:
    """The shared library of `source` and the headers beside it, from `folder` if it is there already.

    Raises BuildError when it is not, and the folder cannot be written, or there is no compiler, or it fails;
    and when another user could have put it there.
    """
    try:
        library = folder / f"{source.stem}-{_key(source, toolchain)}.so"
        if library.exists():
            _check_owners(folder, library)
            return library
        folder.mkdir(parents=True, exist_ok=True)
        _check_owners(folder)
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _build(source, library, toolchain)
        _check_owners(library)
    except OSError as error:
        raise BuildError(f"{error}; MILLRACE_CACHE names another folder") from error
    return library


@functools.cache
def load_operators() -> None:
    """Put the CPU operators into torch.ops.millrace, compiled first if they are not in the cache.

    Raises BuildError when they cannot be compiled or loaded.
    """
    library = compile_library(SOURCE, cache_folder(), Toolchain.find())
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(f"{library} does not load (removed, it is built anew): {error}") from error


def operators_loaded() -> bool:
    """Whether `load_operators` has been called with success, and nothing was found wrong with them since."""
    return load_operators.cache_info().currsize > 0


def distrust_operators() -> None:
    """Say that what was loaded is wrong on this machine, and nobody is to use it."""
    load_operators.cache_clear()


def cache_folder() -> Path:
    """Where libraries are kept. Raises BuildError when there is no home to keep them in."""
    if explicit := os.environ.get("MILLRACE_CACHE"):
        return Path(explicit) / "kernels"
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise BuildError(f"{error}; MILLRACE_CACHE names a folder to build in") from error
    return Path(base) / "millrace" / "kernels"


def _check_owners(*paths: Path) -> None:
    """Raise BuildError for what others may write: loading a library is running it."""
    for path in paths:
        status = path.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
            raise BuildError(
                f"{path} can be written by other users; MILLRACE_CACHE names another folder"
            )


def _build(source: Path, library: Path, toolchain: Toolchain) -> None:
    compiler = toolchain.compiler
    if compiler is None:
        raise BuildError("no C++ compiler: install g++, or name one in CXX")
    logger.info("compiling CPU kernels (once) into %s", library)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
        unit, linked = Path(scratch, "unit.o"), Path(scratch, "library.so")
        _run((compiler, *toolchain.compile_flags, "-c", str(source), "-o", str(unit)))
        _run((compiler, "-shared", "-o", str(linked), str(unit), *toolchain.link_flags))
        linked.replace(library)


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(  # noqa: S603 - the compiler, on our own sources
            command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS
        )
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr[:ERROR_CHARS]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {BUILD_SECONDS} s") from error


def _key(source: Path, toolchain: Toolchain) -> str:
    """Changes with what decides whether the library works: torch, the C library, sources, flags and CPU."""
    flags = (toolchain.compile_flags, toolchain.link_flags)
    digest = hashlib.sha256(repr((torch.__version__, platform.libc_ver(), flags, _cpu())).encode())
    for file in sorted([source, *source.parent.glob("*.h")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    first = {line.split(":")[0].strip(): line for line in reversed(lines)}
    return first.get("model name", "") + first.get("flags", "")


def _openmp(libraries: Path) -> str:
    """The OpenMP runtime that torch brings, so that the process has one thread pool."""
    return next((str(file) for file in sorted(libraries.glob("libgomp*.so*"))), "-lgomp")
