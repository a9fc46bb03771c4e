"""When requests ended, measured or simulated, and the figures of both side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from bench.parts.client import Answer, Request
from bench.parts.outcome import Outcome
from bench.parts.part import Figures, Table
from bench.parts.simulation import TimedEngine, deployment_of, simulate
from bench.policies.static_planner import NaiveEngine, StaticEngine

TOLERANCE = 0.2
"""The allowed relative error of a simulated figure."""
ENGINES = {"static": StaticEngine, "static-naive": NaiveEngine}


def outcomes_of(answers: Sequence[Answer], *, since: float | None = None) -> list[Outcome]:
    """The outcomes of measured answers; with `since`, all requests count as due at that time of the answers' clock."""
    return [
        Outcome(answer.request, answer.ended - (answer.due if since is None else since))
        for answer in answers
    ]


def tokens_per_second(outcomes: Sequence[Outcome]) -> float:
    """Output tokens from the first due time to the last token."""
    seconds = max(o.ended for o in outcomes) - min(o.request.due for o in outcomes)
    return sum(o.request.output_tokens for o in outcomes) / seconds


def simulated(title: str) -> str:
    """The title of the column with the simulated figure."""
    return f"simulated {title}"


def ratio(title: str) -> str:
    """The title of the column with simulated over measured."""
    return f"{title}: ratio"


def side_by_side(measured: Figures, predicted: Figures, *, ratios_of: Collection[str]) -> Figures:
    """Measured and simulated figures, and simulated over measured for the titles in `ratios_of`."""
    found = {}
    for title, value in measured.items():
        found[title] = value
        found[simulated(title)] = predicted[title]
        if title in ratios_of:
            found[ratio(title)] = predicted[title] / value
    return found


def beside_simulation(
    url: str,
    policy: str,
    asked: Sequence[Request],
    answered: Callable[[], Sequence[Outcome]],
    figures: Callable[[Sequence[Outcome]], Figures],
    ratios_of: Collection[str],
) -> Figures:
    """Figures of the answers, and of a simulation with the costs that the server has learned before them."""
    engine = ENGINES.get(policy, TimedEngine)
    predicted = simulate(deployment_of(url), asked, engine)
    return side_by_side(figures(answered()), figures(predicted), ratios_of=ratios_of)


def conclude_ratios(table: Table, titles: Sequence[str]) -> str:
    """One sentence that names each figure whose simulation is off by more than the tolerance."""
    off = [
        f"{name}, {title}: {row[ratio(title)].median:.2f}"
        for name, row in table.items()
        for title in titles
        if ratio(title) in row and abs(row[ratio(title)].median - 1) > TOLERANCE
    ]
    goal = f"{100 * TOLERANCE:.0f} %"
    if not off:
        return f"The simulator is within {goal} at every point."
    return (
        f"The simulator is further off than {goal}, as simulated over measured: {'; '.join(off)}."
    )
