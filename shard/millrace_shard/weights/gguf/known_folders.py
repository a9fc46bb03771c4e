"""Finds the prepared folder of a GGUF file by the states of its files, without torch, whose import takes seconds."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from millrace_shard.weights.checkpoint_files import TOKENIZER, changed_recently, file_state
from millrace_shard.weights.gguf.file_names import parts_of
from millrace_shard.weights.json_object import read_json_object

log = logging.getLogger(__name__)

FORMAT_VERSION = 4
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
MMPROJ = "mmproj.gguf"
"""A link to the file with the encoder of images, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a folder is prepared from, apart from the text model."""

    tokenizer: Path | None = None
    """The folder of a model whose tokenizer is used in place of the file's."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Values for generation_config.json that the files lack."""
    mmproj: Path | None = None
    """The file with the encoder of images."""
    may_lack_images: bool = False
    """Whether only text is served if that encoder is not there, or not known."""


def prepared_folder(path: Path, root: Path, beside: Beside) -> Path:
    """The folder of a GGUF file below `root`, which is found by the states of the files if it was made before.

    Raises as `prepare_gguf`.
    """
    folder = _prepared(path, root, beside)
    if beside.mmproj is None and beside.may_lack_images:
        _warn_of_missing_images(folder, path)
    return folder


def _prepared(path: Path, root: Path, beside: Beside) -> Path:
    folder = known_folder(path, root, beside)
    if folder is not None:
        if beside.mmproj is not None:
            log.info("%s reads images", beside.mmproj)
        return folder
    # The imports bring torch, which takes seconds.
    from millrace_shard.weights.gguf.folder import prepare_gguf  # noqa: PLC0415
    from millrace_shard.weights.gguf.mmproj import is_readable  # noqa: PLC0415

    if beside.mmproj is not None:
        if beside.may_lack_images and not is_readable(beside.mmproj, path):
            return _prepared(path, root, replace(beside, mmproj=None))
        log.info("%s reads images", beside.mmproj)
    folder = prepare_gguf(
        path,
        root,
        tokenizer=beside.tokenizer,
        sampling=beside.sampling,
        mmproj=beside.mmproj,
    )
    remember_folder(folder, path, root, beside)
    return folder


def _warn_of_missing_images(folder: Path, path: Path) -> None:
    """Warn if the model in `path`, for which there is no encoder of images, has positions with rows and columns.

    `folder` is prepared from it. The router looks for the same in its `start/shards.py`.
    """
    config = read_json_object(folder / "config.json") or {}
    if "mrope_section" in config.get("rope_parameters", {}):
        log.warning(
            "images are refused, since there is no file with their encoder for %s: --mmproj FILE names one, and"
            " --mmproj off serves only text",
            path,
        )


def known_folder(path: Path, root: Path, beside: Beside) -> Path | None:
    """The folder below `root` that an earlier start prepared for the same files and defaults; None if there is none.

    Raises WeightsError if `path` is a part of a split file, and others are missing.
    """
    try:
        folder = root / _record(path, root, beside).read_text()
    except OSError:
        return None
    return folder if (folder / MODEL).is_file() else None


def remember_folder(folder: Path, path: Path, root: Path, beside: Beside) -> None:
    """Let `known_folder` find `folder`, unless the files are so new that they may change unnoticed."""
    with suppress(OSError):
        if any(map(changed_recently, _files(path, beside))):
            return
        record = _record(path, root, beside)
        part = record.with_suffix(f".{os.getpid()}")
        part.write_text(folder.name)
        part.replace(record)


def model_files(folder: Path) -> list[Path]:
    """The links to the GGUF files in a prepared folder, in their order."""
    return [folder / MODEL, *sorted(folder.glob("model-*.gguf"))]


def _record(path: Path, root: Path, beside: Beside) -> Path:
    states = [f"{file.resolve()} {file_state(file)}" for file in _files(path, beside)]
    defaults = json.dumps(dict(beside.sampling), sort_keys=True)
    digest = hashlib.sha256("\n".join((str(FORMAT_VERSION), defaults, *states)).encode())
    return root / f"known-{digest.hexdigest()[:32]}"


def _files(path: Path, beside: Beside) -> Iterator[Path]:
    yield from parts_of(path)
    if beside.mmproj is not None:
        yield beside.mmproj
    for file in () if beside.tokenizer is None else sorted(beside.tokenizer.iterdir()):
        if file.name in TOKENIZER_FILES:
            yield file
