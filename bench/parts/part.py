"""A part of a run: cases, their measurement, a table and conclusions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from bench.harness.repeats import Repeated, Sample
from bench.harness.tables import markdown
from bench.parts.fixture import Fixture

Figures = Mapping[str, float]
"""Value by the title of its column."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a part's table."""

    name: str
    flags: tuple[str, ...] = ()
    """Flags of the server."""


Table = Mapping[str, Mapping[str, Repeated]]
"""Repetitions by the name of the case and the title of the column."""


Samples = dict[str, dict[str, list[Sample]]]
"""By the name of the case and the title of the column."""


def table_of(samples: Samples) -> Table:
    """The table of all samples."""
    return {
        name: {title: Repeated(tuple(taken)) for title, taken in row.items()}
        for name, row in samples.items()
    }


def as_json(table: Table) -> dict[str, dict[str, object]]:
    """Plain containers: the repetitions by case and title."""
    return {
        name: {title: repeated.as_json() for title, repeated in row.items()}
        for name, row in table.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A table: its question, method, cases and conclusions."""

    name: str
    title: str
    method: str
    """The method, for readers of the table."""
    cases: Sequence[Case]
    conclude: Callable[[Table], Sequence[str]] = lambda _: ()
    """Returns sentences that follow from the table."""
    chart: Callable[[str, Table], str] | None = None
    """Returns an SVG document with this title; None for a table without a chart."""
    hidden: Collection[str] = ()
    """Titles of columns that are recorded, and not part of the text."""

    def measure(self, fixture: Fixture, *, repeats: int) -> Table:
        """Every case, `repeats` times. Raises ServerError or RequestsFailed."""
        raise NotImplementedError

    def text(self, table: Table) -> str:
        """Method, table and conclusions."""
        found = dict.fromkeys(title for row in table.values() for title in row)
        titles = [title for title in found if title not in self.hidden]
        rows = [
            (name, *(row[title].text if title in row else "" for title in titles))
            for name, row in table.items()
        ]
        lines = "\n".join(f"- {line}" for line in self.conclude(table))
        return "\n\n".join(filter(None, (self.method, markdown(("", *titles), rows), lines)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Question):
    """A question whose cases are measured one after the other."""

    run: Callable[[Fixture, Case], Figures]

    def measure(self, fixture: Fixture, *, repeats: int) -> Table:
        """Every case in turn, `repeats` times. Raises ServerError or RequestsFailed."""
        samples: Samples = {case.name: {} for case in self.cases}
        for fixture.repeat in range(repeats):
            for case in self.cases:
                fixture.other_cores = 0.0
                for title, value in self.run(fixture, case).items():
                    sample = Sample(value, fixture.other_cores)
                    samples[case.name].setdefault(title, []).append(sample)
        return table_of(samples)
