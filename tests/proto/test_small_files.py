"""Small files of a model: what is no regular file, or too large, is refused before it is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millrace_proto.small_files import MAX_SMALL_FILE_BYTES, read_small_file
from millrace_router.text.model_files import ModelFiles, ModelFilesError
from millrace_shard.errors import ModelError
from millrace_shard.weights.json_object import read_json_object

NAMES = ("config.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def make(kind: str, path: Path) -> str:
    """Make a file of this kind; returns the reason to refuse it."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(MAX_SMALL_FILE_BYTES + 1)
        return "it has more than 64 MiB"
    return "it is not a regular file"


@pytest.mark.parametrize("kind", ["pipe", "device", "large file"])
def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path, kind: str) -> None:
    for name in NAMES:
        folder = tmp_path / name
        folder.mkdir()
        reason = make(kind, folder / name)
        with pytest.raises(OSError, match=reason):
            read_small_file(folder / name)
        with pytest.raises(ModelFilesError, match=f"{name} cannot be read: {reason}"):
            ModelFiles.load(folder)
        with pytest.raises(ModelError, match=f"{name} cannot be read: {reason}"):
            read_json_object(folder / name)


def test_a_regular_file_is_read_through_a_link(tmp_path: Path) -> None:
    """As in the cache of the hub."""
    (tmp_path / "blob").write_bytes(b"{}")
    (tmp_path / "config.json").symlink_to("blob")
    assert read_small_file(tmp_path / "config.json") == b"{}"
    assert read_json_object(tmp_path / "none.json") is None
