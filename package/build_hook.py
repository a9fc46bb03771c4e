"""The build hook of the wheel of the whole: protobuf code, and CPU kernels."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[1]
PROTO = runpy.run_path(str(ROOT / "proto" / "compile.py"))
KERNELS = runpy.run_path(str(ROOT / "shard" / "compile_kernels.py"))


class WholeHook(BuildHookInterface[Any]):
    """Hatch asks this what a build needs, and calls it before it packs a wheel or an editable install."""

    def dependencies(self) -> list[str]:
        """Torch, for its headers."""
        requirements: list[str] = KERNELS["missing_torch"](self.metadata.core.dependencies)
        return requirements

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate the code that the artifacts patterns then pick up, and compile the kernels."""
        PROTO["compile_protos"]()
        KERNELS["include_kernels"](version, build_data, self.app.display_warning)
