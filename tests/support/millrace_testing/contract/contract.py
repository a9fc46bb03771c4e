"""Rules of the contract as rows, each asked of two servers: one as it comes, one with `--strict-tgi`.

The servers live as long as a module's rows, on an event loop of their own: a row costs one request.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import aiohttp
import orjson
from yarl import URL

from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import Edge, echo, events_in, serving

TEMPLATE = "{{ messages | map(attribute='content') | join(' ') }}"
JSON = {"content-type": "application/json"}
PLAIN = "text/plain; charset=utf-8"
EVENTS = "text/event-stream"
EMPTY = b""
ABSENT = None
"""The expected value of a header that must be absent."""
COLUMNS = ("default", "strict")

Script = Callable[[ValidRequest, TokenStream], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The expected answer. `body` and `events` are patterns, see `fits`."""

    status: int = 200
    body: Any = ...
    """JSON; text, if it is a string; bytes as they are."""
    events: Sequence[Any] | None = None
    """All events of a stream: JSON, or the text of what is none."""
    headers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of one section: a request, and the answer of either server."""

    section: str
    says: str
    path: str
    default: Reply
    strict: Reply | None = None
    """None: the same."""
    method: str = "POST"
    body: Any = None
    """JSON, or bytes that are sent as they are."""
    headers: Mapping[str, str] = field(default_factory=dict)
    script: Script = echo
    server: str = "usual"
    """Which of `SERVERS`."""
    generates: Mapping[str, Any] | None = None
    """Patterns of the last valid request's fields by dotted name; None: no matter, {}: nothing is generated."""
    generates_strictly: Mapping[str, Any] | None = None
    """The same with `--strict-tgi`, where that differs."""

    def __str__(self) -> str:
        return f"{self.section} {self.says}"


def fits(given: Any, pattern: Any) -> bool:
    """Whether what is given is as the pattern says.

    A mapping names keys and what they must be (`...` anything, ABSENT not there or null), a sequence all items; a
    type, a regular expression for the whole of a text, and a predicate stand for themselves.
    """
    if isinstance(pattern, EllipsisType):
        return True
    if isinstance(pattern, type):
        return isinstance(given, pattern)
    if isinstance(pattern, re.Pattern):
        return isinstance(given, str) and pattern.fullmatch(given) is not None
    if callable(pattern):
        return bool(pattern(given))
    if isinstance(pattern, Mapping):
        return isinstance(given, Mapping) and all(
            fits(given.get(key), value) for key, value in pattern.items()
        )
    if isinstance(pattern, list):
        return (
            isinstance(given, list)
            and len(given) == len(pattern)
            and all(map(fits, given, pattern))
        )
    return bool(given == pattern and isinstance(given, bool) == isinstance(pattern, bool))


def exactly(keys: Mapping[str, Any]) -> Callable[[Any], bool]:
    """Pattern of an object with these keys, in this order, and no others."""

    def check(given: Any) -> bool:
        return isinstance(given, dict) and list(given) == list(keys) and fits(given, keys)

    return check


class Held:
    """A server, and the loop it runs on while no test does."""

    def __init__(self, **options: Any) -> None:
        self._runner = asyncio.Runner(debug=False)
        self._stack = AsyncExitStack()
        starting = self._stack.enter_async_context(serving(**{"template": TEMPLATE, **options}))
        self.edge: Edge = self._runner.run(starting)

    def close(self) -> None:
        """Stop it."""
        self._runner.run(self._stack.aclose())
        self._runner.close()

    def ask(self, rule: Rule) -> tuple[aiohttp.ClientResponse, bytes]:
        """Send the rule's request; the response, and its body."""
        self.edge.batcher.script = rule.script
        self.edge.batcher.requests.clear()
        return self._runner.run(self._ask(rule))

    async def _ask(self, rule: Rule) -> tuple[aiohttp.ClientResponse, bytes]:
        is_raw = rule.body is None or isinstance(rule.body, bytes)
        data = rule.body if is_raw else json.dumps(rule.body).encode()
        headers = {**({} if is_raw else JSON), **rule.headers}
        url = URL(self.edge.url + rule.path, encoded=True)
        async with self.edge.client.request(
            rule.method, url, data=data, headers=headers, skip_auto_headers=["content-type"]
        ) as response:
            return response, await response.read()

    def check(self, rule: Rule, column: str) -> None:
        """Ask, and assert that the answer is the column's, and so is what was to be generated."""
        response, body = self.ask(rule)
        reply = rule.default if column == "default" else rule.strict or rule.default
        shown = (response.status, dict(response.headers), body)
        assert response.status == reply.status, shown
        for name, value in reply.headers.items():
            assert fits(response.headers.get(name), value), (name, shown)
        assert fits(parsed(body, reply.body), reply.body), shown
        if reply.events is not None:
            assert response.content_type == EVENTS, shown
            assert fits(events_in(body.decode()), list(reply.events)), shown
        self._check_generated(rule, column)

    def _check_generated(self, rule: Rule, column: str) -> None:
        wanted = rule.generates
        if column == "strict" and rule.generates_strictly is not None:
            wanted = rule.generates_strictly
        if wanted is None:
            return
        requests = self.edge.batcher.requests
        assert bool(requests) == bool(wanted), requests
        for name, pattern in wanted.items():
            value: Any = requests[-1]
            for part in name.split("."):
                value = getattr(value, part)
            assert fits(value, pattern), (name, value)


def explode(_: ValidRequest, __: TokenStream) -> None:
    """Fail with an unexpected error."""
    raise ArithmeticError("an unexpected error")


def parsed(body: bytes, pattern: Any) -> Any:
    """The body in the form that the pattern is of."""
    if isinstance(pattern, bytes):
        return body
    if isinstance(pattern, str | re.Pattern):
        return body.decode()
    return None if isinstance(pattern, EllipsisType) else orjson.loads(body)


SERIES = (
    "tgi_batch_concat",
    "tgi_batch_current_max_tokens",
    "tgi_batch_current_size",
    "tgi_queue_size",
    "tgi_request_count",
    "tgi_request_duration_bucket",
    "tgi_request_failure",
    "tgi_request_generated_tokens_bucket",
    "tgi_request_generated_tokens_count",
    "tgi_request_generated_tokens_sum",
    "tgi_request_input_length_bucket",
    "tgi_request_mean_time_per_token_duration_bucket",
    "tgi_request_queue_duration_bucket",
    "tgi_request_skipped_tokens_bucket",
    "tgi_request_success",
    *(
        f'tgi_batch_{part}_duration_bucket{{method="decode"}}'
        for part in ("concat", "decode", "filter", "forward", "inference")
    ),
    'tgi_batch_inference_duration_bucket{method="prefill"}',
)
"""PromQL selectors of the series, without the label `container`, which the scraper adds."""
