"""Compiles a variant of the CPU library, and names its file after everything that it depends on."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from millrace_shard.kernels.variants import AMX_FLAGS, Variant

SOURCES = Path(__file__).parent / "cpu" / "csrc"
SHARED_UNIT, TABLE = "cpu_ops.cpp", "operators.h"
"""The unit that is compiled once for all variants, and the header that it includes."""
PACKAGED = Path(__file__).parent / "cpu" / "libraries"
"""Where a wheel has the libraries that were compiled with it."""
BUILD_SECONDS = 1800
VERSION_SECONDS = 60
ERROR_CHARS = 2000
COMMON_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fopenmp", "-fno-math-errno")
LINK_FLAGS = ("-shared", "-s", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10")
"""Without OpenMP, whose runtime torch has loaded already: of two, each would have its own threads."""
_CPU_SLOTS = threading.BoundedSemaphore(
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
"""As many compilers run at once as there are CPUs."""

logger = logging.getLogger(__name__)


class BuildError(Exception):
    """The operators are not available on this machine; the message names the reason."""


@dataclass(frozen=True, slots=True)
class TorchPackage:
    """The folder of an installed torch, and its version."""

    folder: Path
    version: str

    @classmethod
    def find(cls, paths: Iterable[str]) -> TorchPackage | None:
        """The first torch with headers in these folders, which need not be importable here."""
        for path in paths:
            folder = Path(path, "torch")
            if (folder / "version.py").is_file() and (folder / "include").is_dir():
                text = (folder / "version.py").read_text()
                if version := re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE):
                    return cls(folder, version[1])
        return None

    @property
    def abi(self) -> str:
        """The version without the device of a published build, on which what we link with does not depend."""
        return re.sub(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$", "", self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """A C++ compiler, and the flags for a variant and an installed torch."""

    compiler: tuple[str, ...] | None
    """The path of the compiler, and its fixed arguments."""
    name: str
    """That of the variant, and of what it is linked with."""
    compile_flags: tuple[str, ...]
    optional_flags: tuple[str, ...] = ()
    """Flags for which the sources have code that runs only where a CPU has what they stand for."""
    folders: tuple[str, ...] = ()
    """Flags that say where things are, on which the library does not depend."""

    @classmethod
    def of(
        cls, variant: Variant, torch: TorchPackage, compiler: tuple[str, ...] | None
    ) -> Toolchain:
        return cls(
            compiler=compiler,
            name=f"{variant.name}-torch{torch.abi}",
            compile_flags=(*COMMON_FLAGS, *variant.flags),
            optional_flags=AMX_FLAGS if variant.has_amx else (),
            folders=("-isystem", str(torch.folder / "include"), f"-L{torch.folder / 'lib'}"),
        )


def library_name(sources: Path, toolchain: Toolchain) -> str:
    """The name of the library without its suffix; it has a digest of the sources and flags."""
    flags = toolchain.compile_flags, toolchain.optional_flags, LINK_FLAGS
    files = sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])
    return f"cpu_ops-{toolchain.name}-{_digest(flags, files)}"


def find_library(sources: Path, folder: Path, toolchain: Toolchain) -> Path | None:
    """The library of `sources`, if `folder` has it.

    Without a compiler, it is the newest library of any compiler: an image may be built with a compiler and run without
    one. Raises BuildError if another user could have written it.
    """
    try:
        libraries = folder.glob(_file_name(sources, toolchain))
        library = max(libraries, key=lambda file: file.stat().st_mtime, default=None)
        if library is not None:
            check_owners(folder, library)
    except FileNotFoundError:
        # Another process has removed it, because it does not load.
        return None
    except OSError as error:
        raise BuildError(f"{error}; MILLRACE_CACHE names another folder") from error
    return library


def compile_library(sources: Path, folder: Path, toolchain: Toolchain) -> Path:
    """The library of `sources`; it is compiled unless `folder` has it.

    Raises BuildError if the folder cannot be written, if a compiler is missing or fails, and if another user could
    have written the library.
    """
    if (built := find_library(sources, folder, toolchain)) is not None:
        return built
    if toolchain.compiler is None:
        raise BuildError("no C++ compiler: install g++, or name one in CXX")
    compiler = toolchain.compiler
    library = folder / _file_name(sources, toolchain)

    def build(scratch: Path) -> Path:
        logger.info("compiling CPU kernels (once) into %s", library)
        started = time.monotonic()
        linked = _build(sources, folder, scratch, toolchain, compiler)
        logger.info("CPU kernels compiled in %.0f s", time.monotonic() - started)
        return linked

    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_owners(folder)
        _make_once(library, build)
        check_owners(library)
    except OSError as error:
        raise BuildError(f"{error}; MILLRACE_CACHE names another folder") from error
    return library


def find_compiler(named: str | None) -> tuple[str, ...] | None:
    """The compiler that `named`, CXX, names with its arguments, else g++."""
    if named:
        try:
            program, *arguments = shlex.split(named)
        except ValueError:
            # It has an unclosed quote, or consists of spaces.
            program, arguments = named, []
        if path := shutil.which(program):
            return path, *arguments
        logger.warning("CXX=%s is not found, g++ is used instead", named)
    path = shutil.which("g++")
    return None if path is None else (path,)


def cache_base(named: Path | None, xdg_cache_home: Path | None) -> Path:
    """The folder of compiled code: MILLRACE_CACHE, or millrace in XDG_CACHE_HOME or ~/.cache. Raises BuildError."""
    if named is not None:
        return named
    try:
        return (xdg_cache_home or Path.home() / ".cache") / "millrace"
    except RuntimeError as error:
        raise BuildError(f"{error}; MILLRACE_CACHE names a folder to build in") from error


def check_owners(*paths: Path) -> None:
    """Raise BuildError for paths that other users can write, since loading a library runs its code."""
    for path in paths:
        status = path.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
            raise BuildError(
                f"{path} can be written by other users; MILLRACE_CACHE names another folder"
            )


def _make_once(target: Path, make: Callable[[Path], Path]) -> Path:
    """`target`, which `make` makes in a scratch folder unless this or another process has made it before."""
    with target.with_suffix(".lock").open("w") as lock:
        _wait_for(lock)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
                make(Path(scratch)).replace(target)
    return target


def _build(
    sources: Path, folder: Path, scratch: Path, toolchain: Toolchain, compiler: tuple[str, ...]
) -> Path:
    """The library, compiled and linked in `scratch`; what the variants share is kept in `folder`."""
    own = list(toolchain.compile_flags)
    if toolchain.optional_flags and _accepts(compiler, toolchain.optional_flags):
        own += toolchain.optional_flags

    def compile_unit(unit: Path, into: Path, flags: Sequence[str]) -> Path:
        compiled = into / f"{unit.stem}.o"
        _run((*compiler, *flags, *toolchain.folders, "-c", str(unit), "-o", str(compiled)))
        return compiled

    def unit_of(unit: Path) -> Path:
        if unit.name != SHARED_UNIT:
            return compile_unit(unit, scratch, own)
        torch = toolchain.name.rpartition("-")[2]
        name = f"{unit.stem}-shared-{torch}-{_digest(COMMON_FLAGS, (unit, unit.with_name(TABLE)))}"
        shared = folder / f"{name}-{_c_library()}-{_identity(compiler)}.o"
        return _make_once(shared, lambda into: compile_unit(unit, into, COMMON_FLAGS))

    with ThreadPoolExecutor() as pool:
        units = list(pool.map(unit_of, sorted(sources.glob("*.cpp"))))
    linked = scratch / "library.so"
    _run((*compiler, "-o", str(linked), *map(str, units), *toolchain.folders, *LINK_FLAGS))
    return linked


def _digest(flags: Sequence[object], files: Iterable[Path]) -> str:
    digest = hashlib.sha256(repr(flags).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _accepts(compiler: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether the compiler knows these flags."""
    try:
        _run((*compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull))
    except BuildError:
        return False
    return True


def _run(command: Sequence[str]) -> None:
    try:
        with _CPU_SLOTS:
            subprocess.run(  # noqa: S603 - the compiler, on our own sources
                command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS
            )
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr[:ERROR_CHARS]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {BUILD_SECONDS} s") from error


def _file_name(sources: Path, toolchain: Toolchain) -> str:
    """The file name of the library; without a compiler, a pattern that matches every compiler's."""
    compiler = toolchain.compiler
    identity = "*" if compiler is None else _identity(compiler)
    return f"{library_name(sources, toolchain)}-{_c_library()}-{identity}.so"


def _c_library() -> str:
    """The C library that a library is linked with here."""
    return "".join(platform.libc_ver())


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


def _wait_for(lock: IO[str]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("waiting for another process that compiles the CPU kernels")
        fcntl.flock(lock, fcntl.LOCK_EX)
