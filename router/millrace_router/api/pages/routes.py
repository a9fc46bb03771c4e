"""One HTML document from its sources, and the policy that forbids a browser all other scripts."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from http import HTTPStatus
from importlib.resources import files

from aiohttp import ETag, web

from millrace_router.api.tgi.probes import RECENT, StatusJson, health, status_json
from millrace_router.errors import RouterError
from millrace_router.server.bodies import json_response
from millrace_router.server.operation import Operation
from millrace_router.server.services import SERVICES
from millrace_router.telemetry.recent import Recent

_STYLE = re.compile(r'<link rel="stylesheet" href="([a-z/]+\.css)">')
_SCRIPT = re.compile(r'<script src="([a-z/]+\.js)"></script>')
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
PATHS = ("/docs", "/docs/")
"""Paths of the documentation, which needs no API key."""


@dataclass(frozen=True, slots=True)
class Document:
    """A page, ready to send."""

    body: bytes
    policy: str
    """`Content-Security-Policy`, which allows these scripts and styles, and requests to this server."""

    @property
    def digest(self) -> str:
        return sha256(self.body).hexdigest()[:32]


def load(name: str, root_path: str = "") -> Document:
    """Read `<name>/<name>.html` from this folder, and put its styles and scripts into it.

    `root_path`, where a proxy has the server, is passed to the scripts: a page cannot derive it from an address such as
    `/llm` that lacks the last slash.
    """
    source = _read(f"{name}/{name}.html")
    if root_path:
        source = source.replace("<html ", f'<html data-root="{root_path}/" ', 1)
    styles = [_read(file) for file in _STYLE.findall(source)]
    scripts = [_read(file) for file in _SCRIPT.findall(source)]
    hashes = {"style-src": _hashes(styles), "script-src": _hashes(scripts)}
    source = _STYLE.sub(lambda match: f"<style>{_read(match[1])}</style>", source)
    source = _SCRIPT.sub(lambda match: f"<script>{_read(match[1])}</script>", source)
    allowed = "; ".join(f"{directive} {values}" for directive, values in hashes.items())
    return Document(source.encode(), f"{_POLICY}; {allowed}")


def _read(name: str) -> str:
    return files(__package__ or "").joinpath(name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    digests = (b64encode(sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


STATUS_OPERATION = Operation(
    method="get",
    is_open=True,
    path="/status",
    id="status",
    summary="How busy the server is, in a few figures; a page for browsers",
    answer=StatusJson,
)
ROOT_OPERATION = Operation(
    method="get",
    is_open=True,
    path="/",
    id="root",
    summary="Whether the server can do its work",
    failures=(HTTPStatus.SERVICE_UNAVAILABLE,),
)
OPERATIONS = tuple(
    Operation(
        method="get",
        path=path,
        is_open=True,
        id=id_,
        summary="This document, for people with a browser",
        answer=bytes,
        text_type="text/html",
    )
    for path, id_ in zip(PATHS, ("docs", "docs_alias"), strict=True)
)


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    app[RECENT] = Recent(app[SERVICES].metrics)
    app.router.add_get("/", root)
    app.router.add_get("/status", status)
    for path in PATHS:
        app.router.add_get(path, docs)


async def root(request: web.Request) -> web.StreamResponse:
    """`GET /`: the answer of `GET /health`, and for a browser the chat page with the same status."""
    if not prefers_html(request.headers.get("accept", "")):
        answer = await health(request)
        answer.headers["vary"] = "accept"
        return answer
    status = 200
    try:
        await health(request)
    except RouterError as error:
        status = error.status
    return _answer(request, page("chat", _root(request)), status=status, vary="accept")


async def status(request: web.Request) -> web.StreamResponse:
    """`GET /status`: figures as JSON, and for a browser a page that shows them."""
    if prefers_html(request.headers.get("accept", "")):
        return _answer(request, page("status", _root(request)), vary="accept")
    answer = json_response(await status_json(request))
    answer.headers.update({"vary": "accept", "cache-control": "no-store"})
    return answer


async def docs(request: web.Request) -> web.StreamResponse:
    """`GET /docs`: `/openapi.json` as a page."""
    return _answer(request, page("docs", _root(request)))


@cache
def page(name: str, root_path: str) -> Document:
    return load(name, root_path)


def _root(request: web.Request) -> str:
    return request.app[SERVICES].config.root_path


def prefers_html(accept: str) -> bool:
    """Whether `text/html` is the first of the best media ranges; `*/*`, which probes send, does not count."""
    ranges = [_range(part) for part in accept.split(",")]
    best = max((quality for _, quality in ranges), default=0.0)
    first = next((media_type for media_type, quality in ranges if quality == best), None)
    return best > 0 and first == "text/html"


def _range(part: str) -> tuple[str, float]:
    """Parse a media range; its quality is 0 if it is malformed."""
    media_type, *parameters = (word.strip().lower() for word in part.split(";"))
    quality = 1.0
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                quality = min(max(float(value), 0.0), 1.0)
            except ValueError:
                quality = 0.0
    return media_type, quality


def _answer(
    request: web.Request, document: Document, *, status: int = 200, vary: str | None = None
) -> web.Response:
    tag = ETag(document.digest)
    known_tags = request.if_none_match or ()
    if status == 200 and any(one.value in {tag.value, "*"} for one in known_tags):
        answer = web.Response(status=304)
    else:
        answer = web.Response(
            body=document.body, status=status, content_type="text/html", charset="utf-8"
        )
    answer.headers["content-security-policy"] = document.policy
    answer.headers["x-content-type-options"] = "nosniff"
    answer.headers["referrer-policy"] = "no-referrer"
    # Browsers ask each time, and get a 304 if the page has not changed.
    answer.headers["cache-control"] = "no-cache" if status == 200 else "no-store"
    answer.etag = tag
    if vary is not None:
        answer.headers["vary"] = vary
    return answer
