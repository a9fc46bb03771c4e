"""The bundle for a machine with a GPU and no network, from the package index."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.gpu.bundle.__main__ import download, pinned
from bench.gpu.bundle.wheels import wheels_in
from bench.harness.paths import ROOT

pytestmark = pytest.mark.ecosystem


def test_every_package_has_a_wheel_for_that_machine(tmp_path: Path) -> None:
    pins = pinned(ROOT / "pyproject.toml")
    download(pins, tmp_path)
    wheels = wheels_in(tmp_path)
    assert len(wheels) == len(pins)
    assert all(wheel.is_for_machine for wheel in wheels)
