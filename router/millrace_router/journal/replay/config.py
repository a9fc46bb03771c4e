"""The command line of `millrace-router replay`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace_router.config import RouterConfig, split_commas

STEP_SECONDS = 300.0

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


def config_from_args(argv: Sequence[str]) -> ReplayConfig:
    """Parse the arguments; exits with 2 and a message if they are wrong."""
    given = vars(_parser().parse_args(argv))
    addresses = split_commas(given.pop("shard_addresses")) or (
        f"unix:{given['master_shard_uds_path']}",
    )
    del given["master_shard_uds_path"]
    assert isinstance(addresses, tuple)
    return ReplayConfig(shard_addresses=addresses, **given)


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
        "--epoch", type=int, help="Replay this one alone, by its number in the table."
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
