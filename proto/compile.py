"""Compile every .proto into its own folder: `make proto`, and the build hook of every wheel and editable install."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent


def compile_protos() -> None:
    """Write `*_pb2.py` and `*_pb2_grpc.py`, and their `.pyi` where mypy-protobuf is installed."""
    import grpc_tools
    from grpc_tools import protoc

    scripts = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    plugins = ["python", "grpc_python"]
    if shutil.which("protoc-gen-mypy_grpc"):
        plugins += ["mypy", "mypy_grpc"]
    status = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
            *(f"--{plugin}_out={ROOT}" for plugin in plugins),
            *(str(path) for path in sorted(ROOT.rglob("*.proto"))),
        ]
    )
    if status:
        sys.exit(f"protoc failed with status {status}")


if __name__ == "__main__":
    compile_protos()
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class CompileHook(BuildHookInterface[Any]):
        """Hatch calls this before it packs a wheel or an editable install."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Generate the code that the artifacts patterns then pick up."""
            compile_protos()
