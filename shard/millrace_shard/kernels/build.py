"""Compiles the CPU operators, once per machine and torch, into a cache folder, and loads them.

The folder is $MILLRACE_CACHE, or millrace below $XDG_CACHE_HOME or ~/.cache. Processes that build at the same time
wait for one another; a library appears whole or not at all. Its name ends with what identifies the compiler: with a
compiler only its own libraries are taken, without one those of any compiler.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

SOURCE = Path(__file__).parent / "cpu" / "csrc" / "cpu_ops.cpp"
BUILD_SECONDS = 600
VERSION_SECONDS = 60
ERROR_CHARS = 2000

logger = logging.getLogger(__name__)


class BuildError(Exception):
    """The operators cannot be had on this machine; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """A C++ compiler and the flags that suit the torch of this process."""

    compiler: tuple[str, ...] | None
    """Its path, and the arguments that are always given."""
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
            compiler=_find_compiler(),
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


def find_library(source: Path, folder: Path, toolchain: Toolchain) -> Path | None:
    """The shared library of `source` and the headers beside it, if `folder` has it.

    Without a compiler it is the newest of any compiler's: an image that was built with one may run without.
    Raises BuildError when another user could have put it there.
    """
    try:
        found = folder.glob(_file_name(source, toolchain))
        library = max(found, key=lambda file: file.stat().st_mtime, default=None)
        if library is not None:
            _check_owners(folder, library)
    except FileNotFoundError:
        # Another process has just removed it, as it does not load.
        return None
    except OSError as error:
        raise BuildError(f"{error}; MILLRACE_CACHE names another folder") from error
    return library


def compile_library(source: Path, folder: Path, toolchain: Toolchain) -> Path:
    """The shared library of `source` and the headers beside it, from `folder` if it is there already.

    Raises BuildError when it is not, and the folder cannot be written, or there is no compiler, or it fails;
    and when another user could have put it there.
    """
    if (built := find_library(source, folder, toolchain)) is not None:
        return built
    if toolchain.compiler is None:
        raise BuildError("no C++ compiler: install g++, or name one in CXX")
    library = folder / _file_name(source, toolchain)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_owners(folder)
        with library.with_suffix(".lock").open("w") as lock:
            _wait_for(lock)
            if not library.exists():
                _build(source, library, toolchain)
        _check_owners(library)
    except OSError as error:
        raise BuildError(f"{error}; MILLRACE_CACHE names another folder") from error
    return library


@functools.cache
def load_operators() -> None:
    """Put the CPU operators into torch.ops.millrace, compiled first if the cache has none that load.

    Raises BuildError when they cannot be compiled or loaded.
    """
    toolchain, folder = Toolchain.find(), cache_folder()
    built = find_library(SOURCE, folder, toolchain)
    if built is not None:
        try:
            _load(built)
        except BuildError as error:
            if toolchain.compiler is None:
                raise
            logger.warning("%s; it is built anew", error)
            # Where it cannot be removed, it is found again and does not load again.
            with suppress(OSError):
                built.unlink()
        else:
            return
    _load(compile_library(SOURCE, folder, toolchain))


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(f"{library} does not load: {error}") from error


def operators_loaded() -> bool:
    """Whether `load_operators` has been called with success, and nothing was found wrong with them since."""
    return load_operators.cache_info().currsize > 0


def disable_operators() -> None:
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
    assert compiler is not None
    logger.info("compiling CPU kernels (once) into %s", library)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
        unit, linked = Path(scratch, "unit.o"), Path(scratch, "library.so")
        _run((*compiler, *toolchain.compile_flags, "-c", str(source), "-o", str(unit)))
        _run((*compiler, "-shared", "-o", str(linked), str(unit), *toolchain.link_flags))
        linked.replace(library)
    logger.info("CPU kernels compiled in %.0f s", time.monotonic() - started)


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(  # noqa: S603 - the compiler, on our own sources
            command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS
        )
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr[:ERROR_CHARS]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {BUILD_SECONDS} s") from error


def _file_name(source: Path, toolchain: Toolchain) -> str:
    """Of the library; without a compiler a pattern, of those that any has built."""
    compiler = toolchain.compiler
    identity = "*" if compiler is None else _identity(compiler)
    return f"{source.stem}-{_key(source, toolchain)}-{identity}.so"


def _identity(compiler: Sequence[str]) -> str:
    """Changes with the compiler and with the arguments that it is always given. Raises BuildError."""
    try:
        told = subprocess.run(  # noqa: S603 - the compiler
            (*compiler, "--version"),
            check=False,
            capture_output=True,
            timeout=VERSION_SECONDS,
            # In one language, whoever asks.
            env=os.environ | {"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler[0]} does not run: {error}") from error
    return hashlib.sha256(repr((compiler[1:], told.stdout)).encode()).hexdigest()[:8]


def _key(source: Path, toolchain: Toolchain) -> str:
    """Changes with what else decides whether the library works: torch, the C library, sources, flags and CPU."""
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


def _wait_for(lock: IO[str]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("waiting for another process, which compiles CPU kernels")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _find_compiler() -> tuple[str, ...] | None:
    """What CXX names, arguments included, else g++."""
    if named := os.environ.get("CXX"):
        try:
            program, *arguments = shlex.split(named)
        except ValueError:
            # A quote that is not closed, or nothing but spaces.
            program, arguments = named, []
        if path := shutil.which(program):
            return path, *arguments
        logger.warning("CXX=%s is not found, so g++ is tried", named)
    path = shutil.which("g++")
    return None if path is None else (path,)


def _openmp(libraries: Path) -> str:
    """The OpenMP runtime that torch brings, so that the process has one thread pool."""
    return next((str(file) for file in sorted(libraries.glob("libgomp*.so*"))), "-lgomp")
