"""Finds the prepared folder of a GGUF file by the states of its files, without torch, whose import takes seconds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from millrace_shard.weights.checkpoint_files import TOKENIZER, changed_recently, file_state
from millrace_shard.weights.gguf.file_names import parts_of

FORMAT_VERSION = 3
"""Changes with the contents of a prepared folder, and with its checks."""
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
MODEL = "model.gguf"
"""In a prepared folder, a link to the file, or to the first of a split one."""
MORE = "model-{:05d}.gguf"
"""A link to a further part, by its number from 2."""


def known_folder(
    path: Path, root: Path, tokenizer: Path | None, sampling: Mapping[str, float]
) -> Path | None:
    """The folder below `root` that an earlier start prepared for the same files and defaults; None if there is none.

    Raises WeightsError if `path` is a part of a split file, and others are missing.
    """
    try:
        folder = root / _record(path, root, tokenizer, sampling).read_text()
    except OSError:
        return None
    return folder if (folder / MODEL).is_file() else None


def remember_folder(
    folder: Path, path: Path, root: Path, tokenizer: Path | None, sampling: Mapping[str, float]
) -> None:
    """Let `known_folder` find `folder`, unless the files are so new that they may change unnoticed."""
    with suppress(OSError):
        if any(map(changed_recently, _files(path, tokenizer))):
            return
        record = _record(path, root, tokenizer, sampling)
        part = record.with_suffix(f".{os.getpid()}")
        part.write_text(folder.name)
        part.replace(record)


def model_files(folder: Path) -> list[Path]:
    """The links to the GGUF files in a prepared folder, in their order."""
    return [folder / MODEL, *sorted(folder.glob("model-*.gguf"))]


def _record(path: Path, root: Path, tokenizer: Path | None, sampling: Mapping[str, float]) -> Path:
    states = [f"{file.resolve()} {file_state(file)}" for file in _files(path, tokenizer)]
    defaults = json.dumps(dict(sampling), sort_keys=True)
    digest = hashlib.sha256("\n".join((str(FORMAT_VERSION), defaults, *states)).encode())
    return root / f"known-{digest.hexdigest()[:32]}"


def _files(path: Path, tokenizer: Path | None) -> Iterator[Path]:
    yield from parts_of(path)
    for file in () if tokenizer is None else sorted(tokenizer.iterdir()):
        if file.name in TOKENIZER_FILES:
            yield file
