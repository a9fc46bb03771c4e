"""A server of the scripted model, and a proxy before a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
from aiohttp import web
from bench.harness.server import RunningServer, free_port, serving
from tests.ecosystem import prepare
from tests.ecosystem.agents import coding
from tests.ecosystem.agents.scripts import SCRIPTS

from millrace_testing.models.scripted import write_scripted_model

REQUESTS = "requests.jsonl"
PATIENT = aiohttp.ClientTimeout(total=None)
FLAGS = ["--dtype=float32", "--responses-store=16"]


@contextmanager
def scripted_server(folder: Path) -> Iterator[RunningServer]:
    """Serve the scripted model, whose files and logs are in `folder`, for the length of the block.

    The conversation `name` has the folder `name` below it.
    """
    tokenizer = prepare.ROOT / "demo" / "model" / "tokenizer.json"
    scripts = SCRIPTS | coding.scripts(folder)
    write_scripted_model(folder / "model", scripts, tokenizer=tokenizer, end="<|end|>")
    with serving(
        folder / "model",
        log=folder / "launcher.log",
        flags=[*FLAGS, f"--log-requests={folder / REQUESTS}"],
    ) as running:
        yield running


@asynccontextmanager
async def proxy(url: str, changed: Callable[[web.Request, bytes], bytes]) -> AsyncIterator[str]:
    """Serve what `url` serves, which gets the bodies that `changed` makes of the clients'; yields the URL to ask."""

    async def forward(request: web.Request) -> web.StreamResponse:
        body = changed(request, await request.read())
        dropped = {"host", "content-length"}
        headers = {
            key: value for key, value in request.headers.items() if key.lower() not in dropped
        }
        async with (
            aiohttp.ClientSession(auto_decompress=False, timeout=PATIENT) as session,
            session.request(
                request.method, url + request.path_qs, data=body, headers=headers
            ) as answer,
        ):
            response = web.StreamResponse(status=answer.status)
            response.headers.update(
                {k: v for k, v in answer.headers.items() if k.lower() != "transfer-encoding"}
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response

    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{path:.*}", forward)
    runner, port = web.AppRunner(app, access_log=None), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
