"""Compiles the CPU operators, once per machine and version of torch, into a cache folder, and loads them.

The folder is $MILLRACE_CACHE, or millrace below $XDG_CACHE_HOME or ~/.cache. A lock serialises concurrent builds, and a
library is published atomically. Its name ends with an identity of the compiler: a process with a compiler uses only
this compiler's libraries, a process without one any compiler's. Triton's kernels are kept there too.
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

from millrace_shard.variables import Variables

SOURCE = Path(__file__).parent / "cpu" / "csrc" / "cpu_ops.cpp"
BUILD_SECONDS = 600
VERSION_SECONDS = 60
ERROR_CHARS = 2000

logger = logging.getLogger(__name__)


class BuildError(Exception):
    """The operators are not available on this machine; the message names the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """A C++ compiler, and the flags that match the installed torch."""

    compiler: tuple[str, ...] | None
    """The path of the compiler, and its fixed arguments."""
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    @classmethod
    def find(cls) -> Toolchain:
        """The toolchain with $CXX, or g++ if there is one. Raises BuildError for a CPU without support."""
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
                # Torch's capability may have been limited below the CPU's.
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
    """The library of `source` and the headers in its folder, if `folder` has it.

    Without a compiler, it is the newest library of any compiler: an image may be built with a compiler and run without
    one. Raises BuildError if another user could have written it.
    """
    try:
        libraries = folder.glob(_file_name(source, toolchain))
        library = max(libraries, key=lambda file: file.stat().st_mtime, default=None)
        if library is not None:
            check_owners(folder, library)
    except FileNotFoundError:
        # Another process has removed it, because it does not load.
        return None
    except OSError as error:
        raise BuildError(f"{error}; MILLRACE_CACHE names another folder") from error
    return library


def compile_library(source: Path, folder: Path, toolchain: Toolchain) -> Path:
    """The library of `source` and the headers in its folder; it is compiled unless `folder` has it.

    Raises BuildError if the folder cannot be written, if a compiler is missing or fails, and if another user could
    have written the library.
    """
    if (built := find_library(source, folder, toolchain)) is not None:
        return built
    if toolchain.compiler is None:
        raise BuildError("no C++ compiler: install g++, or name one in CXX")
    library = folder / _file_name(source, toolchain)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_owners(folder)
        with library.with_suffix(".lock").open("w") as lock:
            _wait_for(lock)
            if not library.exists():
                _build(source, library, toolchain)
        check_owners(library)
    except OSError as error:
        raise BuildError(f"{error}; MILLRACE_CACHE names another folder") from error
    return library


@functools.cache
def load_operators() -> None:
    """Load the CPU operators into torch.ops.millrace; they are compiled if the cache has none that load.

    Raises BuildError if they cannot be compiled or loaded.
    """
    toolchain, folder = Toolchain.find(), cache_folder()
    built = find_library(SOURCE, folder, toolchain)
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
            return
    _load(compile_library(SOURCE, folder, toolchain))


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(f"{library} does not load: {error}") from error


def operators_loaded() -> bool:
    """Whether `load_operators` has succeeded, and the operators have not been disabled."""
    return load_operators.cache_info().currsize > 0


def disable_operators() -> None:
    """Disable the loaded operators, because they are wrong on this machine."""
    load_operators.cache_clear()


def cache_folder(kind: str = "kernels") -> Path:
    """The folder of libraries, or of another kind of compiled code. Raises BuildError if there is no home directory."""
    variables = Variables()
    if variables.millrace_cache is not None:
        return variables.millrace_cache / kind
    try:
        base = variables.xdg_cache_home or Path.home() / ".cache"
    except RuntimeError as error:
        raise BuildError(f"{error}; MILLRACE_CACHE names a folder to build in") from error
    return base / "millrace" / kind


def check_owners(*paths: Path) -> None:
    """Raise BuildError for paths that other users can write, since loading a library runs its code."""
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
    """The file name of the library; without a compiler, a pattern that matches every compiler's."""
    compiler = toolchain.compiler
    identity = "*" if compiler is None else _identity(compiler)
    return f"{source.stem}-{_key(source, toolchain)}-{identity}.so"


def _identity(compiler: Sequence[str]) -> str:
    """A digest of the compiler's version and fixed arguments. Raises BuildError."""
    try:
        version = subprocess.run(  # noqa: S603 - the compiler
            (*compiler, "--version"),
            check=False,
            capture_output=True,
            timeout=VERSION_SECONDS,
            # The output must not depend on the locale.
            env=os.environ | {"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler[0]} does not run: {error}") from error
    return hashlib.sha256(repr((compiler[1:], version.stdout)).encode()).hexdigest()[:8]


def _key(source: Path, toolchain: Toolchain) -> str:
    """A digest of everything else on which the library depends: torch, the C library, sources, flags and CPU."""
    flags = (toolchain.compile_flags, toolchain.link_flags)
    digest = hashlib.sha256(repr((torch.__version__, platform.libc_ver(), flags, _cpu())).encode())
    for file in sorted([source, *source.parent.glob("*.h")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """Model and flags of the CPU, on which -march=native depends."""
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
        logger.info("waiting for another process that compiles the CPU kernels")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _find_compiler() -> tuple[str, ...] | None:
    """The compiler that CXX names, with its arguments, else g++."""
    if named := Variables().cxx:
        try:
            program, *arguments = shlex.split(named)
        except ValueError:
            # CXX has an unclosed quote, or consists of spaces.
            program, arguments = named, []
        if path := shutil.which(program):
            return path, *arguments
        logger.warning("CXX=%s is not found, g++ is used instead", named)
    path = shutil.which("g++")
    return None if path is None else (path,)


def _openmp(libraries: Path) -> str:
    """The OpenMP runtime of the torch package, if any, so that the process has one thread pool."""
    return next((str(file) for file in sorted(libraries.glob("libgomp*.so*"))), "-lgomp")


VARIABLE = "TRITON_CACHE_DIR"


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
