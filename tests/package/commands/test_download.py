"""`millrace download` prints a folder."""

from __future__ import annotations

from pathlib import Path

from tests.package.programs import run

from millrace_launcher.demo import demo_folder


async def test_a_local_folder_is_itself_and_stdout_has_nothing_else() -> None:
    status, out, err = await run("download", str(demo_folder()))
    assert (status, out) == (0, f"{demo_folder()}\n")
    assert "Successfully resolved" in err


async def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    status, out, err = await run("download", str(tmp_path / "none"))
    assert (status, out) == (1, "")
    assert "does not exist" in err
