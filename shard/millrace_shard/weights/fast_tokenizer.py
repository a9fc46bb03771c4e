"""Builds tokenizer.json for models without one. A module of its own, since `transformers` takes seconds to import."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from millrace_shard.errors import ModelError
from millrace_shard.weights.checkpoint_files import TOKENIZER


def with_fast_tokenizer(folder: Path, *, side_root: Path) -> Path:
    """A folder below `side_root` with links to the files of `folder` and the tokenizer.json that `transformers` builds.

    `folder` may be read-only and does not change. Raises ModelError if no fast tokenizer can be built.
    """
    target = side_root / f"{folder.resolve().name}-{_digest(folder)}"
    if (target / TOKENIZER).is_file():
        return target
    side_root.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=side_root))
    try:
        for path in folder.iterdir():
            (building / path.name).symlink_to(path.resolve())
        _save(folder, building / TOKENIZER)
        try:
            building.rename(target)
        except OSError:
            # Another process was faster, and its folder has the same contents.
            if not (target / TOKENIZER).is_file():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _save(folder: Path, path: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, use_fast=True, trust_remote_code=False
        )
        backend = tokenizer.backend_tokenizer
    except (AttributeError, ImportError, OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder} has no {TOKENIZER}, and none can be built from its tokenizer files ({error});"
            f" put a {TOKENIZER} into the folder"
        ) from error
    backend.save(str(path))


def _digest(folder: Path) -> str:
    """A digest that changes when any file of the folder is replaced."""
    state = [str(folder.resolve())]
    for path in sorted(folder.iterdir()):
        stat = path.stat()
        state.append(f"{path.name} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(state).encode()).hexdigest()[:12]
