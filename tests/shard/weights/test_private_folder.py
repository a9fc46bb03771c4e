"""A folder that only this user can write to."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace_shard.errors import ModelError
from millrace_shard.weights.hub import private_folder


def test_a_folder_that_others_can_write_is_refused_for_a_model(tmp_path: Path) -> None:
    path = private_folder(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o700
    assert private_folder(tmp_path) == path
    for mode in (0o770, 0o702):
        path.chmod(mode)
        with pytest.raises(ModelError, match="can be written by other users"):
            private_folder(tmp_path)
    path.chmod(0o700)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="can be written by other users"):
        private_folder(tmp_path)


def test_another_users_folder_is_refused_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path.stat().st_uid + 1
    (tmp_path / f"millrace-{other}").mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: other)
    with pytest.raises(ModelError, match="can be written by other users"):
        private_folder(tmp_path)
