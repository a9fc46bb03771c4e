"""The build hook of the kernels with a stand-in compiler; tests of the wheels use a real one."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

import compile_kernels
from millrace_shard.kernels import variants
from millrace_shard.kernels.variants import VARIANTS
from millrace_testing.engines.compiler import COMPILER, FAILING, compiler

NAMES = [variant.name for variant in VARIANTS]
TORCH = importlib.metadata.version("torch").partition("+")[0]
UNKNOWN_FLAG = COMPILER.replace('echo "$@"', 'case "$*" in *avxvnni*) exit 1; esac; echo "$@"')


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a build whose compiler is a stand-in."""
    monkeypatch.delenv("MILLRACE_KERNELS", raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler(tmp_path)))
    return tmp_path / "cache" / "kernels"


def hooked(version: str = "standard") -> tuple[dict[str, Any], list[str]]:
    """What the hook changes of the data of a build, and what it reports."""
    data: dict[str, Any] = {"pure_python": True, "force_include": {}}
    lines: list[str] = []
    compile_kernels.include_kernels(version, data, lines.append)
    return data, lines


def libraries(data: dict[str, Any]) -> list[str]:
    """The variants and versions of torch of the libraries in a wheel."""
    folder = "millrace_shard/kernels/cpu/libraries/cpu_ops-"
    names = list(data["force_include"].values())
    assert all(name.startswith(folder) and name.endswith(".so") for name in names)
    return [name.removeprefix(folder).rpartition("-")[0] for name in names]


def compiled(log: Path) -> int:
    """The number of libraries that the stand-in has linked."""
    lines = log.read_text().splitlines() if log.exists() else []
    return sum("-shared" in line for line in lines)


def test_a_wheel_has_every_variant_and_a_tag_of_its_system(build: Path, tmp_path: Path) -> None:
    data, lines = hooked()
    assert libraries(data) == [f"{name}-torch{TORCH}" for name in NAMES]
    assert all(Path(path).is_file() for path in data["force_include"])
    assert data["tag"] == "py3-none-manylinux_2_28_x86_64"
    assert data["pure_python"] is False
    assert lines == []
    assert compiled(tmp_path / "log") == len(NAMES)
    # The wheel of a part, or a second build, compiles nothing.
    assert hooked()[0] == data
    assert compiled(tmp_path / "log") == len(NAMES)


def test_an_editable_install_compiles_the_variant_that_a_start_takes(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"flags : {' '.join(VARIANTS[2].features)}\n")
    monkeypatch.setattr(variants, "CPU_INFO", info)
    data, lines = hooked("editable")
    assert data == {"pure_python": True, "force_include": {}}
    assert lines == []
    (library,) = build.glob("*.so")
    assert library.name.startswith(f"cpu_ops-avx512-torch{TORCH}-")


def test_without_a_compiler_the_wheel_is_built_without_kernels(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX")
    for version in ("standard", "editable"):
        data, lines = hooked(version)
        assert data == {"pure_python": True, "force_include": {}}
        assert lines == ["CPU kernels are left out: no C++ compiler"]


def test_a_variant_that_the_compiler_does_not_know_is_left_out(build: Path, tmp_path: Path) -> None:
    compiler(tmp_path, UNKNOWN_FLAG)
    data, lines = hooked()
    assert libraries(data) == [f"{n}-torch{TORCH}" for n in NAMES if n != "avx2-vnni"]
    (line,) = lines
    assert line.startswith("the CPU kernels for avx2-vnni are left out: ")


def test_a_failing_compiler_leaves_a_wheel_for_any_system(build: Path, tmp_path: Path) -> None:
    compiler(tmp_path, FAILING)
    data, lines = hooked()
    assert data == {"pure_python": True, "force_include": {}}
    assert all("no such thing" in line for line in lines)
    assert len(lines) == len(NAMES)


def test_other_systems_have_no_kernels(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert hooked() == ({"pure_python": True, "force_include": {}}, [])
    assert compile_kernels.missing_torch(["torch>=2"]) == []


@pytest.mark.parametrize(
    ("choice", "names"),
    [("none", []), ("all", NAMES), ("avx2 avx512-bf16", ["avx512-bf16", "avx2"])],
)
def test_variants_are_chosen_by_name(
    build: Path, monkeypatch: pytest.MonkeyPatch, choice: str, names: list[str]
) -> None:
    monkeypatch.setenv("MILLRACE_KERNELS", choice)
    assert [variant.name for variant in compile_kernels.chosen_variants()] == names


def test_an_unknown_variant_ends_the_build(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_KERNELS", "avx2 sse2")
    with pytest.raises(SystemExit, match=r"MILLRACE_KERNELS takes all, none, .*, but not sse2"):
        hooked()


def test_a_cache_that_cannot_be_written_is_not_needed(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    data, lines = hooked()
    assert (len(libraries(data)), lines) == (len(NAMES), [])


REQUIREMENTS = ["torchvision>=0.1", "torch-x", "torch>=2.11,<2.14", "numpy"]


def test_an_isolated_build_needs_torch_only_where_it_compiles(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    assert compile_kernels.missing_torch(REQUIREMENTS) == [], "torch is installed"
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    needed = ["torch>=2.11,<2.14"]
    assert compile_kernels.missing_torch(REQUIREMENTS) == needed
    compiler(tools).rename(tools / "nvidia-smi")
    assert compile_kernels.missing_torch(REQUIREMENTS) == [], "it is gigabytes, and not needed"
    monkeypatch.setenv("MILLRACE_KERNELS", "all")
    assert compile_kernels.missing_torch(REQUIREMENTS) == needed
    monkeypatch.setenv("MILLRACE_KERNELS", "none")
    assert compile_kernels.missing_torch(REQUIREMENTS) == []
    monkeypatch.setenv("MILLRACE_KERNELS", "all")
    monkeypatch.delenv("CXX")
    assert compile_kernels.missing_torch(REQUIREMENTS) == []


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        ("GLIBC_2.14 GLIBC_2.2.5 GLIBCXX_3.4.21 CXXABI_1.3.8", "manylinux_2_28_x86_64"),
        ("GLIBC_2.29 GLIBCXX_3.4.21", "manylinux_2_31_x86_64"),
        ("GLIBC_2.14 GLIBCXX_3.4.30", "manylinux_2_35_x86_64"),
        ("GLIBC_2.14 CXXABI_1.3.13", "manylinux_2_34_x86_64"),
        ("GLIBC_2.36", "manylinux_2_36_x86_64"),
        ("GLIBC_2.99", "linux_x86_64"),
    ],
)
def test_the_tag_is_the_oldest_system_with_all_symbols(
    tmp_path: Path, symbols: str, tag: str
) -> None:
    library = tmp_path / "a.so"
    library.write_bytes(b"\x7fELF\0" + b"\0".join(symbols.encode().split()) + b"\0")
    assert compile_kernels.platform_tag([library]) == tag
