"""The pages for browsers: which requests get one, and that a page runs only its own scripts."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import orjson
import pytest

from millrace_router.api import pages
from millrace_router.api.pages.routes import PATHS, load, prefers_html
from millrace_testing.router.edge import serving

BROWSERS = {
    "chromium": "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,"
    "image/apng,*/*;q=0.8,application/signed-exchange;v=b3;q=0.7",
    "firefox": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
    "safari": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
    "explicit": "Text/HTML ; q=0.5",
}
OTHERS = {
    "curl": "*/*",
    "axios": "application/json, text/plain, */*",
    "json": "application/json",
    "json-first": "application/json, text/html",
    "json-rather": "text/html;q=0.5, application/json",
    "any-text": "text/*",
    "not-html": "text/html;q=0",
    "no-quality": "text/html;q=much",
    "nothing": "",
    "nonsense": ",;q=,;",
}
PAGE = {"accept": BROWSERS["chromium"]}
NAMES = ("chat", "docs", "status")
ADDRESSES = ("/", "/status", *PATHS)


class Parts(HTMLParser):
    """Inline scripts and styles of a document, its identifiers, and every address that it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self.attributes: list[tuple[str, str]] = []
        self._open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag in self.inline:
            self._open = tag
            self.inline[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.inline[self._open][-1] += data


@pytest.mark.parametrize("accept", BROWSERS.values(), ids=BROWSERS.keys())
async def test_a_browser_gets_the_chat_page(accept: str) -> None:
    async with serving() as edge:
        status, body, answer = await edge.get("/", headers={"accept": accept})
    assert (status, answer.content_type, answer.charset) == (200, "text/html", "utf-8")
    assert body == load("chat").body
    assert "accept" in [value.strip() for value in answer.headers["vary"].split(",")]


@pytest.mark.parametrize("accept", OTHERS.values(), ids=OTHERS.keys())
async def test_clients_other_than_browsers_get_the_empty_answer_of_a_probe(accept: str) -> None:
    async with serving() as edge:
        status, body, answer = await edge.get("/", headers={"accept": accept})
    assert (status, body) == (200, b"")
    assert "accept" in [value.strip() for value in answer.headers["vary"].split(",")]
    assert "content-security-policy" not in answer.headers


def test_no_accept_header_is_no_wish_for_a_page() -> None:
    assert not prefers_html("")


async def test_head_answers_as_get_would() -> None:
    async with serving() as edge:
        for headers in (PAGE, {"accept": "*/*"}):
            _, _, got = await edge.get("/", headers=headers)
            async with edge.client.head(edge.url + "/", headers=headers) as head:
                assert await head.read() == b""
                assert head.status == 200
                names = ("content-type", "etag", "vary", "content-security-policy")
                assert [head.headers.get(name) for name in names] == [
                    got.headers.get(name) for name in names
                ]


async def test_the_page_keeps_the_status_of_ill_health_and_is_shown_all_the_same() -> None:
    async with serving() as edge:
        edge.batcher.status.give_up("the shards are lost")
        _, _, plain = await edge.get("/")
        status, body, answer = await edge.get("/", headers=PAGE)
    assert (plain.status, status) == (503, 503)
    assert body == load("chat").body
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", PATHS)
async def test_the_documentation_needs_no_key(path: str) -> None:
    async with serving(api_key="secret") as edge:
        status, body, answer = await edge.get(path)
    assert (status, answer.content_type) == (200, "text/html")
    assert body == load("docs").body


async def test_the_chat_page_asks_for_no_key_and_the_chat_does() -> None:
    async with serving(api_key="secret", template="hello") as edge:
        assert (await edge.get("/", headers=PAGE))[0] == 200
        assert (await edge.post("/v1/chat/completions", {"messages": []}))[0] == 401


@pytest.mark.parametrize("path", ADDRESSES)
async def test_a_page_that_is_known_is_not_sent_again(path: str) -> None:
    async with serving() as edge:
        _, body, first = await edge.get(path, headers=PAGE)
        etag = first.headers["etag"]
        assert first.headers["cache-control"] == "no-cache"
        status, again, second = await edge.get(path, headers=PAGE | {"if-none-match": etag})
        assert (status, again, second.headers["etag"]) == (304, b"", etag)
        status, again, _ = await edge.get(path, headers=PAGE | {"if-none-match": '"other"'})
        assert (status, again) == (200, body)


@pytest.mark.parametrize("path", ADDRESSES)
async def test_the_policy_allows_the_page_itself_and_nothing_else(path: str) -> None:
    async with serving() as edge:
        _, body, answer = await edge.get(path, headers=PAGE)
    policy = dict(
        directive.split(" ", 1)
        for directive in answer.headers["content-security-policy"].split("; ")
    )
    inline = Parts(body.decode()).inline
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        digests = [b64encode(sha256(text.encode()).digest()).decode() for text in inline[tag]]
        assert digests
        assert policy.pop(directive).split() == [f"'sha256-{digest}'" for digest in digests]
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_one_document_that_names_no_other_server(name: str) -> None:
    text = load(name).body.decode()
    parts = Parts(text)
    assert not [value for attribute, value in parts.attributes if attribute in {"src", "style"}]
    assert not [attribute for attribute, _ in parts.attributes if attribute.startswith("on")]
    links = [value for attribute, value in parts.attributes if attribute == "href"]
    assert links
    assert not [link for link in links if "//" in link.partition("data:")[0]]
    everything = "".join(parts.inline["script"] + parts.inline["style"])
    assert not re.search(r"""["'(](https?:)?//\w""", everything)
    assert not re.search(r"@import|url\(", everything)


def test_no_script_makes_markup_of_text() -> None:
    for source in _own_scripts():
        text = source.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function"
            r"|createContextualFragment|srcdoc|javascript:",
            text,
        ), source.name


def test_every_source_is_part_of_a_page() -> None:
    pages_text = "".join(load(name).body.decode() for name in NAMES)
    for source in [*_sources("js"), *_sources("css")]:
        assert source.read_text() in pages_text, source.name


def test_identifiers_are_unique_and_labels_lead_to_fields() -> None:
    for name in NAMES:
        attributes = Parts(load(name).body.decode()).attributes
        ids = [value for attribute, value in attributes if attribute == "id"]
        assert len(ids) == len(set(ids))
        named = [
            value
            for attribute, value in attributes
            if attribute in {"for", "aria-controls", "aria-describedby"}
        ]
        assert named or name == "status", name
        assert set(named) <= set(ids)


def test_scripts_are_short() -> None:
    for source in _own_scripts():
        assert len(source.read_text().splitlines()) <= 300, source.name


def _own_scripts() -> list[Path]:
    """All but the highlighter, whose ways to write markup the policy of the pages forbids."""
    return [source for source in _sources("js") if source.name != "prism.js"]


def _sources(suffix: str) -> list[Path]:
    found = sorted(Path(str(files(pages))).rglob(f"*.{suffix}"))
    assert found
    return found


@pytest.mark.parametrize(
    ("path", "name"), [("/", "chat"), ("/docs", "docs"), ("/status", "status")]
)
async def test_a_page_gets_the_path_at_which_a_proxy_has_the_server(path: str, name: str) -> None:
    async with serving(root_path="/a/llm/") as edge:
        _, body, answer = await edge.get(path, headers=PAGE)
        assert orjson.loads((await edge.get("/openapi.json"))[1])["servers"] == [{"url": "/a/llm"}]
    assert body.replace(b' data-root="/a/llm/"', b"") == load(name).body != body
    assert answer.headers["content-security-policy"] == load(name).policy
    async with serving() as edge:
        assert "servers" not in orjson.loads((await edge.get("/openapi.json"))[1])


@pytest.mark.parametrize("name", NAMES)
def test_every_link_of_a_page_starts_from_the_root(name: str) -> None:
    text = load(name).body.decode()
    links = re.findall(r"<a [^>]*>", text)
    assert links
    assert all("data-path=" in link for link in links)
