"""The tables of a campaign: faults and recoveries, requests by outcome, resources of processes."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from bench.faults.chaos.audit import MEMORY_GROWTH, SLACK_FDS, SLACK_THREADS
from bench.faults.chaos.campaign import Kind
from bench.faults.chaos.pauses import PARTS
from bench.faults.chaos.run import Outcome
from bench.harness.tables import markdown
from millrace.load.measurement import Quantiles

COLUMNS = (
    *("fault", "injected", "recovered", "silence p50, s", "max, s"),
    *("first new token p50, s", "max, s", "all moving p50, s", "max, s"),
)
KEYS = (
    *("fault", "injected", "recovered", "silence_p50", "silence_max"),
    *("first_token_p50", "first_token_max", "all_moving_p50", "all_moving_max"),
)
Cell = str | float | None


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Plain containers."""
    return {
        "faults": [dict(zip(KEYS, row, strict=True)) for row in _rows(outcome)],
        "parts_p50": _parts(outcome),
        "not_recovered": [fault.kind.name for fault in outcome.not_recovered],
        "requests": dict(outcome.ledger.outcomes),
        "latencies_ms": {
            name: asdict(Quantiles.of(each)) for name, each in outcome.ledger.seconds.items()
        },
        "problems": outcome.ledger.problems,
        "before": {name: asdict(each) for name, each in outcome.before.items()},
        "after": {name: asdict(each) for name, each in outcome.after.items()},
        "counters": outcome.counters,
        "seconds": outcome.seconds,
        "exit_code": outcome.exit_code,
    }


def fault_table(outcome: Outcome) -> str:
    """Faults by kind. Silence is the longest time without a token; the other times begin with the fault."""
    return markdown(COLUMNS, [tuple(map(_shown, row)) for row in _rows(outcome)])


def _rows(outcome: Outcome) -> list[tuple[Cell, ...]]:
    kinds = [*outcome.recovered, *((fault, None) for fault in outcome.not_recovered)]
    rows: list[tuple[Cell, ...]] = []
    for kind in (*Kind, None):
        of_kind = [fault for fault, _ in kinds if kind in (None, fault.kind)]
        if not of_kind and kind is not None:
            continue
        recovered = [pause for fault, pause in outcome.recovered if kind in (None, fault.kind)]
        pauses = [pause for pause in recovered if pause is not None]
        rows.append(
            (
                "all" if kind is None else kind.value.text,
                len(of_kind),
                len(recovered),
                *_spread([pause.silence for pause in pauses]),
                *_spread([pause.first_token for pause in pauses]),
                *_spread([pause.all_moving for pause in pauses if pause.all_moving is not None]),
            )
        )
    return rows


def _spread(seconds: list[float]) -> tuple[float | None, float | None]:
    return (median(seconds), max(seconds)) if seconds else (None, None)


def _shown(value: Cell) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _parts(outcome: Outcome) -> dict[str, float]:
    """Median seconds of each part of the pauses whose parts were all logged."""
    if not outcome.parts:
        return {}
    return {name: median(each[name] for each in outcome.parts) for name in PARTS}


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
            *_latencies(outcome),
            outcome_table(outcome),
            usage_table(outcome),
            f"{outcome.seconds:.0f} s under load, {outcome.num_processes} processes lived;"
            f" at most {counters} in one life of the router; exit code {outcome.exit_code} after SIGTERM."
            f" {verdict}",
            *([_problems(outcome)] if ledger.problems else []),
        ]
    )


def _latencies(outcome: Outcome) -> list[str]:
    latencies = {name: Quantiles.of(each) for name, each in outcome.ledger.seconds.items()}
    lines = [
        f"{name}: p50 {each.p50:.0f}, p90 {each.p90:.0f}, p99 {each.p99:.0f} ms"
        for name, each in latencies.items()
    ]
    if found := _parts(outcome):
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found.items())
        lines.append(f"parts of {len(outcome.parts)} pauses, p50, s: {shown}")
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def _problems(outcome: Outcome) -> str:
    return "\n".join(f"- {problem}" for problem in outcome.ledger.problems)
