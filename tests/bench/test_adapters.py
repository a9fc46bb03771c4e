"""The experiment runs, and its figures follow from arrivals, names and rounds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench.adapters.__main__ import (
    ALL,
    MIXED,
    decode_rate,
    flags,
    main,
    parse_arguments,
    requests,
)
from bench.parts.client import Answer, Request
from bench.parts.fixture import Fixture


def answer(*arrivals: float) -> Answer:
    asked = Request(prompt=" ab", prompt_tokens=1, output_tokens=len(arrivals))
    return Answer(asked, 0.0, [*arrivals], num_tokens=len(arrivals))


def test_the_experiment_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--quick", "--model=demo", "--repeats=2", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["bench.adapters", *options])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    measured = {line.split("|")[1].strip() for line in lines if line.startswith("| ")}
    assert measured - {""} == {case.name for case in MIXED.cases}
    assert any(line.startswith("- ") for line in lines)


def test_the_rate_leaves_out_the_first_token_and_what_came_before_it() -> None:
    answers = [answer(2.0, 3.0, 4.0), answer(2.5, 3.0, 6.0)]
    assert decode_rate(answers) == pytest.approx(5 / 4)


def test_requests_name_their_adapters(fixture: Fixture) -> None:
    bodies = [one.body() for one in requests(fixture, ["", "x"], output_tokens=3)]
    assert "adapter_id" not in bodies[0]["parameters"]
    assert bodies[1]["parameters"]["adapter_id"] == "x"
    assert bodies[0]["inputs"] != bodies[1]["inputs"]


def test_flags_register_folders(tmp_path: Path) -> None:
    given = flags({"x": tmp_path / "x"}, tmp_path / "cache")
    assert f"--lora-modules=x={tmp_path / 'x'}" in given
    assert f"--adapter-cache={tmp_path / 'cache'}" in given
    assert len(ALL) == 7


def test_the_command_line_has_defaults() -> None:
    options = parse_arguments([])
    assert options.only == ["mixed"]
    assert options.repeats == 5
