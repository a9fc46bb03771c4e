"""Checks a running server; cases that need other servers are reported as not checked."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from millrace.verify.adapters import adapters_outside
from millrace.verify.client import Client, ServerError
from millrace.verify.comparison import compare
from millrace.verify.inside import NoServer, log_progress, suite_of
from millrace.verify.options import CASES, Options
from millrace.verify.questions import PROMPTS, read_prompts
from millrace.verify.report import Report, Row, judged, unchecked
from millrace.verify.suite import (
    Suite,
    ask_alone,
    ask_in_traffic,
    ask_together,
)

MOST_ADAPTERS = 3
NEEDS_SERVERS = "it starts its own servers: name the model in place of the URL"


def verify_server(options: Options) -> Report:
    """Send requests alone, batched, with other traffic, with a cold and a warm cache, and with adapters.

    Raises NoServer or PromptsError.
    Other clients may use the server meanwhile; alone means that this program asks one request at a time.
    """
    assert options.target is not None
    prompts = PROMPTS if options.prompts is None else read_prompts(options.prompts)
    try:
        client = Client(options.target, options.api_key)
        # The prompts of an earlier run would be in the prefix cache.
        nonce = secrets.token_hex(4)
        suite = suite_of(client, options, [f"{nonce} {prompt}" for prompt in prompts])
        rows = [row for name in options.cases for row in _rows(name, client, suite, options)]
    except ServerError as error:
        raise NoServer(str(error)) from error
    return Report(suite.info, tuple(rows))


def _rows(name: str, client: Client, suite: Suite, options: Options) -> Iterator[Row]:
    if name not in CHECKED:
        yield unchecked(name, name, NEEDS_SERVERS, asked_for=options.chosen)
        return
    log_progress(f"checking: {CASES[name]}")
    yield from CHECKED[name](client, suite)


def _batched(client: Client, suite: Suite) -> Iterator[Row]:
    questions, promise = suite.questions, suite.info.promise
    together = ask_together(client, questions, suite.num_workers)
    yield judged("batched", "solo / batched", promise, compare(questions, suite.expected, together))
    crowded = ask_in_traffic(client, suite)
    yield judged(
        "batched", "solo / unrelated traffic", promise, compare(questions, suite.expected, crowded)
    )


def _cached(client: Client, suite: Suite) -> Iterator[Row]:
    if not suite.info.caches_prefixes:
        yield unchecked("cached", "cached", "the server has no prefix cache", asked_for=False)
        return
    warm = ask_alone(client, suite.questions)
    before, after = (
        sum(answer.cached_tokens for answer in answers) for answers in (suite.expected, warm)
    )
    yield judged(
        "cached",
        "cold cache / warm cache",
        suite.info.promise,
        compare(suite.questions, suite.expected, warm),
        exercised=after > before,
        note=f"{after} prompt tokens found cached, {before} before",
    )


def _adapters(client: Client, suite: Suite) -> Iterator[Row]:
    names = client.adapters()
    if names:
        yield adapters_outside(client, suite, names[:MOST_ADAPTERS])
    else:
        yield unchecked("adapters", "adapters", "the server serves no adapters", asked_for=False)


CHECKED = {"batched": _batched, "cached": _cached, "adapters": _adapters}
