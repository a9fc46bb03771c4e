"""The demo model, which is served without --model-id."""

from __future__ import annotations

from pathlib import Path

from millrace_launcher.errors import ArgumentValidation

PACKAGE = Path(__file__).resolve().parent


def demo_folder(package: Path = PACKAGE) -> Path:
    """The model's folder in the installed package or in a checkout. Raises ArgumentValidation."""
    places = (package / "demo_model", package.parents[1] / "demo" / "model")
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise ArgumentValidation(
        "no model was named and the demo model is not installed; give --model-id"
    )
