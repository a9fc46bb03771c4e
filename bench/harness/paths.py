"""Folders of the repository that benchmarks read and write."""

from __future__ import annotations

from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parent
DEMO = ROOT / "demo" / "model"
"""The demo model."""
MODELS_FOLDER = BENCH / "models"
"""Checkpoints of random weights; git ignores it."""
PEERS_FOLDER = BENCH / ".peers"
"""Installed peers and earlier revisions; git ignores it."""
RESULTS_FOLDER = BENCH / "results"
"""Recorded runs, a JSON file each."""
IMAGES_FOLDER = ROOT / "docs" / "images"
"""Charts of recorded runs, for the documentation."""
OUT = Path("bench/out")
"""Logs, charts and JSON of a run, below the working directory; git ignores it."""
