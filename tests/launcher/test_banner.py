"""The banner's commands run when they are pasted."""

from __future__ import annotations

import ast
import json
import re
import shlex
from urllib.parse import urlsplit

import pytest

from millrace_launcher.banner import closing_banner, url

# Of the router's.
ROUTES = {
    "/",
    "/docs",
    "/generate",
    "/generate_stream",
    "/health",
    "/info",
    "/metrics",
    "/v1/models",
}


@pytest.mark.parametrize(
    ("hostname", "expected"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("10.0.0.7", "http://10.0.0.7:80"),
    ],
)
def test_url(hostname: str, expected: str) -> None:
    assert url(hostname, 80) == expected


def test_url_of_https() -> None:
    assert url("::", 80, scheme="https") == "https://[::1]:80"


@pytest.mark.parametrize("needs_key", [False, True])
def test_curl_and_python_parse(needs_key: bool) -> None:
    text = closing_banner("http://127.0.0.1:3917", model="a/b", needs_key=needs_key)
    lines = [line.strip() for line in text.splitlines()]
    words = shlex.split(next(line for line in lines if line.startswith("curl")))
    assert words[1] == "http://127.0.0.1:3917/generate"
    assert json.loads(words[words.index("-d") + 1])["parameters"] == {"max_new_tokens": 60}
    headers = [words[i + 1] for i, word in enumerate(words) if word == "-H"]
    assert headers[0] == "Content-Type: application/json"
    assert headers[1:] == (["Authorization: Bearer $API_KEY"] if needs_key else [])
    start = next(i for i, line in enumerate(lines) if line.startswith("from "))
    tree = ast.parse("\n".join(lines[start:]))
    assert len(tree.body) == 2
    for page in ("docs", "metrics"):
        assert f"http://127.0.0.1:3917/{page}" in text


def test_every_url_is_one_the_router_answers() -> None:
    text = closing_banner("http://127.0.0.1:3917", model="a/b", needs_key=False)
    paths = [urlsplit(found).path or "/" for found in re.findall(r"http://[^\s\",]+", text)]
    assert len(paths) >= 4
    assert set(paths) <= ROUTES
