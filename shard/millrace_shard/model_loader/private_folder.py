"""A folder for files of this user in a place that all users can write to."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from millrace_shard.errors import ModelError


def private_folder(shared: Path) -> Path:
    """A folder in `shared`, the same at each start, that only this user can write to. Raises ModelError otherwise."""
    path = shared / f"millrace-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    # File names in the folder are predictable, so another user could plant a model there.
    status = path.lstat()
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not mine or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ModelError(
            f"{path} can be written by other users: remove it, or set HF_HOME to a folder of yours"
        )
    return path
