"""Starting our server for a benchmark: what becomes of one that cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.harness.server import ServerError, serving


def test_a_launcher_that_ends_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "out" / "launcher.log"
    with (
        pytest.raises(ServerError, match=r"the launcher ended with 2:[\s\S]*--no-such-flag"),
        serving(tmp_path, log=log, flags=["--no-such-flag"]),
    ):
        pytest.fail("it was taken for healthy")
