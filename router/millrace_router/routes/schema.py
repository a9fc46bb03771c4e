"""The description of all routes."""

from __future__ import annotations

from aiohttp import web

from millrace_router.openapi import openapi_json


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    for path in ("/api-doc/openapi.json", "/openapi.json"):
        app.router.add_get(path, schema)


async def schema(_: web.Request) -> web.Response:
    """`GET /openapi.json`."""
    return web.Response(body=openapi_json(), content_type="application/json")
