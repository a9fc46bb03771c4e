from __future__ import annotations

from pathlib import Path

from millrace_launcher.host.leftovers import remove_registration


def test_what_a_killed_process_left_is_removed_and_what_others_have_is_not(tmp_path: Path) -> None:
    names = ["__KMP_REGISTERED_LIB_12_0", "__KMP_REGISTERED_LIB_123_0", "torch_12", "sem.12"]
    for name in names:
        (tmp_path / name).touch()
    remove_registration(12, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
    remove_registration(12, tmp_path / "missing")
