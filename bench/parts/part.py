"""A part of the run: some cases, how each is measured, and what their figures say together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """For the server."""
    amount: float = 0.0
    """What tells it from its neighbours beside flags; the part knows what it counts."""


Table = Mapping[str, Mapping[str, Repeated]]
"""Repetitions by the name of the case and the title of the column."""


Samples = dict[str, dict[str, list[Sample]]]
"""By the name of the case and the title of the column."""


def table_of(samples: Samples) -> Table:
    """All that was taken."""
    return {
        name: {title: Repeated(tuple(taken)) for title, taken in row.items()}
        for name, row in samples.items()
    }


def as_json(table: Table) -> dict[str, dict[str, object]]:
    """Plain containers: by case and title the median, and each sample with the cores that others used."""
    return {
        name: {
            title: {
                "median": repeated.median,
                "samples": [[sample.value, sample.other_cores] for sample in repeated.samples],
            }
            for title, repeated in row.items()
        }
        for name, row in table.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a table answers, and how it is written."""

    name: str
    title: str
    method: str
    """How it is measured, for readers of the table."""
    cases: Sequence[Case]
    conclude: Callable[[Table], Sequence[str]] = lambda _: ()
    """Sentences that the table proves."""

    def measure(self, fixture: Fixture, *, repeats: int) -> Table:
        """Every case, `repeats` times. Raises ServerError or RequestsFailed."""
        raise NotImplementedError

    def text(self, table: Table) -> str:
        """Method, table and conclusions."""
        titles = list(dict.fromkeys(title for row in table.values() for title in row))
        rows = [
            (name, *(row[title].text if title in row else "" for title in titles))
            for name, row in table.items()
        ]
        lines = "\n".join(f"- {line}" for line in self.conclude(table))
        return "\n\n".join(filter(None, (self.method, markdown(("", *titles), rows), lines)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Question):
    """One whose cases are measured by themselves."""

    run: Callable[[Fixture, Case], Figures]

    def measure(self, fixture: Fixture, *, repeats: int) -> Table:
        """Every case in turn, and so often. Raises ServerError or RequestsFailed."""
        samples: Samples = {case.name: {} for case in self.cases}
        for fixture.repeat in range(repeats):
            for case in self.cases:
                fixture.other_cores = 0.0
                for title, value in self.run(fixture, case).items():
                    sample = Sample(value, fixture.other_cores)
                    samples[case.name].setdefault(title, []).append(sample)
        return table_of(samples)
