"""`millrace bench URL`: load on any OpenAI or TGI server, with its latencies and its throughput."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from millrace.commands.parser import Parser, positive
from millrace.errors import MillraceError
from millrace.http.client import Client, is_url
from millrace.load.apis import APIS, dialect_of, find_api
from millrace.load.levels import Level
from millrace.load.live import LiveLine, header, line_of
from millrace.load.load import RequestOutcome, run_level
from millrace.load.measurement import Measurement, summarise
from millrace.load.report import SUFFIXES, Report
from millrace.load.texts import prompts_of, random_prompts

PROGRAM = "millrace bench"
DEFAULT_URL = "http://127.0.0.1:3000"
DEFAULT_CONCURRENCY = (1.0, 4.0, 16.0)
LEAST_REQUESTS = 8
SHOWN_FAILURES = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every level; 1 where the server cannot be reached, or a level has failed requests."""
    parser = _parser()
    given = parser.parse_args(argv)
    if not is_url(given.url):
        parser.error(f"{given.url} must be an http:// or https:// address")
    try:
        prompts = None if given.prompts is None else prompts_of(given.prompts)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        report = asyncio.run(_run(given, prompts))
    except (MillraceError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if given.report is not None:
        try:
            report.write(given.report)
        except OSError as error:
            sys.stderr.write(f"error: cannot write {given.report}: {error.strerror}\n")
            return 1
    failures = [failure for each in report.measurements for failure in each.failures]
    for failure in list(dict.fromkeys(failures))[:SHOWN_FAILURES]:
        sys.stderr.write(f"failed: {failure}\n")
    return 1 if failures else 0


async def _run(given: argparse.Namespace, prompts: tuple[str, ...] | None) -> Report:
    """Find out what the server is, warm it up, and run the levels one after the other."""
    async with Client(given.url, given.api_key) as client:
        api = given.api or await find_api(client)
        model = given.model or await client.first_model()
    amounts = given.rate or given.concurrency or DEFAULT_CONCURRENCY
    levels = [_level(given, amount, prompts) for amount in amounts]
    sys.stdout.write(f"{given.url}, API {api}, model {model}\n{header()}\n")
    await _measure(given, _warm_up(levels[0]), api, model)
    measurements = []
    for level in levels:
        measurement = await _measure(given, level, api, model)
        sys.stdout.write(line_of(measurement) + "\n")
        sys.stdout.flush()
        measurements.append(measurement)
    return Report(
        url=given.url,
        model=model,
        api=api,
        is_open=given.rate is not None,
        settings={
            "prompt tokens": round(measurements[0].prompt_tokens) or given.prompt_tokens,
            "answer tokens": given.max_tokens,
        },
        amounts=amounts,
        measurements=measurements,
    )


async def _measure(given: argparse.Namespace, level: Level, api: str, model: str) -> Measurement:
    """Run one level. Raises ValueError where every request failed."""
    dialect = dialect_of(api, model, ignore_eos=given.ignore_eos)
    headers = {} if given.api_key is None else {"Authorization": f"Bearer {given.api_key}"}
    outcome = RequestOutcome()
    async with LiveLine(sys.stdout, level.name, level.num_requests, outcome):
        await run_level(given.url, level, dialect=dialect, outcome=outcome, headers=headers)
    return summarise(model, level, outcome.timelines, failures=outcome.failures)


def _level(given: argparse.Namespace, amount: float, prompts: tuple[str, ...] | None) -> Level:
    num_requests = given.requests or max(LEAST_REQUESTS, round(2 * amount))
    return Level(
        name=f"{'rate' if given.rate else 'c'}={amount:g}",
        num_requests=num_requests,
        prompt_tokens=given.prompt_tokens,
        new_tokens=given.max_tokens,
        concurrency=None if given.rate else int(amount),
        rate=amount if given.rate else None,
        seed=given.seed,
        given=prompts
        or random_prompts(
            given.prompt_tokens, num_requests, seed=given.seed + round(amount * 1000)
        ),
    )


def _warm_up(first: Level) -> Level:
    """Two short requests, so that no level pays for the first of all."""
    return Level(
        name="warm-up",
        num_requests=2,
        prompt_tokens=first.prompt_tokens,
        new_tokens=min(8, first.new_tokens),
        concurrency=1,
        given=first.given[-2:],
    )


def _amounts(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if min(values) <= 0:
        raise ValueError(text)
    return values


def _counts(text: str) -> tuple[float, ...]:
    return tuple(float(positive(part)) for part in text.split(","))


def _report(text: str) -> Path:
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"a report ends in {', '.join(SUFFIXES)}, not {text}")
    return path


def _parser() -> Parser:
    parser = Parser(
        PROGRAM,
        usage="[URL] [FLAG ...]",
        description="Streams answers from any OpenAI or TGI server under load, level by level, and takes the time of\n"
        "each token: percentiles of the time to the first token, between tokens and of whole answers, and throughput.",
    )
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"[default: {DEFAULT_URL}]")
    add("--api", choices=APIS, help="which API; found out when absent")
    add("--model", metavar="NAME", help="model of the server; the first when absent")
    _add_load(parser)
    add(
        "--seed", type=int, default=0, metavar="N", help="of prompts and arrival times [default: 0]"
    )
    add("--report", type=_report, metavar="FILE", help="write a report: .html, .svg or .json")
    parser.add_api_key()
    return parser


def _add_load(parser: Parser) -> None:
    """The flags of the levels, of prompts and of answers."""
    add = parser.add_argument
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        *("-c", "--concurrency", "--batch-size"),
        type=_counts,
        metavar="N,N",
        help="levels: requests in flight [default: 1,4,16]",
    )
    load.add_argument("--rate", type=_amounts, metavar="X,X", help="levels: requests a second")
    add(
        "--requests",
        type=positive,
        metavar="N",
        help="a level [default: twice the load, at least 8]",
    )
    add(
        *("--prompt-tokens", "--sequence-length"),
        type=positive,
        default=128,
        metavar="N",
        help="about so many tokens of a prompt [default: 128]",
    )
    add(
        *("--max-tokens", "--decode-length"),
        type=positive,
        default=64,
        metavar="N",
        help="tokens of an answer [default: 64]",
    )
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompts, one a line: text, or JSON with `prompt`",
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for answers of full length, by a field that OpenAI's own servers refuse [default: on]",
    )


if __name__ == "__main__":
    sys.exit(main())
