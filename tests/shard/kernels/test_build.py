"""Building with a stand-in compiler, so that these run where there is none."""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
import torch

from millrace_shard.kernels import build
from millrace_shard.kernels.build import BuildError, Toolchain, compile_library

COMPILER = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""
FAILING = """#!/bin/sh
echo "unit.cpp:1: no such thing" >&2
echo half > {log}
exit 1
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "part.h").write_text("// header\n")
    unit = folder / "unit.cpp"
    unit.write_text("// unit\n")
    return unit


def toolchain(tmp_path: Path, script: str = COMPILER) -> Toolchain:
    compiler = tmp_path / "compiler"
    compiler.write_text(script.format(log=tmp_path / "log"))
    compiler.chmod(0o755)
    return Toolchain(compiler=str(compiler), compile_flags=("-O2",), link_flags=("-lm",))


def runs(tmp_path: Path) -> int:
    """How often the compiler ran: twice a build, to compile and to link."""
    return len((tmp_path / "log").read_text().splitlines())


def test_builds_once_and_leaves_only_the_library(tmp_path: Path, source: Path) -> None:
    tools, folder = toolchain(tmp_path), tmp_path / "cache" / "kernels"
    library = compile_library(source, folder, tools)
    assert library.read_text() == "library\n"
    assert compile_library(source, folder, tools) == library
    assert runs(tmp_path) == 2
    assert {file.suffix for file in folder.iterdir()} == {".so", ".lock"}


def test_a_built_library_needs_no_compiler(tmp_path: Path, source: Path) -> None:
    tools = toolchain(tmp_path)
    library = compile_library(source, tmp_path, tools)
    assert compile_library(source, tmp_path, replace(tools, compiler=None)) == library


def test_builds_at_the_same_time_share_one(tmp_path: Path, source: Path) -> None:
    tools, start = toolchain(tmp_path), Barrier(6)

    def build_one(_: int) -> Path:
        start.wait()
        return compile_library(source, tmp_path / "cache", tools)

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(build_one, range(6)))) == 1
    assert runs(tmp_path) == 2


@pytest.mark.parametrize("changed", ["unit.cpp", "part.h", "flags"])
def test_any_change_builds_anew(tmp_path: Path, source: Path, changed: str) -> None:
    tools = toolchain(tmp_path)
    before = compile_library(source, tmp_path, tools)
    if changed == "flags":
        tools = replace(tools, compile_flags=("-O3",))
    else:
        source.with_name(changed).write_text("// other\n")
    assert compile_library(source, tmp_path, tools) != before
    assert runs(tmp_path) == 4


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(BuildError, match="no such thing"):
        compile_library(source, folder, toolchain(tmp_path, FAILING))
    assert not list(folder.glob("*.so"))
    assert not list(folder.glob("build-*"))
    assert compile_library(source, folder, toolchain(tmp_path)).exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, source: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(BuildError, match="MILLRACE_CACHE"):
        compile_library(source, blocker / "cache", toolchain(tmp_path))


def test_a_built_library_needs_no_folder_that_can_be_written(tmp_path: Path, source: Path) -> None:
    tools, folder = toolchain(tmp_path), tmp_path / "cache"
    library = compile_library(source, folder, tools)
    lock = library.with_suffix(".lock")
    lock.unlink()
    lock.mkdir()  # cannot be opened, not even by root
    assert compile_library(source, folder, tools) == library
    library.unlink()
    with pytest.raises(BuildError, match="MILLRACE_CACHE"):
        compile_library(source, folder, tools)


def test_another_c_library_builds_anew(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = toolchain(tmp_path)
    before = compile_library(source, tmp_path, tools)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "1.0"))
    assert compile_library(source, tmp_path, tools) != before


def test_no_compiler(tmp_path: Path, source: Path) -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        compile_library(source, tmp_path, replace(toolchain(tmp_path), compiler=None))


def test_the_compiler_is_cxx_or_gxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = toolchain(tmp_path).compiler
    assert own is not None
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("CXX", own)
    tools = Toolchain.find()
    assert tools.compiler == own
    assert "-DCPU_CAPABILITY_AVX512" in tools.compile_flags
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert Toolchain.find().compiler is None


@pytest.mark.parametrize(("machine", "capability"), [("aarch64", "AVX2"), ("x86_64", "DEFAULT")])
def test_other_cpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, machine: str, capability: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with pytest.raises(BuildError, match=f"{machine} {capability}"):
        Toolchain.find()


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLRACE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "millrace" / "kernels"
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "own"))
    assert build.cache_folder() == tmp_path / "own" / "kernels"


@pytest.mark.parametrize("which", ["folder", "library"])
def test_what_any_user_can_write_is_not_loaded(tmp_path: Path, source: Path, which: str) -> None:
    folder, tools = tmp_path / "cache", toolchain(tmp_path)
    library = compile_library(source, folder, tools)
    {"folder": folder, "library": library}[which].chmod(0o777)
    with pytest.raises(BuildError, match="can be written by other users"):
        compile_library(source, folder, tools)


def test_what_another_user_built_is_not_loaded(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = toolchain(tmp_path)
    compile_library(source, tmp_path / "cache", tools)
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid == 0:
        # Root's files are trusted by all; these are somebody else's.
        for path in (tmp_path / "cache", *(tmp_path / "cache").iterdir()):
            os.chown(path, 4711, -1)
    with pytest.raises(BuildError, match="can be written by other users"):
        compile_library(source, tmp_path / "cache", tools)
