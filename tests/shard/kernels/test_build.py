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

from millrace_shard.kernels import build, variants
from millrace_shard.kernels import toolchain as toolchain_module
from millrace_shard.kernels.build import load_operators, toolchains
from millrace_shard.kernels.toolchain import (
    BuildError,
    Toolchain,
    TorchPackage,
    compile_library,
    find_compiler,
    library_name,
)
from millrace_shard.kernels.variants import VARIANTS
from millrace_testing.engines.compiler import COMPILER, FAILING, GOOD, compiler, runs, toolchain

SECONDS = 60.0


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "part.h").write_text("// header\n")
    (folder / "unit.cpp").write_text("// unit\n")
    return folder


def test_builds_once_and_leaves_only_the_library(tmp_path: Path, sources: Path) -> None:
    tools, folder = toolchain(tmp_path), tmp_path / "cache" / "kernels"
    library = compile_library(sources, folder, tools)
    assert library.read_text() == "library\n"
    assert compile_library(sources, folder, tools) == library
    assert runs(tmp_path) == 2
    assert {file.suffix for file in folder.iterdir()} == {".so", ".lock"}


def test_a_built_library_needs_no_compiler(tmp_path: Path, sources: Path) -> None:
    tools = toolchain(tmp_path)
    library = compile_library(sources, tmp_path, tools)
    assert compile_library(sources, tmp_path, replace(tools, compiler=None)) == library


def test_without_a_compiler_the_newest_library_counts(tmp_path: Path, sources: Path) -> None:
    none = replace(toolchain(tmp_path), compiler=None)
    first, second = (
        compile_library(sources, tmp_path, toolchain(tmp_path, version=version))
        for version in (1, 2)
    )
    for older, newer in ((first, second), (second, first)):
        os.utime(older, (1, 1))
        os.utime(newer, (2, 2))
        assert compile_library(sources, tmp_path, none) == newer
    (sources / "unit.cpp").write_text("// other\n")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        compile_library(sources, tmp_path, none)


def test_builds_at_the_same_time_share_one(tmp_path: Path, sources: Path) -> None:
    tools, start = toolchain(tmp_path), Barrier(6)

    def build_one(_: int) -> Path:
        start.wait()
        return compile_library(sources, tmp_path / "cache", tools)

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(build_one, range(6)))) == 1
    assert runs(tmp_path) == 2


@pytest.mark.parametrize("changed", ["unit.cpp", "part.h", "flags", "compiler", "arguments"])
def test_any_change_builds_anew(tmp_path: Path, sources: Path, changed: str) -> None:
    tools = toolchain(tmp_path)
    before = compile_library(sources, tmp_path, tools)
    if changed == "flags":
        tools = replace(tools, compile_flags=("-O3",))
    elif changed == "compiler":
        tools = toolchain(tmp_path, version=2)
    elif changed == "arguments":
        own = compiler(tmp_path, COMPILER.replace('"$1" = --version', '"$*" = "-m64 --version"'))
        tools = replace(tools, compiler=(str(own), "-m64"))
    else:
        (sources / changed).write_text("// other\n")
    assert compile_library(sources, tmp_path, tools) != before
    assert runs(tmp_path) == 4


def test_a_failed_build_names_the_reason_and_leaves_nothing(tmp_path: Path, sources: Path) -> None:
    folder = tmp_path / "cache"
    with pytest.raises(BuildError, match="no such thing"):
        compile_library(sources, folder, toolchain(tmp_path, FAILING))
    assert not list(folder.glob("*.so"))
    assert not list(folder.glob("build-*"))
    assert compile_library(sources, folder, toolchain(tmp_path)).exists()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, sources: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(BuildError, match="MILLRACE_CACHE"):
        compile_library(sources, blocker / "cache", toolchain(tmp_path))


def test_a_built_library_needs_no_folder_that_can_be_written(tmp_path: Path, sources: Path) -> None:
    tools, folder = toolchain(tmp_path), tmp_path / "cache"
    library = compile_library(sources, folder, tools)
    lock = library.with_suffix(".lock")
    lock.unlink()
    lock.mkdir()  # cannot be opened, not even by root
    assert compile_library(sources, folder, tools) == library
    library.unlink()
    with pytest.raises(BuildError, match="MILLRACE_CACHE"):
        compile_library(sources, folder, tools)


def test_another_c_library_builds_anew(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = toolchain(tmp_path)
    before = compile_library(sources, tmp_path, tools)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "1.0"))
    assert compile_library(sources, tmp_path, tools) != before


def test_a_missing_compiler_is_an_error(tmp_path: Path, sources: Path) -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        compile_library(sources, tmp_path, replace(toolchain(tmp_path), compiler=None))


def test_a_program_that_is_not_a_compiler_is_named(tmp_path: Path, sources: Path) -> None:
    tools = toolchain(tmp_path, "not a program\n")
    with pytest.raises(BuildError, match="compiler does not run"):
        compile_library(sources, tmp_path, tools)


def test_a_build_logs_its_begin_and_end(
    tmp_path: Path, sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        compile_library(sources, tmp_path, toolchain(tmp_path))
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
    tmp_path: Path, sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools, told = toolchain(tmp_path), Told()
    library = compile_library(sources, tmp_path, tools)
    library.unlink()
    toolchain_module.logger.addHandler(told)
    try:
        with (
            caplog.at_level(logging.INFO),
            ThreadPoolExecutor(1) as pool,
            library.with_suffix(".lock").open("w") as other,
        ):
            fcntl.flock(other, fcntl.LOCK_EX)
            waiting = pool.submit(compile_library, sources, tmp_path, tools)
            try:
                assert told.waiting.wait(SECONDS)
                library.write_text("theirs")
            finally:
                fcntl.flock(other, fcntl.LOCK_UN)
            assert waiting.result(SECONDS) == library
    finally:
        toolchain_module.logger.removeHandler(told)
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
def test_libraries_that_any_user_can_write_are_not_loaded(
    tmp_path: Path, sources: Path, which: str
) -> None:
    folder, tools = tmp_path / "cache", toolchain(tmp_path)
    library = compile_library(sources, folder, tools)
    {"folder": folder, "library": library}[which].chmod(0o777)
    with pytest.raises(BuildError, match="can be written by other users"):
        compile_library(sources, folder, tools)


def test_libraries_that_another_user_built_are_not_loaded(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = toolchain(tmp_path)
    compile_library(sources, tmp_path / "cache", tools)
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid == 0:
        # Files of root are trusted, so these get another owner.
        for path in (tmp_path / "cache", *(tmp_path / "cache").iterdir()):
            os.chown(path, 4711, -1)
    with pytest.raises(BuildError, match="can be written by other users"):
        compile_library(sources, tmp_path / "cache", tools)


CPUS = {
    # The flags of /proc/cpuinfo that matter, and the variants that such a CPU runs, the best first.
    "Haswell": ("", ["avx2"]),
    "Alder Lake": ("avx_vnni", ["avx2-vnni", "avx2"]),
    "Skylake-X": ("avx512", ["avx512", "avx2"]),
    "Cascade Lake": ("avx512 avx512_vnni", ["avx512-vnni", "avx512", "avx2"]),
    "Ice Lake": ("avx512 avx512_vnni avx512vbmi", ["avx512-vnni", "avx512", "avx2"]),
    "Cooper Lake": ("avx512 avx512_vnni avx512_bf16", ["avx512-vnni", "avx512", "avx2"]),
    "Zen 4": (
        "avx512 avx512_vnni avx512_bf16 avx512vbmi",
        ["avx512-bf16", "avx512-vnni", "avx512", "avx2"],
    ),
    "Zen 5": (
        "avx512 avx512_vnni avx512_bf16 avx512vbmi avx_vnni",
        ["avx512-bf16", "avx512-vnni", "avx512", "avx2-vnni", "avx2"],
    ),
    "Sapphire Rapids": (
        "avx512 avx512_vnni avx512_bf16 avx512vbmi avx_vnni amx_tile amx_bf16 amx_int8",
        ["avx512-bf16", "avx512-vnni", "avx512", "avx2-vnni", "avx2"],
    ),
}
HASWELL = "fpu sse4_2 fma popcnt movbe f16c abm bmi1 avx2 bmi2"
AVX512 = "avx512f avx512dq avx512cd avx512bw avx512vl"


def cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: str, capability: str = "AVX512"
) -> None:
    """Pretend that /proc/cpuinfo lists a Haswell with more features, and that torch has this capability."""
    flags = " ".join([HASWELL, *(AVX512 if one == "avx512" else one for one in features.split())])
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n" * 2)
    monkeypatch.setattr(variants, "CPU_INFO", info)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


def names() -> list[str]:
    """The variants that are chosen, the best first."""
    return [one.name.partition("-torch")[0] for one in toolchains()]


@pytest.mark.parametrize("model", CPUS)
def test_a_cpu_takes_the_best_variant_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    features, best_first = CPUS[model]
    cpu(tmp_path, monkeypatch, features)
    assert names() == best_first
    cpu(tmp_path, monkeypatch, features, capability="AVX2")
    assert names() == [name for name in best_first if name.startswith("avx2")]


def test_a_cpu_that_lacks_one_instruction_of_a_variant_does_not_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = VARIANTS[0]
    for feature in best.features:
        cpu(tmp_path, monkeypatch, "")
        kept = " ".join(best.features - {feature})
        variants.CPU_INFO.write_text(f"flags\t: {kept}\n")
        try:
            assert best.name not in names()
        except BuildError:
            assert feature in HASWELL.split()


@pytest.mark.parametrize(
    ("machine", "capability"), [("aarch64", "AVX2"), ("x86_64", "DEFAULT"), ("x86_64", "NO AVX")]
)
def test_other_cpus_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, capability: str
) -> None:
    cpu(tmp_path, monkeypatch, "", capability)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(BuildError, match=f"{machine} {capability}"):
        toolchains()


def test_a_variant_has_flags_for_each_of_its_instructions_and_for_no_others() -> None:
    for variant in VARIANTS:
        instructions = {flag[2:] for flag in variant.flags if flag[:2] == "-m"}
        assert {one for one in instructions if "=" not in one} == set(variant.instructions)
        assert f"-DCPU_CAPABILITY_{variant.capability}" in variant.flags
        assert ("avx512f" in instructions) == (variant.capability == "AVX512")
        assert not [flag for flag in variant.flags if "native" in flag or "march" in flag]


def test_the_compiler_is_cxx_or_gxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.fspath(compiler(tmp_path))
    assert find_compiler(own) == (own,)
    named = f"{own} g++ '-DNAME=two words'"
    assert find_compiler(named) == (own, "g++", "-DNAME=two words")
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert find_compiler(None) is None
    gxx = compiler(tmp_path).rename(tmp_path / "g++")
    assert find_compiler(None) == (os.fspath(gxx),)


@pytest.mark.parametrize("cxx", ["nowhere", "nowhere g++", "'g++", "  "])
def test_a_missing_compiler_is_reported_and_gxx_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cxx: str,
) -> None:
    gxx = compiler(tmp_path).rename(tmp_path / "g++")
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert find_compiler(cxx) == (os.fspath(gxx),)
    assert [f"CXX={cxx} " in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("version", "abi"),
    [
        ("2.13.0", "2.13.0"),
        ("2.13.0+cpu", "2.13.0"),
        ("2.13.1+cu130", "2.13.1"),
        ("2.13.0+rocm7.1", "2.13.0"),
        ("2.13.0a0+git12ab", "2.13.0a0+git12ab"),
    ],
)
def test_published_builds_of_a_torch_share_a_library(
    tmp_path: Path, version: str, abi: str
) -> None:
    assert TorchPackage.find([str(tmp_path)]) is None
    folder = tmp_path / "torch"
    (folder / "include").mkdir(parents=True)
    (folder / "version.py").write_text(f"debug = False\n__version__ = '{version}'\n")
    torch_package = TorchPackage.find([str(tmp_path / "nowhere"), str(tmp_path)])
    assert torch_package == TorchPackage(folder, version)
    assert torch_package.abi == abi


def test_where_torch_lies_does_not_change_the_name(tmp_path: Path, sources: Path) -> None:
    here, there = (
        Toolchain.of(VARIANTS[0], TorchPackage(tmp_path / name, "2.13.0"), None)
        for name in ("a", "b")
    )
    assert library_name(sources, here) == library_name(sources, there)
    other = Toolchain.of(VARIANTS[0], TorchPackage(tmp_path, "2.13.1"), None)
    assert library_name(sources, here) != library_name(sources, other)


def load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cxx: str, features: str = "avx_vnni"
) -> str:
    """The name of the operators that a process with `cxx` as CXX and without g++ loads, on a CPU with AVX2."""
    cpu(tmp_path, monkeypatch, features, "AVX2")
    monkeypatch.setattr("shutil.which", lambda name: name if Path(name).is_file() else None)
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setattr(build, "PACKAGED", tmp_path / "packaged")
    # The libraries of these tests are torch's own and register no operators.
    monkeypatch.setattr(torch.ops.millrace, "units_taken", int, raising=False)
    return load_operators.__wrapped__()


def package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, version: str = torch.__version__
) -> Path:
    """A library in the package for a variant and torch; it loads, since it is one of torch's."""
    cpu(tmp_path, monkeypatch, "avx_vnni", "AVX2")
    chosen = next(one for one in VARIANTS if one.name == variant)
    named = Toolchain.of(chosen, TorchPackage(Path(), version), None)
    library = tmp_path / "packaged" / f"{library_name(toolchain_module.SOURCES, named)}.so"
    library.parent.mkdir(exist_ok=True)
    library.write_bytes(Path(torch._C.__file__).read_bytes())
    return library


def test_a_packaged_library_is_loaded_without_a_compiler_and_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package(tmp_path, monkeypatch, "avx2")
    best = package(tmp_path, monkeypatch, "avx2-vnni")
    # A library of the wheel is as trusted as the wheel's Python code.
    best.chmod(0o777)
    with caplog.at_level(logging.INFO):
        assert load(tmp_path, monkeypatch, "") == best.name
    assert caplog.records == []
    assert not (tmp_path / "cache").exists()


def test_a_packaged_library_spares_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = package(tmp_path, monkeypatch, "avx2-vnni")
    assert load(tmp_path, monkeypatch, str(compiler(tmp_path, GOOD))) == best.name
    assert not (tmp_path / "log").exists()


def test_a_packaged_library_for_another_torch_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package(tmp_path, monkeypatch, "avx2-vnni", "2.1.0")
    with caplog.at_level(logging.INFO):
        loaded = load(tmp_path, monkeypatch, str(compiler(tmp_path, GOOD)))
    assert (tmp_path / "cache" / "kernels" / loaded).exists()
    said = f"this package has CPU kernels for torch 2.1.0, not {torch.__version__}"
    assert [said in record.message for record in caplog.records].count(True) == 1


def test_without_a_compiler_the_versions_of_torch_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch, "avx2-vnni", "2.1.0")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler.*kernels for torch 2\.1\.0, not "):
        load(tmp_path, monkeypatch, "")


def test_without_a_compiler_the_next_variant_of_the_package_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package(tmp_path, monkeypatch, "avx512")
    lesser = package(tmp_path, monkeypatch, "avx2")
    assert load(tmp_path, monkeypatch, "") == lesser.name
    (record,) = caplog.records
    assert "slower here: no C++ compiler" in record.message


def test_a_packaged_library_that_does_not_load_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = package(tmp_path, monkeypatch, "avx2-vnni")
    broken.write_text("broken")
    loaded = load(tmp_path, monkeypatch, str(compiler(tmp_path, GOOD)))
    assert (tmp_path / "cache" / "kernels" / loaded).exists()
    assert [f"{broken} does not load" in record.message for record in caplog.records] == [True]


def test_a_compiler_whose_library_does_not_load_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with pytest.raises(BuildError, match="does not load"):
            load(tmp_path, monkeypatch, str(compiler(tmp_path)))
    load(tmp_path, monkeypatch, str(compiler(tmp_path, GOOD, version=2)))
    # A compiler makes the unit that libraries share once, and another unit and the library each time.
    assert runs(tmp_path) == (1 + 2 * 2) + (1 + 2)


def test_a_built_library_that_does_not_load_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler has the same version in both builds, and the first build is broken."""
    with pytest.raises(BuildError, match="does not load"):
        load(tmp_path, monkeypatch, str(compiler(tmp_path)))
    (library,) = (tmp_path / "cache" / "kernels").glob("*.so")
    load(tmp_path, monkeypatch, str(compiler(tmp_path, GOOD)))
    assert library.read_bytes() == Path(torch._C.__file__).read_bytes()
    assert runs(tmp_path) == 1 + 2 * 2
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
