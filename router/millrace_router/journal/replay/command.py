"""`millrace-router replay`: replays a journal and reports whether the answers are the same."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from millrace_router.journal.errors import JournalError, JournalUnusable
from millrace_router.journal.reader import read_epochs
from millrace_router.journal.replay.config import ReplayConfig, config_from_args
from millrace_router.journal.replay.player import Outcome, Player
from millrace_router.journal.replay.report import as_json, head, table
from millrace_router.shards.channels import TlsError, tls_from
from millrace_router.shards.errors import ShardError
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel

EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2


def replay(argv: Sequence[str]) -> int:
    """Replay the journal of the arguments; returns the exit status."""
    config = config_from_args(argv)
    try:
        return asyncio.run(_replay(config))
    except (JournalError, ShardError, TlsError) as error:
        sys.stderr.write(f"error: {error}\n")
        return UNUSABLE


async def _replay(config: ReplayConfig) -> int:
    tls = tls_from(config)
    group = ShardGroup(config.shard_addresses, tls, silence_seconds=config.step_timeout)
    shards = StepChannel(group)
    player = Player(shards, step_seconds=config.step_timeout)
    outcomes: list[Outcome] = []
    notes: list[str] = []
    problem: JournalError | ShardError | None = None
    try:
        for epoch in read_epochs(config.journal):
            if config.epoch not in {None, epoch.index}:
                continue
            if not outcomes:
                notes = await player.notes(epoch.header)
            outcomes.append(await player.play(epoch))
    except (JournalError, ShardError) as error:
        # The epochs before were replayed, so their results are reported.
        problem = error
    finally:
        await shards.close()
    if not outcomes:
        raise problem or JournalUnusable(f"{config.journal} contains no such epoch")
    _show(config, notes, outcomes)
    is_different = any(outcome.difference for outcome in outcomes)
    if problem is not None and not is_different:
        raise problem
    if problem is not None:
        sys.stderr.write(f"error: {problem}\n")
    return DIFFERENT if is_different else EQUAL


def _show(config: ReplayConfig, notes: Sequence[str], outcomes: Sequence[Outcome]) -> None:
    header = outcomes[0].epoch.header
    if config.as_json:
        sys.stdout.write(as_json(header, notes, outcomes))
    else:
        sys.stdout.write(head(header, notes) + table(outcomes))
