"""millrace-verify on real servers: green on the demo model, red once a fault is planted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.faults.chaos.__main__ import main as chaos

from millrace.server import LAUNCHER
from millrace.verify.__main__ import main

SUPPORT = Path(__file__).parents[1] / "support" / "millrace_testing" / "shards"
SPLIT_SHARD = (
    str(SUPPORT / "shard_launcher.py"),
    str(SUPPORT / "split_shard.py"),
)
PLAIN = ("--", "--dtype=float32", "--disable-custom-kernels")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def verify(
    capsys: pytest.CaptureFixture[str], *argv: str, launcher: tuple[str, ...] = LAUNCHER
) -> tuple[int, dict[str, Any]]:
    """Exit code and report."""
    code = main(["--json", *argv], launcher)
    shown = capsys.readouterr()
    assert shown.out, shown.err
    return code, json.loads(shown.out)


def by_case(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        found.setdefault(row["case"], []).append(row)
    return found


@pytest.mark.long
def test_the_demo_model_keeps_its_promises(capsys: pytest.CaptureFixture[str]) -> None:
    """In the circumstances that take a server of their own each; `verify_architectures.py` has all of them."""
    cases = "batched,restarted,transformers"
    code, report = verify(capsys, "--requests=6", "--cases", cases)
    rows = by_case(report)
    assert code == 0, report
    assert list(rows) == cases.split(",")
    assert report["server"]["deterministic"]
    assert all(row["verdict"] == "equal" for row in rows["batched"])
    (restarted,) = rows["restarted"]
    assert restarted["requests_equal"] == restarted["requests"] >= 6
    assert {row["verdict"] for row in rows["transformers"]} <= {"equal", "close"}
    assert rows["transformers"][0]["tokens"] > 6 * 24


@pytest.mark.long
def test_a_split_of_keys_chosen_by_the_batch_turns_the_check_red(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("--requests=6", "--max-new-tokens=16", "--cases=batched", *PLAIN)
    code, report = verify(capsys, *argv, launcher=SPLIT_SHARD)
    assert (code, {row["verdict"] for row in report["rows"]}) == (1, {"broken"})
    assert all(0 < row["largest_gap"] < 1e-3 for row in report["rows"]), "its last bits alone"


KINDS = "kill,hang,router,vanish,malformed,burst,replace,corrupt,kill-loading"


@pytest.mark.long
def test_a_short_campaign_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "server.log"
    code = chaos(
        [
            *("--seed=11", "--requests=40", "--faults=9", f"--kinds={KINDS}"),
            *("--pool=24", "--long=2", "--clients=8", "--step-timeout=10", f"--log={log}"),
        ]
    )
    shown = capsys.readouterr().out
    assert code == 0, f"{shown}\n{log.read_text(errors='replace')[-5000:]}"
    assert "Audit: clean" in shown
