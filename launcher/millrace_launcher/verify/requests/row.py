"""One line of the report."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_launcher.verify.comparison import Comparison
from millrace_launcher.verify.promise import Promise, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A comparison, what was promised of it, and the verdict; or why there is none."""

    case: str
    """The name by which `--cases` chooses it."""
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
    """A row by what was found; equality proves nothing unless what might break it did happen."""
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
    """A case that did not run: red if the user asked for it by name."""
    verdict = Verdict.NOT_EXERCISED if asked_for else Verdict.NOT_CHECKED
    return Row(case=case, title=title, verdict=verdict, note=reason)
