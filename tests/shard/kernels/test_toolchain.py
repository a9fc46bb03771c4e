"""The choice of the compiler, and the loading of built libraries."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch

from millrace_shard.kernels.build import BuildError, Toolchain, load_operators
from millrace_testing.engines.compiler import GOOD, compiler, runs


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
