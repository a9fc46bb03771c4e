"""C++ compilers for tests on machines without one: scripts that write the library they should link."""

from __future__ import annotations

from pathlib import Path

import torch

from millrace_shard.kernels.toolchain import Toolchain

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "stand-in {version}"; exit; fi
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""
GOOD = COMPILER.replace("echo library >", f"cp {torch._C.__file__}")
"""A compiler whose output is a library that torch can load."""
FAILING = """#!/bin/sh
if [ "$1" = --version ]; then echo "failing {version}"; exit; fi
echo "unit.cpp:1: no such thing" >&2
echo half > {log}
exit 1
"""


def compiler(folder: Path, script: str = COMPILER, version: int = 1) -> Path:
    """A script of this name in `folder`, where it keeps its log; the version is what it says of itself."""
    path = folder / "compiler"
    path.write_text(script.format(log=folder / "log", version=version))
    path.chmod(0o755)
    return path


def toolchain(folder: Path, script: str = COMPILER, version: int = 1) -> Toolchain:
    """The toolchain with the compiler of `compiler`."""
    path = compiler(folder, script, version)
    return Toolchain(compiler=(str(path),), name="any-torch2.13.0", compile_flags=("-O2",))


def runs(folder: Path) -> int:
    """The number of runs of the compiler: two for each build, to compile and to link."""
    return len((folder / "log").read_text().splitlines())
