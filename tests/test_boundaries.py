"""The modules that importing a plane loads, in a new interpreter; import-linter does not follow dependencies."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROBE = """
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.startswith({programs!r}):
        importlib.import_module(module.name)
print(*sorted({forbidden!r} & sys.modules.keys()))
"""
PROGRAMS = ("millrace_router.adapters.fetching.", "millrace_router.telemetry.exporting")
"""Programs that the router runs: their modules load what the router does not."""


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        (
            "millrace_router",
            {
                "torch",
                "transformers",
                "numpy",
                "safetensors",
                "opentelemetry",
                "millrace_shard",
                "millrace_launcher",
            },
        ),
        (
            "millrace_launcher",
            {"torch", "transformers", "numpy", "aiohttp", "tokenizers", "uvloop"},
        ),
        ("millrace_shard.config", {"torch", "numpy", "grpc"}),
        # Every start waits for this program.
        ("millrace_shard.commands.download_weights", {"torch", "transformers", "grpc"}),
        ("millrace", {"torch", "transformers", "numpy"}),
        ("millrace_proto", {"torch", "aiohttp", "millrace_router", "millrace_shard"}),
    ],
)
def test_importing_a_package_loads_no_forbidden_module(package: str, forbidden: set[str]) -> None:
    code = PROBE.format(package=package, forbidden=forbidden, programs=PROGRAMS)
    if package.count("."):
        code = f"import sys, {package}\nprint(*sorted({forbidden!r} & sys.modules.keys()))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    loaded = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
    assert loaded.split() == []
