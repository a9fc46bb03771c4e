"""`millrace-router replay`: replays a journal and reports whether the answers are the same."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace_router.config import RouterConfig, split_commas
from millrace_router.journal.frames import JournalError, JournalUnusable
from millrace_router.journal.reader import read_epochs
from millrace_router.journal.replay.player import Outcome, Player
from millrace_router.journal.replay.report import as_json, head, table
from millrace_router.shards.channels import TlsError, tls_from
from millrace_router.shards.errors import ShardError
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel

STEP_SECONDS = 300.0
EQUAL, DIFFERENT, UNUSABLE = 0, 1, 2
EPILOG = """exit status: 0 the answers are those recorded, or there are none to compare with; 1 they differ;
2 the journal or the shards cannot be used. Shards that serve must not be given: their requests would end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """The arguments of the command line."""

    journal: Path
    shard_addresses: tuple[str, ...]
    shard_tls_cert: Path | None
    shard_tls_key: Path | None
    shard_tls_ca: Path | None
    step_timeout: float
    epoch: int | None
    as_json: bool


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
        raise problem or JournalUnusable(
            f"{config.journal} contains no such epoch from its beginning"
        )
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


def config_from_args(argv: Sequence[str]) -> ReplayConfig:
    """Parse the arguments; exits with 2 and a message if they are wrong."""
    arguments = vars(_parser().parse_args(argv))
    addresses = split_commas(arguments.pop("shard_addresses")) or (
        f"unix:{arguments['master_shard_uds_path']}",
    )
    del arguments["master_shard_uds_path"]
    assert isinstance(addresses, tuple)
    return ReplayConfig(shard_addresses=addresses, **arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millrace-router replay",
        description="Send the steps of a journal to shards once more, and compare their answers.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("journal", type=Path, help="A file that --journal wrote, or the folder.")
    for name in ("shard_addresses", "master_shard_uds_path"):
        _add(parser, name, str)
    for name in ("shard_tls_cert", "shard_tls_key", "shard_tls_ca"):
        _add(parser, name, Path)
    parser.add_argument(
        "--step-timeout",
        type=_positive,
        default=STEP_SECONDS,
        help="Seconds that a step may take. [%(default)g]",
    )
    parser.add_argument(
        "--epoch", type=int, help="Replay only this one, by its number in the table."
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="Write JSON.")
    return parser


def _add(parser: argparse.ArgumentParser, name: str, kind: type[str] | type[Path]) -> None:
    """Add a flag of the router, with its description."""
    field = RouterConfig.model_fields[name]
    default = field.default if isinstance(field.default, str) else None
    parser.add_argument(
        "--" + name.replace("_", "-"), type=kind, default=default, help=field.description
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value
