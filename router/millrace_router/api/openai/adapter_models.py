"""Adapters in the list of models, as vLLM has them there."""

from __future__ import annotations

from pathlib import PurePath

from aiohttp import web

from millrace_router.adapters.names import Registration
from millrace_router.api.adapters.naming import token_of
from millrace_router.api.openai.protocol import ModelJson
from millrace_router.request.adapter import AdapterSource
from millrace_router.server.services import SERVICES, Services


def adapters_json(request: web.Request) -> list[ModelJson]:
    """List the adapters that the client may use: registered ones, and ids that its token for the hub opened.

    The list of models needs no key, but names of adapters may be names of customers: without the key there are none.
    """
    services = request.app[SERVICES]
    resolver = services.adapters
    if resolver is None or not services.keys.admit(request.headers):
        return []
    token = token_of(request, None)
    opened = [] if token is None else resolver.named_by(token)
    return [
        *(_registered(services, one) for one in resolver.registry),
        *(_model(services, name, root=name) for name in opened),
    ]


def adapter_json(request: web.Request, name: str) -> ModelJson | None:
    """Describe one adapter that the client may use; None if it is not one."""
    return next((one for one in adapters_json(request) if one["id"] == name), None)


def _registered(services: Services, registration: Registration) -> ModelJson:
    source = registration.source
    is_folder = source.kind is AdapterSource.LOCAL
    root = PurePath(source.location).name if is_folder else source.location
    return _model(services, registration.name, root=root)


def _model(services: Services, name: str, *, root: str) -> ModelJson:
    served = services.config.served_names[0]
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": served,
        "root": root,
        "parent": served,
    }
