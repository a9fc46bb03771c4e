"""The tables of a campaign: faults and recoveries, requests by outcome, resources of processes."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from bench.faults.chaos.audit import MEMORY_GROWTH, SLACK_FDS, SLACK_THREADS
from bench.faults.chaos.campaign import Kind
from bench.faults.chaos.run import Outcome
from bench.harness.tables import markdown


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Plain containers."""
    return {
        "recovered": [[fault.kind.name, silence] for fault, silence in outcome.recovered],
        "not_recovered": [fault.kind.name for fault in outcome.not_recovered],
        "requests": dict(outcome.ledger.outcomes),
        "problems": outcome.ledger.problems,
        "before": {name: asdict(each) for name, each in outcome.before.items()},
        "after": {name: asdict(each) for name, each in outcome.after.items()},
        "counters": outcome.counters,
        "seconds": outcome.seconds,
        "exit_code": outcome.exit_code,
    }


def fault_table(outcome: Outcome) -> str:
    """Faults by kind; recovery is the longest silence over all streams together, from the fault on."""
    rows = []
    for kind in Kind:
        recovered = [silence for fault, silence in outcome.recovered if fault.kind is kind]
        failed = sum(fault.kind is kind for fault in outcome.not_recovered)
        if not recovered and not failed:
            continue
        silences = [silence for silence in recovered if silence is not None]
        rows.append((kind.value, len(recovered) + failed, len(recovered), *_spread(silences)))
    silences = [silence for _, silence in outcome.recovered if silence is not None]
    total = len(outcome.recovered) + len(outcome.not_recovered)
    rows.append(("all", total, len(outcome.recovered), *_spread(silences)))
    columns = ("fault", "injected", "recovered", "recovery p50, s", "max, s")
    return markdown(columns, [tuple(map(str, row)) for row in rows])


def _spread(silences: list[float]) -> tuple[str, str]:
    return (f"{median(silences):.2f}", f"{max(silences):.2f}") if silences else ("", "")


def outcome_table(outcome: Outcome) -> str:
    """Requests by outcome; an attempt that broke and was sent again counts separately."""
    rows = [(name, str(number)) for name, number in outcome.ledger.outcomes.most_common()]
    return markdown(("outcome", "requests"), rows)


def usage_table(outcome: Outcome) -> str:
    """Resources of the idle server before and after the faults."""
    rows = []
    for name, after in outcome.after.items():
        before = outcome.before.get(name)
        if before is not None:
            rows.append(
                (
                    name,
                    f"{before.num_fds} / {after.num_fds}",
                    f"{before.num_threads} / {after.num_threads}",
                    f"{before.resident / 2**20:.0f} / {after.resident / 2**20:.0f}",
                )
            )
    columns = (
        "before / after",
        f"file descriptors (+{SLACK_FDS} allowed)",
        f"threads (+{SLACK_THREADS})",
        f"resident MiB (+{MEMORY_GROWTH / 2**20:.0f})",
    )
    return markdown(columns, rows)


def text(outcome: Outcome) -> str:
    """All tables, and the text of the problems."""
    counters = ", ".join(f"{number:g} {name}" for name, number in outcome.counters.items())
    ledger = outcome.ledger
    verdict = f"Audit: {ledger.num_problems} problems." if ledger.num_problems else "Audit: clean."
    return "\n\n".join(
        [
            fault_table(outcome),
            outcome_table(outcome),
            usage_table(outcome),
            f"{outcome.seconds:.0f} s under load, {outcome.num_processes} processes lived;"
            f" at most {counters} in one life of the router; exit code {outcome.exit_code} after SIGTERM."
            f" {verdict}",
            *([_problems(outcome)] if ledger.problems else []),
        ]
    )


def _problems(outcome: Outcome) -> str:
    return "\n".join(f"- {problem}" for problem in outcome.ledger.problems)
