"""The header that names what a request asked for and the server left out, and its line in the log."""

from __future__ import annotations

import re
from collections.abc import Iterable

import structlog
from aiohttp import web

IGNORED_HEADER = "x-millrace-ignored"
MAX_NAMES = 20
"""Names in one header; the number of further ones follows them."""
MAX_NAME_CHARS = 64
IDENTIFIERS = re.compile(r"[A-Za-z_]\w{0,39}(\.[A-Za-z_]\w{0,39})*", re.ASCII)
NO_IDENTIFIER = "a name that is no identifier"
MAX_LOGGED = 1000
"""Names that are logged, each once: clients make up names."""

_IGNORED: web.RequestKey[dict[str, None]] = web.RequestKey("ignored", dict)
_LOGGED: web.AppKey[set[str]] = web.AppKey("logged_ignored", set)

log = structlog.get_logger(__name__)


def prepare_app(app: web.Application) -> None:
    """Send the header with the answers of `app`."""
    app[_LOGGED] = set()
    app.on_response_prepare.append(_add_header)


def note_ignored(request: web.Request, names: Iterable[str]) -> None:
    """Name parts of a request that have no effect, such as `messages.foo`, in its answer, and once each in the log.

    The log has identifiers alone: anything else may be a client's text.
    """
    noted = request.setdefault(_IGNORED, {})
    logged = request.app[_LOGGED]
    for name in map(_printable, names):
        noted[name] = None
        shown = name if IDENTIFIERS.fullmatch(name) else NO_IDENTIFIER
        if shown not in logged and len(logged) < MAX_LOGGED:
            logged.add(shown)
            log.warning("request field ignored", field=shown, path=request.path)


def ignored_header(request: web.Request) -> dict[str, str]:
    """Return the header, or nothing."""
    names = list(request.get(_IGNORED, ()))
    if not names:
        return {}
    more = len(names) - MAX_NAMES
    shown = names[:MAX_NAMES] + ([f"+{more}"] if more > 0 else [])
    return {IGNORED_HEADER: ", ".join(shown)}


async def _add_header(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(ignored_header(request))


def _printable(name: str) -> str:
    """Return a name that may stand in a header: clients choose it."""
    kept = name[:MAX_NAME_CHARS]
    return "".join(
        char if char.isascii() and char.isprintable() and char != "," else "?" for char in kept
    )
