"""Invalid requests, and the statuses that are right for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

NATIVE = ("/generate", "/generate_stream", "/")
OPENAI = ("/v1/chat/completions", "/v1/completions")
JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest:
    """A body with its headers, posted to one of `paths`, and the statuses that are right for it."""

    name: str
    content: bytes
    statuses: frozenset[int]
    paths: tuple[str, ...] = NATIVE
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)


def _native(name: str, inputs: object = "x", **parameters: object) -> RawRequest:
    content = orjson.dumps({"inputs": inputs, "parameters": parameters})
    return RawRequest(name=name, content=content, statuses=frozenset({422}))


def _raw(name: str, content: bytes, *statuses: int, paths: tuple[str, ...] = NATIVE) -> RawRequest:
    return RawRequest(name=name, content=content, statuses=frozenset(statuses), paths=paths)


MALFORMED = (
    _raw("cut off", b"{", 400),
    _raw("empty body", b"", 400),
    _raw("not JSON", b'{"inputs": NaN}', 400),
    _raw("bad UTF-8", b'{"inputs": "\xff\xfe"}', 400),
    _raw("10 000 deep", b"[" * 10_000 + b"]" * 10_000, 400),
    _raw("an array", b"[]", 422),
    _raw("null", b"null", 422),
    _raw("nothing", b"{}", 422),
    _native("number for a prompt", inputs=5),
    _native("empty prompt", inputs=""),
    _native("negative temperature", temperature=-1),
    _native("temperature as text", temperature="0.5"),
    _native("top_p of 2", top_p=2.0),
    _native("no tokens", max_new_tokens=0),
    _native("negative seed", seed=-1),
    RawRequest(
        name="not said to be JSON",
        content=b"x=1",
        statuses=frozenset({415}),
        headers={"content-type": "text/plain"},
    ),
    RawRequest(
        name="said to be compressed",
        content=b"\x1f\x8b garbage",
        statuses=frozenset({400, 415}),
        headers={**JSON, "content-encoding": "gzip"},
    ),
    _raw("cut off, OpenAI", b'{"messages": [', 400, paths=OPENAI),
    _raw("wrong shape, OpenAI", b'{"prompt": 5, "messages": 5}', 422, paths=OPENAI),
    _raw("no choices", b'{"prompt": "x", "n": 0}', 422, paths=OPENAI[1:]),
    _raw("a bias of no token", b'{"prompt": "x", "logit_bias": {"x": 1}}', 422, paths=OPENAI[1:]),
    _native("a grammar of no kind", grammar={"type": "poem", "value": "x"}),
    _native("an expression that does not end", grammar={"type": "regex", "value": "(a"}),
    _raw("no messages", b'{"messages": []}', 422, paths=OPENAI[:1]),
)

OVERSIZED = (
    _raw("prompt of 1 MB", b'{"inputs": "' + b"word " * 200_000 + b'"}', 422),
    _raw("body of 3 MB", b'{"inputs": "' + b"x" * 3_000_000 + b'"}', 413),
    _native("a billion tokens", max_new_tokens=10**9),
    _native("more top tokens than allowed", top_n_tokens=1000),
    _native("more stop strings than allowed", stop=[f"stop {i}" for i in range(1000)]),
    _native("more samples than allowed", best_of=1000, do_sample=True),
    _raw("100 prompts", orjson.dumps({"prompt": ["x"] * 100}), 422, paths=OPENAI[1:]),
    _raw("body of 3 MB, OpenAI", b'{"prompt": "' + b"x" * 3_000_000 + b'"}', 413, paths=OPENAI),
    RawRequest(
        name="header of 128 kB",
        content=b'{"inputs": "x"}',
        statuses=frozenset({400, 431}),
        headers={**JSON, "x-long": "x" * 131_072},
    ),
)

GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a greeting in TLS",
    b"GET /\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"\x00" * 4096,
)
"""Raw bytes that are not HTTP, or an incomplete request."""
UNFINISHED = (
    b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * 60_000,
    b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1999999\r\n\r\n"
    + b" " * 1_900_000,
)
"""Requests whose rest does not come."""
