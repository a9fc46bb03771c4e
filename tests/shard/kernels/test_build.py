"""Building with a stand-in compiler, so that these run where there is none."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event

import pytest
import torch

from millrace_shard.kernels import build
from millrace_shard.kernels.build import BuildError, Toolchain, compile_library, load_operators
from millrace_testing.engines.compiler import COMPILER, FAILING, GOOD, compiler, runs, toolchain

SECONDS = 60.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "part.h").write_text("// header\n")
    unit = folder / "unit.cpp"
    unit.write_text("// unit\n")
    return unit


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


def test_without_a_compiler_the_newest_library_counts(tmp_path: Path, source: Path) -> None:
    none = replace(toolchain(tmp_path), compiler=None)
    first, second = (
        compile_library(source, tmp_path, toolchain(tmp_path, version=version))
        for version in (1, 2)
    )
    for older, newer in ((first, second), (second, first)):
        os.utime(older, (1, 1))
        os.utime(newer, (2, 2))
        assert compile_library(source, tmp_path, none) == newer
    source.write_text("// other\n")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        compile_library(source, tmp_path, none)


def test_builds_at_the_same_time_share_one(tmp_path: Path, source: Path) -> None:
    tools, start = toolchain(tmp_path), Barrier(6)

    def build_one(_: int) -> Path:
        start.wait()
        return compile_library(source, tmp_path / "cache", tools)

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(build_one, range(6)))) == 1
    assert runs(tmp_path) == 2


@pytest.mark.parametrize("changed", ["unit.cpp", "part.h", "flags", "compiler", "arguments"])
def test_any_change_builds_anew(tmp_path: Path, source: Path, changed: str) -> None:
    tools = toolchain(tmp_path)
    before = compile_library(source, tmp_path, tools)
    if changed == "flags":
        tools = replace(tools, compile_flags=("-O3",))
    elif changed == "compiler":
        tools = toolchain(tmp_path, version=2)
    elif changed == "arguments":
        own = compiler(tmp_path, COMPILER.replace('"$1" = --version', '"$*" = "-m64 --version"'))
        tools = replace(tools, compiler=(str(own), "-m64"))
    else:
        source.with_name(changed).write_text("// other\n")
    assert compile_library(source, tmp_path, tools) != before
    assert runs(tmp_path) == 4


def test_a_failed_build_names_the_reason_and_leaves_nothing(tmp_path: Path, source: Path) -> None:
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


def test_a_missing_compiler_is_an_error(tmp_path: Path, source: Path) -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        compile_library(source, tmp_path, replace(toolchain(tmp_path), compiler=None))


def test_a_program_that_is_not_a_compiler_is_named(tmp_path: Path, source: Path) -> None:
    tools = toolchain(tmp_path, "not a program\n")
    with pytest.raises(BuildError, match="compiler does not run"):
        compile_library(source, tmp_path, tools)


def test_a_build_logs_its_begin_and_end(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        compile_library(source, tmp_path, toolchain(tmp_path))
    begun, ended = (record.message for record in caplog.records)
    assert begun.startswith("compiling CPU kernels (once)")
    assert re.fullmatch(r"CPU kernels compiled in \d+ s", ended)


class Told(logging.Handler):
    """Sets `waiting` once the log says that something is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting for another process" in record.getMessage():
            self.waiting.set()


def test_waiting_for_another_build_is_logged(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools, told = toolchain(tmp_path), Told()
    library = compile_library(source, tmp_path, tools)
    library.unlink()
    build.logger.addHandler(told)
    try:
        with (
            caplog.at_level(logging.INFO),
            ThreadPoolExecutor(1) as pool,
            library.with_suffix(".lock").open("w") as other,
        ):
            fcntl.flock(other, fcntl.LOCK_EX)
            waiting = pool.submit(compile_library, source, tmp_path, tools)
            try:
                assert told.waiting.wait(SECONDS)
                library.write_text("theirs")
            finally:
                fcntl.flock(other, fcntl.LOCK_UN)
            assert waiting.result(SECONDS) == library
    finally:
        build.logger.removeHandler(told)
    assert library.read_text() == "theirs"
    assert runs(tmp_path) == 2


def test_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        # Files of root are trusted, so these get another owner.
        for path in (tmp_path / "cache", *(tmp_path / "cache").iterdir()):
            os.chown(path, 4711, -1)
    with pytest.raises(BuildError, match="can be written by other users"):
        compile_library(source, tmp_path / "cache", tools)


def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cxx: str) -> None:
    """Load the operators as a process with `cxx` as CXX and without g++ does."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr("shutil.which", lambda name: name if Path(name).is_file() else None)
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", cxx)
    load_operators.__wrapped__()


def test_the_compiler_is_cxx_or_gxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.fspath(compiler(tmp_path))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("CXX", own)
    tools = Toolchain.find()
    assert tools.compiler == (own,)
    assert "-DCPU_CAPABILITY_AVX512" in tools.compile_flags
    monkeypatch.setenv("CXX", f"{own} g++ '-DNAME=two words'")
    assert Toolchain.find().compiler == (own, "g++", "-DNAME=two words")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert Toolchain.find().compiler is None
    gxx = compiler(tmp_path).rename(tmp_path / "g++")
    assert Toolchain.find().compiler == (os.fspath(gxx),)


@pytest.mark.parametrize("cxx", ["nowhere", "nowhere g++", "'g++", "  "])
def test_a_missing_compiler_is_reported_and_gxx_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cxx: str,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    gxx = compiler(tmp_path).rename(tmp_path / "g++")
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.setenv("CXX", cxx)
    assert Toolchain.find().compiler == (os.fspath(gxx),)
    assert [f"CXX={cxx} " in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(("machine", "capability"), [("aarch64", "AVX2"), ("x86_64", "DEFAULT")])
def test_other_cpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, machine: str, capability: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with pytest.raises(BuildError, match=f"{machine} {capability}"):
        Toolchain.find()


def test_a_compiler_whose_library_does_not_load_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with pytest.raises(BuildError, match="does not load"):
            load(tmp_path, monkeypatch, str(compiler(tmp_path)))
    load(tmp_path, monkeypatch, str(compiler(tmp_path, GOOD, version=2)))
    assert runs(tmp_path) == 2 * 3


def test_a_built_library_that_does_not_load_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler has the same version in both builds, and the first build is broken."""
    with pytest.raises(BuildError, match="does not load"):
        load(tmp_path, monkeypatch, str(compiler(tmp_path)))
    (library,) = (tmp_path / "cache" / "kernels").glob("*.so")
    load(tmp_path, monkeypatch, str(compiler(tmp_path, GOOD)))
    assert library.read_bytes() == Path(torch._C.__file__).read_bytes()
    assert runs(tmp_path) == 4
    assert [f"{library} does not load" in record.message for record in caplog.records] == [True]


def test_a_built_library_that_does_not_load_stays_where_none_can_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match="does not load"):
        load(tmp_path, monkeypatch, str(compiler(tmp_path)))
    (library,) = (tmp_path / "cache" / "kernels").glob("*.so")
    with pytest.raises(BuildError, match=f"{library} does not load"):
        load(tmp_path, monkeypatch, "")
    assert library.exists()
