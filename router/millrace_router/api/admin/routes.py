"""Bodies and answers of the routes that load, unload and list adapters."""

from __future__ import annotations

from functools import partial, wraps
from http import HTTPStatus

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler
from typing_extensions import TypedDict

from millrace_router.access.keys import presents_key
from millrace_router.adapters.names import Registration, check_name, operators_source
from millrace_router.adapters.resolver import Resolver
from millrace_router.api.body.fields import RequestModel, Switch
from millrace_router.api.chat.route import openai_errors
from millrace_router.config import AdapterSpec
from millrace_router.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterNotLoaded,
    AdapterRefused,
    BodyError,
    RouterError,
    UnknownPath,
    ValidationError,
)
from millrace_router.server.bodies import json_response, read_model
from millrace_router.server.operation import READING, Operation
from millrace_router.server.services import SERVICES

log = structlog.get_logger(__name__)


class LoadLoraAdapterRequest(RequestModel):
    """vLLM's body; SGLang's has the same first two fields. An adapter keeps its name until it is unloaded."""

    lora_name: str | None = None
    lora_path: str | None = None
    """A folder, or an id on the hub."""
    load_inplace: Switch = False
    """Whether a name that is loaded already gets new files; running requests keep theirs."""


class UnloadLoraAdapterRequest(RequestModel):
    """vLLM's and SGLang's body."""

    lora_name: str | None = None


class LoadedAdaptersJson(TypedDict):
    """SGLang's answer."""

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, str]
    """The path of each name."""


class AdapterJson(TypedDict):
    """An adapter that the operator named."""

    name: str
    source: str
    """`hub` or `local`."""
    path: str
    revision: str | None
    digest: str | None
    """The version of new requests; null before the first use."""
    versions: list[str]
    """The digests that `name@sha256:…` finds, the newest first."""
    is_default: bool


class AdaptersJson(TypedDict):
    """Answer of `/adapters`."""

    adapters: list[AdapterJson]


CHANGING = (*READING, HTTPStatus.NOT_FOUND)

_vllm = partial(Operation, method="post", is_admin=True, openai=True, answer=bytes)
_sglang = partial(
    Operation,
    method="post",
    is_admin=True,
    openai=True,
    answer=LoadedAdaptersJson,
    failures=CHANGING,
    failure=LoadedAdaptersJson,
)

OPERATIONS = (
    _vllm(
        path="/v1/load_lora_adapter",
        id="load_lora_adapter",
        summary="Let requests name a LoRA adapter, or give a name new files",
        body=LoadLoraAdapterRequest,
        failures=(*CHANGING, HTTPStatus.SERVICE_UNAVAILABLE),
    ),
    _vllm(
        path="/v1/unload_lora_adapter",
        id="unload_lora_adapter",
        summary="Take the name of a LoRA adapter away",
        body=UnloadLoraAdapterRequest,
        failures=CHANGING,
    ),
    _sglang(
        path="/load_lora_adapter",
        id="sglang_load_lora_adapter",
        summary="The same as `/v1/load_lora_adapter`, in SGLang's form",
        body=LoadLoraAdapterRequest,
    ),
    _sglang(
        path="/unload_lora_adapter",
        id="sglang_unload_lora_adapter",
        summary="The same as `/v1/unload_lora_adapter`, in SGLang's form",
        body=UnloadLoraAdapterRequest,
    ),
    Operation(
        method="get",
        is_admin=True,
        path="/adapters",
        id="adapters",
        summary="The LoRA adapters that the operator named, and their versions",
        answer=AdaptersJson,
        failures=(HTTPStatus.NOT_FOUND,),
        openai=True,
    ),
)


def register(app: web.Application) -> None:
    """Add the routes to `app`."""
    app.router.add_post("/v1/load_lora_adapter", for_admins(load))
    app.router.add_post("/v1/unload_lora_adapter", for_admins(unload))
    app.router.add_post("/load_lora_adapter", for_admins(in_sglangs_form(load)))
    app.router.add_post("/unload_lora_adapter", for_admins(in_sglangs_form(unload)))
    app.router.add_get("/adapters", for_admins(adapters))


def for_admins(handler: Handler) -> Handler:
    """Let only requests with the admin key through; without an admin key there is no such route."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        key = request.app[SERVICES].config.admin_key
        if key is None:
            raise UnknownPath(request.path)
        if not presents_key(request.headers, key):
            return web.Response(status=HTTPStatus.UNAUTHORIZED)
        return await handler(request)

    return openai_errors(answer, is_in_tgi=False)


def in_sglangs_form(handler: Handler) -> Handler:
    """Answer with SGLang's object, whose status is 200 or 400."""

    @wraps(handler)
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            await handler(request)
        except BodyError:
            raise
        except RouterError as error:
            return json_response(_loaded(request, str(error)), status=HTTPStatus.BAD_REQUEST)
        return json_response(_loaded(request, None))

    return answer


async def load(request: web.Request) -> web.StreamResponse:
    """`POST /v1/load_lora_adapter`: fetch and check an adapter, and let requests name it."""
    body = await read_model(request, LoadLoraAdapterRequest)
    resolver = _resolver(request)
    name, path = body.lora_name, body.lora_path
    if not name or not path:
        raise AdapterRefused("Both 'lora_name' and 'lora_path' must be provided.")
    former = resolver.registry.get(name)
    if former is not None and not body.load_inplace:
        raise AdapterRefused(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
            " 'load_inplace' to True."
        )
    registration = _registration(request, name, path)
    if former is not None:
        registration.current, registration.older = former.current, former.older
    try:
        version = await resolver.reload(registration)
    except AdapterInvalid as error:
        raise AdapterRefused(str(error)) from error
    except AdapterNotFound as error:
        raise AdapterNotLoaded(str(error)) from error
    resolver.registry.add(registration)
    log.info("adapter loaded", adapter=name, digest=version.digest)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload(request: web.Request) -> web.StreamResponse:
    """`POST /v1/unload_lora_adapter`: take a name away; running requests keep their version."""
    name = (await read_model(request, UnloadLoraAdapterRequest)).lora_name
    resolver = _resolver(request)
    if not name:
        raise AdapterRefused("'lora_name' needs to be provided to unload a LoRA adapter.")
    if not resolver.registry.remove(name):
        raise AdapterNotLoaded(f"The lora adapter '{name}' cannot be found.")
    log.info("adapter unloaded", adapter=name)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


async def adapters(request: web.Request) -> web.StreamResponse:
    """`GET /adapters`: the adapters that the operator named, and their versions."""
    resolver = request.app[SERVICES].adapters
    registered = () if resolver is None else resolver.registry
    default = None if resolver is None or resolver.default is None else resolver.default.name
    answer: AdaptersJson = {"adapters": [_json(one, default) for one in registered]}
    return json_response(answer)


def _loaded(request: web.Request, message: str | None) -> LoadedAdaptersJson:
    resolver = request.app[SERVICES].adapters
    registered = () if resolver is None else resolver.registry
    return {
        "success": message is None,
        "error_message": message,
        "loaded_adapters": {one.name: one.source.location for one in registered},
    }


def _resolver(request: web.Request) -> Resolver:
    resolver = request.app[SERVICES].adapters
    if resolver is None:
        raise AdapterRefused("The server takes no LoRA adapters: start it with --enable-lora.")
    return resolver


def _registration(request: web.Request, name: str, path: str) -> Registration:
    """Check what an operator gave; raises AdapterRefused."""
    if request.app[SERVICES].config.names_the_model(name):
        raise AdapterRefused(f"'{name}' is the name of the base model.")
    try:
        check_name(name)
        source = operators_source(AdapterSpec(name=name, path=path))
    except (ValidationError, ValueError) as error:
        raise AdapterRefused(str(error)) from error
    return Registration(name, source)


def _json(registration: Registration, default: str | None) -> AdapterJson:
    current, source = registration.current, registration.source
    versions = registration.older if current is None else (current, *registration.older)
    return {
        "name": registration.name,
        "source": source.kind,
        "path": source.location,
        "revision": source.revision,
        "digest": None if current is None else current.digest,
        "versions": [version.digest for version in versions],
        "is_default": registration.name == default,
    }
