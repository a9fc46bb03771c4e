"""Reports of a replay, as a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from typing import Any

from millrace_router.journal.header import Header
from millrace_router.journal.replay.comparison import Difference
from millrace_router.journal.replay.player import Outcome

COLUMNS = ("epoch", "began", "steps", "tokens", "recorded s", "replayed s", "result")
WITHOUT_TOKENS = (
    "The journal holds no token ids (--journal-tokens): the schedule was replayed with others of the same number, "
    "without grammars and draft tokens, and answers were not compared."
)


def head(header: Header, notes: Sequence[str]) -> str:
    """Return the lines above the table: the recorded deployment, and notes."""
    shard = header.shard
    lines = [
        f"{header.model_id}{f' ({header.model_sha})' if header.model_sha else ''}, {shard.model_type}, {shard.dtype}, "
        f"{shard.world_size} rank{'s' if shard.world_size > 1 else ''}, {header.capacity.num_blocks} blocks of "
        f"{shard.block_size}, recorded by Millrace {header.version}",
        *(f"note: {note}" for note in notes),
    ]
    return "\n".join(lines) + "\n\n"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a row per epoch, and remarks below."""
    rows = [COLUMNS, *map(_row, outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in {1, 6} else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    for outcome in outcomes:
        lines += [f"epoch {outcome.epoch.index}: {remark}" for remark in _remarks(outcome)]
    if any(not outcome.is_compared for outcome in outcomes):
        lines += ["", WITHOUT_TOKENS]
    return "\n".join(lines) + "\n"


def as_json(header: Header, notes: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    report = {
        "model_id": header.model_id,
        "model_sha": header.model_sha,
        "notes": list(notes),
        "equal": all(outcome.difference is None for outcome in outcomes),
        "compared": all(outcome.is_compared for outcome in outcomes),
        "epochs": [_entry(outcome) for outcome in outcomes],
    }
    return json.dumps(report, indent=2) + "\n"


def _row(outcome: Outcome) -> tuple[str, ...]:
    if outcome.difference is not None:
        result = "DIFFERENT"
    elif outcome.is_compared:
        result = "equal"
    else:
        result = "not compared"
    return (
        str(outcome.epoch.index),
        outcome.epoch.began.strftime("%Y-%m-%d %H:%M:%S"),
        str(outcome.num_steps),
        str(outcome.num_tokens),
        f"{outcome.recorded_ns / 1e9:.3f}",
        f"{outcome.replayed_ns / 1e9:.3f}",
        result,
    )


def _remarks(outcome: Outcome) -> list[str]:
    remarks = []
    if outcome.difference is not None:
        remarks.append(f"first difference at {describe(outcome.difference)}")
    elif outcome.largest_gap:
        remarks.append(f"largest gap between log probabilities {outcome.largest_gap:.3g}")
    if outcome.is_compared and outcome.num_left_out:
        remarks.append(
            f"{outcome.num_left_out} requests with images are not compared: the journal lacks pixels, so that grey"
            " images took their place"
        )
    if outcome.failure is not None:
        failure = outcome.failure
        numbers = ", ".join(map(str, failure.unanswered)) or "none"
        remarks.append(
            f"the record ends with a failure ({failure.kind}): {failure.reason}; steps in flight: {numbers}"
        )
    elif outcome.unanswered:
        numbers = ", ".join(map(str, outcome.unanswered))
        remarks.append(f"the record ends without an answer to steps {numbers}")
    return remarks


def describe(difference: Difference) -> str:
    where = [f"step {difference.step}"]
    if difference.slot is not None:
        where.append(f"slot {difference.slot}")
    if difference.request_id is not None:
        where.append(f"request {difference.request_id}")
    if difference.position is not None:
        where.append(f"position {difference.position}")
    text = f"{', '.join(where)}: {difference.what}: "
    if difference.recorded:
        text += f"recorded {difference.recorded}, replayed {difference.replayed}"
    else:
        text += difference.replayed
    return (
        text if difference.gap is None else f"{text}; log probabilities {difference.gap:.3g} apart"
    )


def _entry(outcome: Outcome) -> dict[str, Any]:
    difference, failure = outcome.difference, outcome.failure
    return {
        "epoch": outcome.epoch.index,
        "began": outcome.epoch.began.isoformat(),
        "steps": outcome.num_steps,
        "tokens": outcome.num_tokens,
        "recorded_seconds": outcome.recorded_ns / 1e9,
        "replayed_seconds": outcome.replayed_ns / 1e9,
        "compared": outcome.is_compared,
        "equal": difference is None,
        "left_out": outcome.num_left_out,
        "largest_gap": outcome.largest_gap,
        "difference": None
        if difference is None
        else {
            "step": difference.step,
            "what": difference.what,
            "slot": difference.slot,
            "request_id": difference.request_id,
            "position": difference.position,
            "recorded": difference.recorded,
            "replayed": difference.replayed,
            "gap": difference.gap if difference.gap is None or isfinite(difference.gap) else None,
        },
        "failure": None
        if failure is None
        else {
            "kind": failure.kind,
            "reason": failure.reason,
            "unanswered": list(failure.unanswered),
        },
        "unanswered": list(outcome.unanswered),
    }
