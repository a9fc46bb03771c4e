"""The command line of `millrace-verify`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from millrace.verify.comparison import REFERENCE_TOLERANCE
from millrace_launcher.host.runtime import millrace_version

PROGRAM = "millrace-verify" if Path(sys.argv[0]).name == "millrace-verify" else "millrace verify"
"""As it was typed, by itself or through `millrace`."""
CASES: Mapping[str, str] = {
    "batched": "solo against batched, and with unrelated traffic",
    "chunked": "prompts computed whole against in chunks",
    "cached": "without a prefix cache against a cold and a warm one",
    "preempted": "undisturbed against paused and replayed, for want of KV blocks",
    "restarted": "undisturbed against a shard killed mid-stream",
    "speculated": "without speculation against with it",
    "tensor-parallel": "one shard against several, and those by themselves against batched",
    "adapters": "LoRA adapters and the base, by themselves against mixed, and against a shard killed mid-stream",
    "transformers": f"plain transformers in float32: greedy tokens, logprobs within {REFERENCE_TOLERANCE:g}",
}
DESCRIPTION = """\
Checks that a request's tokens and log probabilities do not depend on its company: the same requests, greedy and
sampled, are answered under one circumstance after the other and compared bit for bit. A model, by folder or by name, is
served by servers of this command's own; of a running server, by URL, what can be checked from outside is.
"""
EPILOG = (
    "cases:\n"
    + "\n".join(f"  {name:16} {text}" for name, text in CASES.items())
    + f"""

Flags of millrace-launcher after a lone -- go to every server: {PROGRAM} my/model -- --dtype bfloat16

exit codes: 0 when everything promised held; 1 when a promise was broken, or a circumstance did not come about;
2 for a wrong command line, or when no server could be started or reached.
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `millrace-verify`."""

    target: str | None
    """A folder, a name on the hub, or a URL; the demo model when None."""
    cases: tuple[str, ...]
    chosen: bool
    """Whether --cases was given."""
    prompts: Path | None
    num_requests: int
    max_new_tokens: int
    num_shard: int
    speculate: int
    revision: str | None
    api_key: str | None
    log_dir: Path | None
    as_json: bool
    replay: Path | None
    epoch: int | None
    flags: tuple[str, ...]
    """The launcher flags after a lone --."""

    @property
    def is_url(self) -> bool:
        """Whether the target is a running server."""
        return self.target is not None and self.target.startswith(("http://", "https://"))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"error: {message}\n\nFor more information, try '--help'.\n")
        raise SystemExit(2)


def read_options(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Options:
    """Parse the command line; SystemExit 2 with a message if it is wrong."""
    environ = os.environ if environ is None else environ
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = _parser()
    given = parser.parse_args(argv[:cut])
    options = Options(
        target=given.model,
        cases=given.cases or tuple(CASES),
        chosen=given.cases is not None,
        prompts=given.prompts,
        num_requests=given.requests,
        max_new_tokens=given.max_new_tokens,
        num_shard=given.num_shard,
        speculate=given.speculate,
        revision=given.revision,
        api_key=given.api_key or environ.get("API_KEY") or None,
        log_dir=given.log_dir,
        as_json=given.json,
        replay=given.replay,
        epoch=given.epoch,
        flags=tuple(argv[cut + 1 :]),
    )
    if options.is_url and options.flags:
        parser.error("flags after -- are for servers of this command's own, not for a URL")
    if options.epoch is not None and options.replay is None:
        parser.error("--epoch is for --replay")
    if options.is_url and options.replay is not None:
        parser.error("--replay needs the model itself, not a URL")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [MODEL_DIR | MODEL_ID | URL] [FLAG ...] [-- LAUNCHER_FLAG ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", nargs="?", help="what to check; the demo model when absent", metavar="MODEL")
    _add_requests(add)
    add("--revision", metavar="NAME", help="branch, tag or commit of the model on the hub")
    add("--api-key", metavar="KEY", help="of the server at URL [env: API_KEY]")
    add(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="keep the servers' logs there; otherwise they are shown only where a server fails",
    )
    add("--json", action="store_true", help="print JSON in place of the table")
    add(
        "--replay",
        type=Path,
        metavar="JOURNAL",
        help="in place of the cases: run what --journal recorded again, and compare the answers",
    )
    add("--epoch", type=int, metavar="N", help="of the journal, only this one")
    add("-V", "--version", action="version", version=f"millrace {millrace_version()}")
    return parser


def _add_requests(add: Callable[..., object]) -> None:
    """Flags that choose cases and requests."""
    add("--cases", type=_cases, metavar="NAME,NAME", help="which; all when absent")
    add("--prompts", type=Path, metavar="FILE", help="prompts of your own, one a line")
    add("--requests", type=_positive, default=12, metavar="N", help="how many [default: 12]")
    add(
        "--max-new-tokens",
        type=_positive,
        default=48,
        metavar="N",
        help="length of most answers; some are longer, so that they grow by KV blocks [default: 48]",
    )
    add(
        "--num-shard",
        type=_at_least_two,
        default=2,
        metavar="N",
        help="shards of tensor-parallel [default: 2]",
    )
    add(
        "--speculate",
        type=_positive,
        default=4,
        metavar="N",
        help="guesses of speculated [default: 4]",
    )


def _cases(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    unknown = [name for name in names if name not in CASES]
    if unknown or not names:
        what = f"unknown case {unknown[0]}" if unknown else "no case is named"
        raise argparse.ArgumentTypeError(f"{what}; these are: {', '.join(CASES)}")
    return names


def _positive(text: str) -> int:
    return _whole(text, least=1)


def _at_least_two(text: str) -> int:
    return _whole(text, least=2)


def _whole(text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text}")
    return value
