"""Section 3.1: routes, keys, browsers; section 3.2: what is refused before a route has seen it."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from typing import Any

import pytest

from millrace_testing.contract.contract import (
    ABSENT,
    COLUMNS,
    EMPTY,
    JSON,
    PLAIN,
    Held,
    Reply,
    Rule,
)

NATIVE = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
COMPLETION = {"prompt": "a", "max_tokens": 1}
POSTS: dict[str, Any] = {
    "/": NATIVE,
    "/generate": NATIVE,
    "/generate_stream": NATIVE,
    "/tokenize": NATIVE,
    "/chat_tokenize": CHAT,
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/invocations": NATIVE,
    "/vertex": {"instances": [NATIVE]},
    "/v2/models/m/infer": {"inputs": [{"name": "i", "data": ["a"]}]},
    "/v2/models/m/versions/1/infer": {"inputs": [{"name": "i", "data": ["a"]}]},
}
OPEN = (
    "/",
    "/health",
    "/ping",
    "/info",
    "/metrics",
    "/v1/models",
    "/api-doc/openapi.json",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/m",
    "/v2/models/m/ready",
    "/v2/models/m/versions/1",
    "/v2/models/m/versions/1/ready",
)
UNAUTHORIZED = Reply(status=401, body=EMPTY)

KEYS = [
    *(
        Rule(
            section="3.1",
            says=f"POST {path} asks for the key",
            path=path,
            body=body,
            server="keyed",
            default=UNAUTHORIZED,
            generates={},
        )
        for path, body in POSTS.items()
    ),
    *(
        Rule(
            section="3.1",
            says=f"POST {path} is opened by it",
            path=path,
            body=body,
            headers={"authorization": "Bearer secret"},
            server="keyed",
            default=Reply(),
        )
        for path, body in POSTS.items()
    ),
    *(
        Rule(
            section="3.1",
            says=f"GET {path} is open",
            path=path,
            method="GET",
            server="keyed",
            default=Reply(),
        )
        for path in OPEN
    ),
    *(
        Rule(
            section="3.1",
            says=f"the key is compared exactly, and so {given!r} is wrong",
            path="/generate",
            body=NATIVE,
            headers={"authorization": given},
            server="keyed",
            default=UNAUTHORIZED,
        )
        for given in (
            "Bearer SECRET",
            "bearer secret",
            "Bearer secret2",
            "Bearer  secret",
            "secret",
        )
    ),
    Rule(
        section="3.1",
        says="Anthropic's clients have another header for the key",
        path="/generate",
        body=NATIVE,
        headers={"x-api-key": "secret"},
        server="keyed",
        default=Reply(),
    ),
]

BROWSERS = [
    Rule(
        section="3.1",
        says="any OPTIONS is a preflight, and whatever is asked for may be sent",
        path="/v1/chat/completions",
        method="OPTIONS",
        headers={
            "origin": "https://ui.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        },
        server="keyed",
        default=Reply(
            body=EMPTY,
            headers={
                "access-control-allow-origin": "*",
                "access-control-allow-methods": "GET,POST",
                "access-control-allow-headers": "authorization,content-type,x-stainless-os",
            },
        ),
    ),
    Rule(
        section="3.1",
        says="a preflight that names no headers gets the headers that are read",
        path="/anything",
        method="OPTIONS",
        default=Reply(
            headers={"access-control-allow-headers": re.compile("content-type,authorization,.*")}
        ),
    ),
    Rule(
        section="3.1",
        says="nor is what cannot be the name of a header repeated",
        path="/generate",
        method="OPTIONS",
        headers={"access-control-request-headers": "x-\u00e9"},
        default=Reply(
            headers={"access-control-allow-headers": re.compile("content-type,authorization,.*")}
        ),
    ),
    Rule(
        section="3.1",
        says="answers may be read by any origin, with all their headers",
        path="/generate",
        body=NATIVE,
        headers={"origin": "https://ui.example"},
        default=Reply(
            headers={
                "access-control-allow-origin": "*",
                "access-control-expose-headers": "*",
                "vary": re.compile(
                    "origin, access-control-request-method, access-control-request-headers"
                ),
            }
        ),
    ),
    Rule(
        section="3.1",
        says="of a list of origins the one that asks is named",
        path="/generate_stream",
        body=NATIVE,
        headers={"origin": "https://a.example"},
        server="listed",
        default=Reply(headers={"access-control-allow-origin": "https://a.example"}),
    ),
    Rule(
        section="3.1",
        says="an origin that is not in the list may read nothing",
        path="/generate",
        body=NATIVE,
        headers={"origin": "https://b.example"},
        server="listed",
        default=Reply(headers={"access-control-allow-origin": ABSENT}),
    ),
]


def refused(status: int, message: str, **of_rule: Any) -> Rule:
    """A rule of what the extractor refuses: in an envelope, or in plain text with `--strict-tgi`."""
    pattern = re.compile(message, re.DOTALL)
    return Rule(
        section="3.2",
        default=Reply(
            status=status,
            body={"error": pattern, "error_type": "validation"},
            headers={"content-type": "application/json"},
        ),
        strict=Reply(status=status, body=pattern, headers={"content-type": PLAIN}),
        **of_rule,
    )


NOT_JSON = "Expected request with `Content-Type: application/json`"
NO_SHAPE = "Failed to deserialize the JSON body into the target type: "
TOO_LONG = "Failed to buffer the request body: length limit exceeded"
OF_TGIS = [path for path in POSTS if not path.startswith("/v1/")]

UNREADABLE = [
    refused(415, NOT_JSON, says="JSON must be called so", path="/generate", body=b"{}"),
    refused(
        415,
        NOT_JSON,
        says="another type of content is refused",
        path="/generate",
        body=b"{}",
        headers={"content-type": "text/plain"},
    ),
    Rule(
        section="3.2",
        says="a type that ends in +json will do",
        path="/generate",
        body=b'{"inputs":"a"}',
        headers={"content-type": "application/vnd.api+json"},
        default=Reply(),
    ),
    *(
        refused(
            400,
            "Failed to parse the request body as JSON: .+",
            says=f"{path} refuses what is not JSON",
            path=path,
            body=b'{"inputs":',
            headers=JSON,
        )
        for path in OF_TGIS
    ),
    *(
        refused(
            422,
            NO_SHAPE + ".+",
            says=f"{path} refuses JSON of another shape, whether or not a stream is wanted",
            path=path,
            body={"inputs": 5, "messages": 5, "prompt": 5, "instances": 5, "stream": True},
        )
        for path in OF_TGIS
    ),
    refused(
        422,
        NO_SHAPE + "must be .+",
        says="no place is named at the root",
        path="/generate",
        body=[],
    ),
    refused(
        422,
        NO_SHAPE + r"parameters\.stop\[1\]: .+",
        says="the message names the place",
        path="/generate",
        body={"inputs": "a", "parameters": {"stop": ["a", 1]}},
    ),
    refused(
        413,
        TOO_LONG,
        says="too much is refused",
        path="/generate",
        body=b" " * 101,
        headers=JSON,
        server="small",
    ),
    refused(
        413,
        TOO_LONG,
        says="too much is refused after it is decompressed, too",
        path="/generate",
        body=gzip.compress(b" " * 101, mtime=0),
        headers={**JSON, "content-encoding": "gzip"},
        server="small",
    ),
    Rule(
        section="3.2",
        says="unknown fields are ignored",
        path="/generate",
        body={**NATIVE, "model": 5, "parameters": {"max_new_tokens": 1, "x": {}}},
        default=Reply(body={"generated_text": " x"}),
    ),
]


def openai_error(message: str, kind: str, status: int) -> dict[str, Any]:
    """OpenAI's envelope."""
    error = {"message": message, "type": kind, "param": None, "code": None}
    return {"error": {**error, "http_status_code": status}}


MISDIRECTED = [
    *(
        Rule(
            section="3.2",
            says=f"an unknown path is empty: {method}",
            path="/nothing",
            method=method,
            default=Reply(status=404, body=EMPTY),
        )
        for method in ("GET", "POST", "PUT")
    ),
    Rule(
        section="3.2",
        says="a wrong method is empty, and what is allowed is named",
        path="/generate",
        method="GET",
        default=Reply(status=405, body=EMPTY, headers={"allow": "POST"}),
    ),
    Rule(
        section="3.2",
        says="OpenAI's clients get an error for an unknown path",
        path="/v1/nothing",
        default=Reply(status=404, body=openai_error("Unknown path: /v1/nothing", "not_found", 404)),
        strict=Reply(status=404, body=EMPTY),
    ),
    Rule(
        section="3.2",
        says="OpenAI's clients get an error for a wrong method",
        path="/v1/completions",
        method="GET",
        default=Reply(
            status=405,
            body=openai_error("Method not allowed: GET /v1/completions", "method_not_allowed", 405),
            headers={"allow": "POST"},
        ),
        strict=Reply(status=405, body=EMPTY, headers={"allow": "POST"}),
    ),
    *(
        Rule(
            section="3.1",
            says=f"HEAD {path} is GET without a body",
            path=path,
            method="HEAD",
            default=Reply(body=EMPTY),
        )
        for path in ("/", "/health", "/info", "/v1/models", "/v2")
    ),
]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("rule", [*KEYS, *BROWSERS, *UNREADABLE, *MISDIRECTED], ids=str)
def test_rule_holds(servers: Callable[[str, str], Held], rule: Rule, column: str) -> None:
    servers(rule.server, column).check(rule, column)
