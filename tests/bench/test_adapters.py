"""The experiment runs, and its figures follow from arrivals, names and rounds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench.adapters.__main__ import (
    MIXED,
    decode_rate,
    main,
)
from bench.parts.client import Answer, Request


def answer(*arrivals: float) -> Answer:
    asked = Request(prompt=" ab", prompt_tokens=1, output_tokens=len(arrivals))
    return Answer(asked, 0.0, [*arrivals], num_tokens=len(arrivals))


@pytest.mark.long
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


def test_the_decode_rate_excludes_the_first_token_and_the_time_before_it() -> None:
    answers = [answer(2.0, 3.0, 4.0), answer(2.5, 3.0, 6.0)]
    assert decode_rate(answers) == pytest.approx(5 / 4)
