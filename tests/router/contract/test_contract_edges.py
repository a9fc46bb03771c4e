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
            "Bearer secret2",
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


EIGHT = " ".join(["a"] * 8)
NINE = " ".join(["a"] * 9)
NO_PROPERTIES = {"type": "array", "items": {"type": "integer"}}
PREFIX = "Input validation error: "


def asked(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters, of which `inputs` is none."""
    rest = {name: value for name, value in parameters.items() if name != "inputs"}
    return {"inputs": parameters.get("inputs", "hello"), "parameters": rest}


def refusal(message: str) -> Reply:
    """The answer to a request that validation refuses."""
    return Reply(status=422, body={"error": PREFIX + message, "error_type": "validation"})


# By the numbers of section 4: what breaks each, and nothing before it.
BROKEN: list[tuple[str, str, dict[str, Any], str]] = [
    ("0", "choosy", {"best_of": 2}, "`best_of` != 1 is not allowed for this endpoint"),
    ("0", "usual", {"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ("1", "usual", {"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ("2", "usual", {"temperature": 0}, "`temperature` must be strictly positive"),
    ("2", "usual", {"temperature": -0.5}, "`temperature` must be strictly positive"),
    ("3", "usual", {"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ("3", "usual", {"repetition_penalty": -0.5}, "`repetition_penalty` must be strictly positive"),
    ("4", "usual", {"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("4", "usual", {"frequency_penalty": -2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("5", "usual", {"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ("5", "usual", {"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ("5", "usual", {"top_p": 0.999999999999}, "`top_p` must be > 0.0 and < 1.0"),
    ("5, ours", "usual", {"min_p": -0.001}, "`min_p` must be >= 0.0 and <= 1.0"),
    ("5, ours", "usual", {"min_p": 1.5}, "`min_p` must be >= 0.0 and <= 1.0"),
    ("6", "usual", {"typical_p": 0}, "`typical_p` must be > 0.0 and < 1.0"),
    ("6", "usual", {"typical_p": 1}, "`typical_p` must be > 0.0 and < 1.0"),
    ("7", "usual", {"top_k": 0}, "`top_k` must be strictly positive"),
    ("7", "usual", {"top_k": -1}, "`top_k` must be strictly positive"),
    ("8", "usual", {"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ("9", "usual", {"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    (
        "10",
        "usual",
        {"seed": 1, "best_of": 2, "do_sample": True},
        "`seed` must not be set when `best_of` > 1",
    ),
    ("11", "usual", {"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ("12", "usual", {"inputs": ""}, "`inputs` cannot be empty"),
    ("12", "usual", {"inputs": "  "}, "`inputs` cannot be empty"),
    (
        "13",
        "usual",
        {"truncate": 0},
        "`truncate` must be strictly positive and less than 8. Given: 0",
    ),
    (
        "13",
        "usual",
        {"truncate": 9},
        "`truncate` must be strictly positive and less than 8. Given: 9",
    ),
    (
        "15",
        "usual",
        {"inputs": EIGHT, "max_new_tokens": 9},
        "`inputs` tokens + `max_new_tokens` must be <= 16. "
        "Given: 8 `inputs` tokens and 9 `max_new_tokens`",
    ),
    (
        "15, before 16",
        "usual",
        {"inputs": NINE, "max_new_tokens": 8},
        "`inputs` tokens + `max_new_tokens` must be <= 16. "
        "Given: 9 `inputs` tokens and 8 `max_new_tokens`",
    ),
    (
        "16",
        "usual",
        {"inputs": NINE, "max_new_tokens": 1},
        "`inputs` must have less than 8 tokens. Given: 9",
    ),
    (
        "17",
        "grammarless",
        {"grammar": {"type": "regex", "value": "a"}},
        "grammar is not supported",
    ),
    ("17", "usual", {"grammar": {"type": "json", "value": 5}}, "grammar is not supported"),
    ("17", "usual", {"grammar": {"type": "json", "value": True}}, "grammar is not supported"),
]

IN_STREAMS: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
    ({"best_of": 0}, "`best_of` != 1 is not supported when streaming tokens"),
    (
        {"decoder_input_details": True, "best_of": 2},
        "`best_of` != 1 is not supported when streaming tokens",
    ),
    (
        {"decoder_input_details": True},
        "`decoder_input_details` == true is not supported when streaming tokens",
    ),
]

ALLOWED: list[tuple[str, dict[str, Any]]] = [
    ("top_p of 0.99", {"top_p": 0.99}),
    ("top_p of null", {"top_p": None}),
    ("typical_p of 0.01", {"typical_p": 0.01}),
    ("frequency_penalty of -2", {"frequency_penalty": -2.0}),
    ("frequency_penalty of 2", {"frequency_penalty": 2.0}),
    ("min_p of 0", {"min_p": 0.0}),
    ("min_p of 1", {"min_p": 1.0}),
    ("the greatest seed", {"seed": 2**64 - 1}),
    ("the most new tokens", {"max_new_tokens": 15}),
    ("top_n_tokens of 5", {"top_n_tokens": 5}),
    ("top_n_tokens of 0", {"top_n_tokens": 0}),
    ("best_of of 1", {"best_of": 1}),
    ("best_of with a temperature", {"best_of": 2, "temperature": 0.5}),
    ("best_of with top_k", {"best_of": 2, "top_k": 1}),
    ("best_of with min_p", {"best_of": 2, "min_p": 0.5}),
    ("four stop sequences", {"stop": list("abcd")}),
    ("the longest prompt", {"inputs": EIGHT, "max_new_tokens": 8}),
    ("a longer prompt that is cut", {"inputs": NINE, "truncate": 8, "max_new_tokens": 8}),
    ("the longest truncate", {"truncate": 8}),
]

RULES = [
    *(
        Rule(
            section=f"4.{number}",
            says=f"{message[:40]} on {path} with {str(broken)[:40]}",
            path=path,
            body=asked(broken),
            server=server,
            default=refusal(message),
            generates={},
        )
        for path in ("/generate", "/")
        for number, server, broken, message in BROKEN
    ),
    *(
        Rule(
            section="4.0",
            says=f"{next(iter(broken))} in a stream",
            path="/generate_stream",
            body=asked(broken),
            default=refusal(message),
            strict=Reply(events=[refusal(message).body]),
            generates={},
        )
        for broken, message in IN_STREAMS
    ),
    *(
        Rule(
            section="9.4",
            says=f"{says} is allowed",
            path="/generate",
            body=asked(parameters),
            default=Reply(),
        )
        for says, parameters in ALLOWED
    ),
    *(
        Rule(
            section="4.18",
            says=f"a schema without properties at its top is as good as any: {path}",
            path=path,
            body=body,
            default=Reply(),
            strict=Reply(
                status=422,
                body={
                    "error": f"{PREFIX}grammar is not valid: Grammar must have a 'properties' field"
                },
            ),
        )
        for path, body in (
            ("/generate", asked({"grammar": {"type": "json", "value": NO_PROPERTIES}})),
            (
                "/v1/chat/completions",
                {
                    "messages": [{"role": "user", "content": "a"}],
                    "response_format": {"type": "json_object", "value": NO_PROPERTIES},
                },
            ),
        )
    ),
    Rule(
        section="4.18",
        says="a schema has to be one",
        path="/generate",
        body=asked({"grammar": {"type": "json", "value": "{"}}),
        default=Reply(
            status=422,
            body={
                "error": lambda error: error.startswith(f"{PREFIX}grammar is not valid: "),
                "error_type": "validation",
            },
        ),
        generates={},
    ),
]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("rule", [*KEYS, *BROWSERS, *UNREADABLE, *MISDIRECTED, *RULES], ids=str)
def test_rule_holds(servers: Callable[[str, str], Held], rule: Rule, column: str) -> None:
    servers(rule.server, column).check(rule, column)
