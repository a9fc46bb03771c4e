"""The version of this distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("millrace")
except PackageNotFoundError:
    # A checkout on the path, never installed.
    VERSION = "0.0.0+checkout"
