"""One row of the report."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_launcher.verify.comparison import Comparison
from millrace_launcher.verify.promise import Promise, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A comparison with promise and verdict, or the reason why there is none."""

    case: str
    """Its name in `--cases`."""
    title: str
    verdict: Verdict
    promise: str = ""
    comparison: Comparison | None = None
    note: str = ""


def judged(
    case: str,
    title: str,
    promise: Promise,
    comparison: Comparison,
    *,
    exercised: bool = True,
    note: str = "",
) -> Row:
    """Make a row; equality proves nothing unless the case was exercised."""
    verdict = promise.judge(comparison)
    if verdict.is_green and not exercised:
        verdict = Verdict.NOT_EXERCISED
    failures = "; ".join(comparison.failures[:2])
    return Row(
        case=case,
        title=title,
        verdict=verdict,
        promise=promise.words,
        comparison=comparison,
        note="; ".join(filter(None, (note, failures))),
    )


def unchecked(case: str, title: str, reason: str, *, asked_for: bool) -> Row:
    """Make a row for a case that did not run; it is red if the user requested the case."""
    verdict = Verdict.NOT_EXERCISED if asked_for else Verdict.NOT_CHECKED
    return Row(case=case, title=title, verdict=verdict, note=reason)
