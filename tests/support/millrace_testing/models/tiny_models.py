"""Tiny random checkpoints that a whole server can serve: with the demo model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from millrace_launcher.demo import demo_folder
from millrace_shard.models.description import ModelDescription
from millrace_testing.models.models import CONFIGS, save_tiny

POSITIONS = 1024


def save_with_tokenizer(folder: Path, model_type: str, **sizes: Any) -> None:
    """Write a float32 checkpoint of `model_type`, of 1024 positions, and what turns text into its tokens."""
    positions = "n_positions" if "n_positions" in CONFIGS[model_type] else "max_position_embeddings"
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    overrides: dict[str, Any] = {positions: POSITIONS, "vocab_size": 2048, **special}
    save_tiny(folder, model_type, **overrides, **sizes)
    spec = ModelDescription.read(folder).spec
    if spec is not None and spec.is_recurrent:
        _weaken_mixers(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / name, folder / name)


def _weaken_mixers(folder: Path) -> None:
    """Let a token depend mostly on the one before: else a random state never repeats a text, and no lookup is right."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in tensors.items():
        if name.endswith(("out_proj.weight", "o_proj.weight")):
            tensors[name] = value * 0.05
    save_file(tensors, path, metadata={"format": "pt"})
