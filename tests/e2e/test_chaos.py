"""A short campaign of faults against the real server; `python -m bench.faults.chaos` runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.faults.chaos.__main__ import main

KINDS = "kill,hang,router,vanish,malformed,burst,replace,corrupt,kill-loading"


@pytest.mark.long
def test_a_short_campaign_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "server.log"
    code = main(
        [
            *("--seed=11", "--requests=40", "--faults=9", f"--kinds={KINDS}"),
            *("--pool=24", "--long=2", "--clients=8", "--step-timeout=10", f"--log={log}"),
        ]
    )
    shown = capsys.readouterr().out
    assert code == 0, f"{shown}\n{log.read_text(errors='replace')[-5000:]}"
    assert "Audit: clean" in shown
