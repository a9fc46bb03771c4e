"""Tiny random checkpoints that a whole server can serve: with the demo model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from millrace_launcher.demo import demo_folder
from millrace_testing.models.models import CONFIGS, save_tiny

POSITIONS = 1024


def save_with_tokenizer(folder: Path, model_type: str) -> None:
    """Write a float32 checkpoint of `model_type`, of 1024 positions, and what turns text into its tokens."""
    positions = "n_positions" if "n_positions" in CONFIGS[model_type] else "max_position_embeddings"
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    overrides: dict[str, Any] = {positions: POSITIONS, "vocab_size": 2048, **special}
    save_tiny(folder, model_type, **overrides)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / name, folder / name)
