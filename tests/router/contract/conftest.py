"""The servers that rules are asked of, started when the first rule wants them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millrace_testing.contract.contract import Held
from millrace_testing.router.edge import limits_with, logging_to

SERVERS: dict[str, dict[str, Any]] = {
    "usual": {},
    "keyed": {"api_key": "secret"},
    "small": {"payload_limit": 100},
    "scoring": {"limits": limits_with(prefill_logprobs=True)},
    "roomy": {"limits": limits_with(max_input_tokens=500, max_total_tokens=4000)},
    "choosy": {"limits": limits_with(max_best_of=1)},
    "grammarless": {"limits": limits_with(grammars=False)},
    "counted": {},
    "templateless": {"template": None},
    "full": {"limits": limits_with(max_concurrent_requests=0)},
    "listed": {"cors_allow_origin": ("https://a.example",)},
    "platform": {"aip_predict_route": "/predict", "aip_health_route": "/alive"},
    "platform with a key": {
        "api_key": "secret",
        "aip_predict_route": "/predict",
        "aip_health_route": "/alive",
    },
    "platform that wants too much": {"api_key": "secret", "aip_health_route": "/v1/quarantine"},
    "platform with known paths": {
        "aip_predict_route": "/v1/chat/completions",
        "aip_health_route": "/ping",
    },
}


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str, str], Held]]:
    """A server by its name and column."""
    held: dict[tuple[str, str], Held] = {}

    def find(name: str, column: str) -> Held:
        if (name, column) not in held:
            held[name, column] = Held(**SERVERS[name], strict_tgi=column == "strict")
        return held[name, column]

    # Not as for people, whose tracebacks take a second each.
    with logging_to(io.BytesIO()):
        yield find
        for server in held.values():
            server.close()
