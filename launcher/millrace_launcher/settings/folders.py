"""The folders of the served model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Local folders that the download found."""

    model: Path
    draft: Path | None = None
    """The folder of a draft model or of Medusa heads."""
