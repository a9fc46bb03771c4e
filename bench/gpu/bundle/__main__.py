"""`python -m bench.gpu.bundle`: what Millrace needs on a machine with torch and transformers and no network.

The folder `.gpu-bundle` gets wheels pinned to the versions of this environment, and the compiled protobuf code.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from bench.gpu.bundle.files import (
    DIGEST,
    FOLDER,
    PROTO,
    PROTO_SOURCE,
    WHEELS,
    BundleError,
    digest,
    is_proto_current,
)
from bench.gpu.bundle.requirements import PREINSTALLED, closure, declared, needed, unmet
from bench.gpu.bundle.wheels import PLATFORMS, wheels_in
from bench.harness.paths import ROOT

MOST_BYTES = 40 * 2**20
PROTO_RUNTIME = "protobuf"


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 when the bundle has problems, which are printed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.bundle", description=__doc__)
    parser.add_argument("--verify", action="store_true", help="check the existing bundle")
    args = parser.parse_args(argv)
    try:
        if not args.verify:
            build(ROOT)
        problems = problems_of(ROOT)
    except BundleError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"error: {problem}")
    if problems:
        return 1
    wheels = wheels_in(ROOT / FOLDER / WHEELS)
    print(
        f"{FOLDER}: {len(wheels)} wheels for Python 3.12 and the protobuf code,"
        f" {size_of(ROOT / FOLDER) / 2**20:.1f} MiB, nothing missing beside"
        f" {', '.join(f'{name} {version}' for name, version in PREINSTALLED.items())}"
    )
    return 0


def build(root: Path) -> None:
    """Build the folder from scratch; raises BundleError."""
    unfinished = root / FOLDER / "unfinished"
    shutil.rmtree(root / FOLDER, ignore_errors=True)
    (unfinished / PROTO).mkdir(parents=True)
    proto = root / PROTO_SOURCE
    compiled = sorted(proto.parent.glob("*_pb2*.py"))
    if not compiled:
        raise BundleError("the protobuf code is not compiled: run make proto")
    for path in compiled:
        shutil.copy2(path, unfinished / PROTO / path.name)
    (unfinished / DIGEST).write_text(digest(proto) + "\n")
    pins = pinned(root / "pyproject.toml")
    print(f"Downloading {len(pins)} wheels", flush=True)
    download(pins, unfinished / WHEELS)
    for path in list(unfinished.iterdir()):
        path.rename(root / FOLDER / path.name)
    unfinished.rmdir()


def pinned(pyproject: Path) -> list[str]:
    """Return `name==version` of every package as installed here; raises BundleError for a missing one."""

    def requires(name: str) -> list[str]:
        try:
            return metadata.requires(name) or []
        except metadata.PackageNotFoundError as error:
            raise BundleError(f"{name} is not installed here: run make install") from error

    names = closure(declared(pyproject), requires)
    return [f"{name}=={metadata.version(name)}" for name in names]


def download(pins: Sequence[str], folder: Path) -> None:
    """Download wheels for CPython 3.12 on x86-64 Linux into `folder`; raises BundleError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    done = subprocess.run(
        [*command, f"--dest={folder}", *pins], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BundleError(f"pip ended with {done.returncode}: {done.stderr[-1500:]}")


def problems_of(root: Path) -> list[str]:
    """Return the problems of the bundle, one line each."""
    bundle = root / FOLDER
    if not bundle.is_dir():
        return [f"there is no {FOLDER}: run python -m bench.gpu.bundle"]
    wheels = wheels_in(bundle / WHEELS)
    problems = [
        f"{w.path.name} is not for Python 3.12 there" for w in wheels if not w.is_for_machine
    ]
    versions = {name: Version(version) for name, version in PREINSTALLED.items()}
    for wheel in wheels:
        if wheel.name in versions:
            problems.append(f"{wheel.path.name} would stand beside another {wheel.name}")
        versions[wheel.name] = wheel.version
    wanted: list[tuple[str, Requirement]] = [
        ("millrace-server", requirement) for requirement in declared(root / "pyproject.toml")
    ]
    wanted += [(wheel.name, each) for wheel in wheels for each in needed(wheel.requires)]
    problems += unmet(wanted, versions)
    if not is_proto_current(root):
        problems.append(
            "the protobuf code is of another generate.proto: run python -m bench.gpu.bundle"
        )
    elif problem := proto_problem(bundle / PROTO, versions.get(PROTO_RUNTIME)):
        problems.append(problem)
    if size_of(bundle) > MOST_BYTES:
        problems.append(f"{size_of(bundle) / 2**20:.1f} MiB are more than 40")
    return problems


def proto_problem(folder: Path, runtime: Version | None) -> str | None:
    """Return why the runtime cannot import the compiled code: it must not be older than the compiler."""
    for path in sorted(folder.glob("*_pb2.py")):
        for line in path.read_text().splitlines():
            if line.startswith("# Protobuf Python Version:"):
                compiler = Version(line.rpartition(":")[2].strip())
                if runtime is None or runtime < compiler:
                    return f"{path.name} needs {PROTO_RUNTIME} {compiler}, the bundle has {runtime}"
    return None


def size_of(folder: Path) -> int:
    """Return the bytes of all files in `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
