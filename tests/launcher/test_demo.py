"""The search for the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace_launcher.demo import demo_folder
from millrace_launcher.errors import ArgumentValidation


def test_installed_model_comes_before_the_checkouts(tmp_path: Path) -> None:
    package = tmp_path / "launcher" / "millrace_launcher"
    package.mkdir(parents=True)
    with pytest.raises(ArgumentValidation, match="give --model-id"):
        demo_folder(package)
    checkout = tmp_path / "demo" / "model"
    checkout.mkdir(parents=True)
    (checkout / "config.json").write_text("{}")
    assert demo_folder(package) == checkout
    (package / "demo_model").mkdir()
    (package / "demo_model" / "config.json").write_text("{}")
    assert demo_folder(package) == package / "demo_model"
