"""A Hugging Face hub of repositories in memory, with tokens, sizes, redirects and failures."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

SECONDS = 60


@dataclass
class Repository:
    """Files of one commit, and the tokens that may read them."""

    files: Mapping[str, bytes]
    tokens: set[str] | None = None
    """None: public."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that the listing tells in place of the true ones."""
    redirects: dict[str, str] = field(default_factory=dict)
    """Where requests of a file are sent."""
    status: int = 200
    """Status of the listing, in place of 200."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of the listing."""
    listing: bytes | None = None
    """The listing itself, in place of the true one."""
    hash_suffix: str = ""

    @classmethod
    def of_folder(cls, folder: Path, tokens: set[str] | None = None) -> Repository:
        """A repository with the files of `folder`."""
        return cls({path.name: path.read_bytes() for path in folder.iterdir()}, tokens)

    @property
    def commit(self) -> str:
        """A hash of the files."""
        text = repr(sorted(self.files.items())).encode()
        return hashlib.sha1(text, usedforsecurity=False).hexdigest()


class HubStub:
    """Answers as the hub does, and remembers what it was asked."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[tuple[str, str | None]] = []
        """(path, token) of every request."""
        self.gate = asyncio.Event()
        """Requests wait for it."""
        self.gate.set()
        self.arrived = asyncio.Event()
        """Set by each request."""
        self.url = ""

    def paths(self) -> list[str]:
        """Last parts of the paths that were asked."""
        return [path.rpartition("/")[2] for path, _ in self.asked]

    async def listing(self, request: web.Request) -> web.StreamResponse:
        """`GET /api/models/{repository}/revision/{revision}`."""
        found = await self._find(request)
        if not isinstance(found, Repository):
            return found
        revision = request.match_info["revision"]
        if revision not in ("main", "v1/x", found.commit):
            return web.Response(status=404, headers={"x-error-code": "RevisionNotFound"})
        if found.status != 200 or found.listing is not None:
            return web.Response(status=found.status, headers=found.headers, body=found.listing)
        siblings = [
            {
                "rfilename": name,
                "size": found.sizes.get(name, len(body)),
                "lfs": _lfs(name, body, found),
            }
            for name, body in found.files.items()
        ]
        return web.json_response({"sha": found.commit, "siblings": siblings})

    async def file(self, request: web.Request) -> web.StreamResponse:
        """`GET /{repository}/resolve/{commit}/{file}`."""
        found = await self._find(request)
        if not isinstance(found, Repository):
            return found
        name = request.match_info["file"]
        assert request.match_info["commit"] == found.commit
        if name in found.redirects:
            return web.Response(status=302, headers={"location": found.redirects[name]})
        return web.Response(body=found.files[name])

    async def _find(self, request: web.Request) -> Repository | web.Response:
        token = request.headers.get("authorization")
        self.asked.append((request.path, token))
        self.arrived.set()
        await self.gate.wait()
        found = self.repositories.get(request.match_info["repository"])
        may_read = found is not None and (
            found.tokens is None or (token or "").removeprefix("Bearer ") in found.tokens
        )
        if found is not None and may_read:
            return found
        # The hub asks strangers for a token whether there is such a repository or not.
        return web.Response(status=401 if token is None or found is not None else 404)


def _lfs(name: str, body: bytes, repository: Repository) -> dict[str, Any] | None:
    if not name.endswith(".safetensors"):
        return None
    return {"sha256": hashlib.sha256(body).hexdigest() + repository.hash_suffix, "size": len(body)}


@asynccontextmanager
async def hub_stub() -> AsyncIterator[HubStub]:
    """Serve a hub."""
    stub = HubStub()
    app = web.Application()
    repository = "{repository:[^/]+(?:/[^/]+)?}"
    app.router.add_get(f"/api/models/{repository}/revision/{{revision:.+}}", stub.listing)
    app.router.add_get(f"/{repository}/resolve/{{commit}}/{{file}}", stub.file)
    async with TestServer(app) as server:
        stub.url = str(server.make_url("")).rstrip("/")
        try:
            yield stub
        finally:
            stub.gate.set()


@contextmanager
def hub_in_thread() -> Iterator[HubStub]:
    """Serve a hub beside a test that is no coroutine."""
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, loop).result(SECONDS)

    try:
        yield run(stack.enter_async_context(hub_stub()))
    finally:
        run(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()
