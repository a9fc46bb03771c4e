"""The config of Medusa heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.weights.json_object import parse_json

WEIGHTS = "medusa_lm_head.safetensors"
PICKLE = "medusa_lm_head.pt"
HEADS = "medusa_num_heads"


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Fields of config.json, by the names in Medusa's checkpoints."""

    num_heads: int
    num_layers: int
    base_model: str
    """Folder or hub name of the model that the heads were trained for."""

    @classmethod
    def read(cls, folder: Path) -> MedusaConfig | None:
        """The config in `folder`, or None if it has no Medusa heads. Raises ModelError if they are unusable."""
        raw = _read_json(folder / "config.json")
        if HEADS not in raw:
            return None
        num_heads, num_layers = raw[HEADS], raw.get("medusa_num_layers", 1)
        base = raw.get("base_model_name_or_path")
        counts = (num_heads, num_layers)
        if not all(isinstance(count, int) and count > 0 for count in counts):
            raise ModelError(
                f"{folder}: {num_heads=} and {num_layers=} of Medusa have to be positive integers"
            )
        if not isinstance(base, str) or not base:
            raise ModelError(f"{folder}: config.json has no base_model_name_or_path")
        if not (folder / WEIGHTS).is_file():
            has_pickle = (folder / PICKLE).is_file()
            hint = f"; {PICKLE} may run code when read, and is ignored" if has_pickle else ""
            raise UnsupportedModel(f"there is no {WEIGHTS} in {folder}{hint}")
        return cls(num_heads=num_heads, num_layers=num_layers, base_model=base)


def is_medusa(folder: Path) -> bool:
    """Whether the config in `folder` is that of Medusa heads."""
    return HEADS in _read_json(folder / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or an empty one."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
