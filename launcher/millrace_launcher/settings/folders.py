"""Where what is served lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Local folders, as the download has found them."""

    model: Path
    draft: Path | None = None
    """Of a draft model or of Medusa heads, which guess for the model."""
