"""The JSON and the heading of a recorded run."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from bench.harness.record import Record, formatted

FACTS = {
    "cpu": "a & b",
    "cores": "2",
    "memory": "24 GiB",
    "commit": "abc",
    "torch": "2",
    "transformers": "5",
    "python": "3.11",
}


@pytest.fixture
def record() -> Record:
    return Record(
        bench="startup",
        title="Start and memory, demo",
        command="python -m bench.startup --model demo",
        figures={"ready_seconds": [4.1]},
        other_cores=0.05,
        finished_at=datetime(2026, 11, 21, 6, 30, tzinfo=UTC),
        machine=FACTS,
    )


def test_a_run_is_one_file_that_says_what_when_where_and_how(
    record: Record, tmp_path: Path
) -> None:
    path = record.write(tmp_path / "results")
    assert path.name == "2026-11-21-0630-startup-start-and-memory-demo.json"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert json.loads(path.read_text()) == {
        "bench": "startup",
        "title": "Start and memory, demo",
        "date": "2026-11-21T06:30+00:00",
        "commit": "abc",
        "command": "python -m bench.startup --model demo",
        "machine": {name: fact for name, fact in FACTS.items() if name != "commit"},
        "other_cores": 0.05,
        "figures": {"ready_seconds": [4.1]},
    }


def test_the_heading_says_the_same(record: Record) -> None:
    shown = record.text("BODY")
    assert shown.startswith("## Start and memory, demo (2026-11-21 06:30)\n")
    assert "`python -m bench.startup --model demo` at commit abc, on a & b (2)" in shown
    assert shown.endswith("\n\nBODY\n")


def test_a_row_takes_one_line_and_json_stays_json() -> None:
    value = {"tables": [{"columns": ["a", "µs"], "rows": [["x", 1.5], ["y", None]]}], "none": {}}
    shown = formatted(value)
    assert json.loads(shown) == value
    assert '["x", 1.5],' in [line.strip() for line in shown.splitlines()]


def test_short_figures_take_one_line() -> None:
    value = {
        "a": {"median": 1.5, "repeats": 1},
        "b": {"name": "x"},
        "c": dict.fromkeys(range(40), 1),
    }
    lines = [line.strip() for line in formatted(value).splitlines()]
    assert '"a": {"median": 1.5, "repeats": 1},' in lines
    assert '"name": "x"' in lines
    assert len(lines) > 40
