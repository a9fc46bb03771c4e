"""The bundle for a machine without a network: its contents, and the problems of a bad one."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from bench.gpu.bundle.__main__ import pinned, problems_of, proto_problem
from bench.gpu.bundle.files import (
    DIGEST,
    FOLDER,
    PROTO,
    PROTO_SOURCE,
    WHEELS,
    BundleError,
    digest,
    use_bundle,
)
from bench.gpu.bundle.requirements import PREINSTALLED, applies, closure, declared, unmet
from bench.gpu.bundle.wheels import Wheel
from bench.harness.paths import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

PYPROJECT = """
[project]
dependencies = ["alpha>=2", "beta[fast]>=1", "torch>=2.11", "intel-openmp>=2025"]
[project.optional-dependencies]
dev = ["pytest", "ruff"]
"""


def wheel(folder: Path, name: str, tag: str = "py3-none-any", *, metadata: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\n{metadata}\n")
    return path


def project(root: Path) -> Path:
    """A project with a bundle that lacks nothing."""
    (root / PROTO_SOURCE).parent.mkdir(parents=True)
    (root / PROTO_SOURCE).write_text("message A {}")
    (root / "pyproject.toml").write_text(PYPROJECT)
    bundle = root / FOLDER
    (bundle / PROTO).mkdir(parents=True)
    (bundle / PROTO / "generate_pb2.py").write_text("# Protobuf Python Version: 6.31.1\n")
    (bundle / DIGEST).write_text(digest(root / PROTO_SOURCE))
    wheel(bundle / WHEELS, "alpha-2.1", metadata="Requires-Dist: gamma<2")
    wheel(bundle / WHEELS, "beta-1.0", metadata="Requires-Dist: numpy; extra == 'fast'")
    wheel(bundle / WHEELS, "gamma-1.5", "cp312-cp312-manylinux_2_28_x86_64")
    wheel(bundle / WHEELS, "protobuf-6.33.6", "cp39-abi3-manylinux2014_x86_64")
    wheel(bundle / WHEELS, "pytest-9.0")
    return bundle


def test_what_the_project_asks_for_without_what_a_gpu_machine_has_no_use_for(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(PYPROJECT)
    assert [each.name for each in declared(path)] == ["alpha", "beta", "torch", "pytest"]


def test_all_that_is_brought_along_but_nothing_that_is_there() -> None:
    lines = {
        "a": ["b>=1", "torch", "w; sys_platform == 'win32'", "x; extra == 'more'"],
        "b": ["c", "a"],
        "c": ["old; python_version < '3.12'", "new; python_version >= '3.12'"],
        "new": [],
        "x": [],
    }
    assert closure([Requirement("A")], lines.__getitem__) == ["a", "b", "c", "new"]
    assert closure([Requirement("a[more]")], lines.__getitem__) == ["a", "b", "c", "new", "x"]


def test_markers_are_read_for_the_other_machine() -> None:
    assert applies(Requirement("a; python_version == '3.12' and platform_machine == 'x86_64'"))
    assert not applies(Requirement("a; python_version == '3.11'"))


def test_versions_that_do_not_fit_are_named() -> None:
    wanted = [("me", Requirement("a>=2")), ("you", Requirement("b"))]
    assert unmet(wanted, {"a": Version("2.0"), "b": Version("1")}) == []
    assert unmet(wanted, {"a": Version("1.9")}) == [
        "me needs a>=2, but 1.9 is there",
        "you needs b, which is missing",
    ]


@pytest.mark.parametrize(
    ("tag", "fits"),
    [
        ("py3-none-any", True),
        ("py2.py3-none-any", True),
        ("cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64", True),
        ("cp310-abi3-manylinux_2_17_x86_64", True),
        ("cp311-cp311-manylinux_2_17_x86_64", False),
        ("cp312-cp312-manylinux_2_17_aarch64", False),
        ("cp312-cp312-musllinux_1_2_x86_64", False),
        ("cp312-cp312-manylinux_2_40_x86_64", False),
        ("cp313-abi3-manylinux_2_17_x86_64", False),
    ],
)
def test_wheels_are_known_by_their_tags(tmp_path: Path, tag: str, fits: bool) -> None:
    assert Wheel.read(wheel(tmp_path, "a-1", tag)).is_for_machine is fits


def test_a_wheel_for_a_newer_python_alone_is_not_for_the_machine(tmp_path: Path) -> None:
    path = wheel(tmp_path, "a-1", metadata="Requires-Python: >=3.13")
    assert not Wheel.read(path).is_for_machine


def test_a_bundle_that_lacks_nothing_has_no_problems(tmp_path: Path) -> None:
    project(tmp_path)
    assert problems_of(tmp_path) == []


def test_each_fault_of_a_bundle_is_named(tmp_path: Path) -> None:
    assert "python -m bench.gpu.bundle" in problems_of(tmp_path)[0]
    bundle = project(tmp_path)
    (bundle / WHEELS / "gamma-1.5-cp312-cp312-manylinux_2_28_x86_64.whl").unlink()
    assert problems_of(tmp_path) == ["alpha needs gamma<2, which is missing"]
    wheel(bundle / WHEELS, "gamma-1.5", "cp311-cp311-manylinux_2_28_x86_64")
    assert len(problems_of(tmp_path)) == 1
    wheel(bundle / WHEELS, "numpy-2.0")
    assert any("another numpy" in problem for problem in problems_of(tmp_path))
    (tmp_path / PROTO_SOURCE).write_text("message B {}")
    assert any("generate.proto" in problem for problem in problems_of(tmp_path))


def test_protobuf_code_needs_a_runtime_no_older_than_its_compiler(tmp_path: Path) -> None:
    (tmp_path / "a_pb2.py").write_text("# x\n# Protobuf Python Version: 6.31.1\n")
    assert proto_problem(tmp_path, Version("6.31.1")) is None
    assert "6.31.0" in (proto_problem(tmp_path, Version("6.31.0")) or "")
    assert proto_problem(tmp_path, None) is not None


def test_every_package_of_this_environment_can_be_pinned() -> None:
    pins = dict(pin.split("==") for pin in pinned(ROOT / "pyproject.toml"))
    assert {"grpcio", "protobuf", "pydantic-core", "orjson", "aiohttp", "pytest"} <= pins.keys()
    assert not {*PREINSTALLED, "intel-openmp", "ruff"} & pins.keys()


def test_a_checkout_without_protobuf_code_gets_the_bundles_unless_it_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    assert use_bundle(tmp_path, tmp_path / "site") == ()
    bundle = project(tmp_path)
    target = (tmp_path / PROTO_SOURCE).with_name("generate_pb2.py")
    with pytest.raises(BundleError, match=r"for Python 3\.12, and this is 3\.11"):
        use_bundle(tmp_path, tmp_path / "site")
    assert target.read_text() == (bundle / PROTO / target.name).read_text()
    target.unlink()
    (tmp_path / PROTO_SOURCE).write_text("message B {}")
    with pytest.raises(BundleError, match="another generate"):
        use_bundle(tmp_path, tmp_path / "site")
