"""A part evaluates its measurements and writes its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.harness.quiet import Quiet
from bench.parts.client import Answer, Request
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Part
from bench.parts.texts import Texts
from bench.scheduling.__main__ import figures

MANY = 8192


def fixture(texts: Texts, *, most_positions: int = MANY, quick: bool = True) -> Fixture:
    return Fixture(
        model=Path("model"),
        texts=texts,
        most_positions=most_positions,
        quick=quick,
        quiet=Quiet(),
        out=Path("out"),
    )


def request(**changes: Any) -> Request:
    return replace(Request(prompt=" ab", prompt_tokens=1, output_tokens=3), **changes)


def answer(asked: Request, due: float, *arrivals: float) -> Answer:
    return Answer(asked, due, list(arrivals), ended=max(arrivals, default=due), num_tokens=3)


def test_a_part_alternates_its_cases_and_marks_disturbed_runs(texts: Texts) -> None:
    order: list[tuple[str, int]] = []

    def run(where: Fixture, case: Case) -> Figures:
        order.append((case.name, where.repeat))
        where.other_cores = 0.5 if (case.name, where.repeat) == ("b", 1) else 0.0
        return {"size": {"a": 1, "b": 10}[case.name] * (1 + where.repeat)}

    part = Part(
        name="p",
        title="P",
        method="How.",
        cases=(Case("a"), Case("b")),
        run=run,
        conclude=lambda found: [f"b is {found['b']['size'].median:.0f}."],
    )
    found = part.measure(fixture(texts), repeats=3)
    assert order == [(name, repeat) for repeat in range(3) for name in "ab"]
    assert found["a"]["size"].median == 2
    # 20 was disturbed: what is left are 10 and 30.
    assert [sample.is_clean for sample in found["b"]["size"].samples] == [True, False, True]
    assert found["b"]["size"].median == 20
    lines = part.text(found).splitlines()
    assert lines[0] == "How."
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["", "size"]
    assert [cell.strip() for cell in lines[4].split("|")[1:-1]] == ["a", "2.00"]
    assert lines[-1] == "- b is 20."


def test_chunking_counts_the_pause_that_outlasts_the_long_prompt() -> None:
    before = [0.01 * n for n in range(100)]
    streams = [answer(request(), 0.0, *before, 3.0, 3.01) for _ in range(2)]
    long = answer(request(), 0.99, 2.99)
    found = figures(streams, long)
    assert found["between tokens before, p50, ms"] == pytest.approx(10.0)
    assert found["longest, ms"] == pytest.approx(2010.0)
    assert found["its TTFT, ms"] == pytest.approx(2000.0)
