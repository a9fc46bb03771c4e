"""The small model that is served when none is named."""

from __future__ import annotations

from pathlib import Path

from millrace_launcher.errors import ArgumentValidation

DEMO_NAME = "millrace/demo"
PACKAGE = Path(__file__).resolve().parent


def demo_folder(package: Path = PACKAGE) -> Path:
    """Its folder, inside the installed package or in a checkout; ArgumentValidation where there is none."""
    places = (package / "demo_model", package.parents[1] / "demo" / "model")
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise ArgumentValidation(
        "no model was named and the demo model is not installed; give --model-id"
    )
