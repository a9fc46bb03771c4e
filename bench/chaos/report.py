"""The tables of a campaign: faults injected and survived, requests by outcome, what processes hold."""

from __future__ import annotations

from statistics import median

from bench.chaos.audit import MEMORY_GROWTH, SLACK_FDS, SLACK_THREADS
from bench.chaos.campaign import Kind
from bench.chaos.run import Story
from bench.report import markdown


def fault_table(story: Story) -> str:
    """By kind; recovery is the longest silence over all streams together, from the fault on."""
    rows = []
    for kind in Kind:
        survived = [silence for fault, silence in story.survived if fault.kind is kind]
        failed = sum(fault.kind is kind for fault in story.not_survived)
        if not survived and not failed:
            continue
        silences = [silence for silence in survived if silence is not None]
        rows.append((kind.value, len(survived) + failed, len(survived), *_spread(silences)))
    silences = [silence for _, silence in story.survived if silence is not None]
    total = len(story.survived) + len(story.not_survived)
    rows.append(("all", total, len(story.survived), *_spread(silences)))
    columns = ("fault", "injected", "survived", "recovery p50, s", "max, s")
    return markdown(columns, [tuple(map(str, row)) for row in rows])


def _spread(silences: list[float]) -> tuple[str, str]:
    return (f"{median(silences):.2f}", f"{max(silences):.2f}") if silences else ("", "")


def outcome_table(story: Story) -> str:
    """What became of the requests, attempts that were broken off and sent again on their own."""
    rows = [(outcome, str(number)) for outcome, number in story.ledger.outcomes.most_common()]
    return markdown(("outcome", "requests"), rows)


def usage_table(story: Story) -> str:
    """Before the faults and after them, at rest."""
    rows = []
    for name, after in story.after.items():
        before = story.before.get(name)
        if before is not None:
            rows.append(
                (
                    name,
                    f"{before.fds} / {after.fds}",
                    f"{before.threads} / {after.threads}",
                    f"{before.memory / 2**20:.0f} / {after.memory / 2**20:.0f}",
                )
            )
    columns = (
        "before / after",
        f"file descriptors (+{SLACK_FDS} allowed)",
        f"threads (+{SLACK_THREADS})",
        f"resident MiB (+{MEMORY_GROWTH / 2**20:.0f})",
    )
    return markdown(columns, rows)


def text(story: Story) -> str:
    """All tables, and every problem that was kept in words."""
    counters = ", ".join(f"{number:g} {name}" for name, number in story.counters.items())
    ledger = story.ledger
    verdict = f"Audit: {ledger.num_problems} problems." if ledger.num_problems else "Audit: clean."
    return "\n\n".join(
        [
            fault_table(story),
            outcome_table(story),
            usage_table(story),
            f"{story.seconds:.0f} s under load, {story.num_processes} processes lived;"
            f" at most {counters} in one life of the router; exit code {story.exit_code} after SIGTERM."
            f" {verdict}",
            *([_problems(story)] if ledger.problems else []),
        ]
    )


def _problems(story: Story) -> str:
    return "\n".join(f"- {problem}" for problem in story.ledger.problems)
