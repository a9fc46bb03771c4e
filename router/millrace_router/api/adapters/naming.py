"""Which adapter a request means, by LoRAX's fields or by the name of a model."""

from __future__ import annotations

from aiohttp import web

from millrace_router.adapters.names import check_name
from millrace_router.api.adapters.merged import MergedAdapters
from millrace_router.errors import AdapterNotFound, AdapterRemoved, UnknownModel, ValidationError
from millrace_router.request.adapter import (
    ADAPTER_TOKEN_HEADER,
    AdapterReference,
    AdapterSource,
)
from millrace_router.server.services import SERVICES, Services

OWN_NAME = "tgi"
"""The model name of clients that have no preference."""
NO_NAMES = frozenset({None, "", OWN_NAME})
MAX_TOKEN_LENGTH = 1024
NOT_HERE = frozenset({"s3", "pbase"})
"""Sources of LoRAX that are not supported."""


def adapter_of_fields(
    request: web.Request,
    *,
    adapter_id: str | None,
    merged: MergedAdapters | None = None,
    lora_path: str | None = None,
    source: str | None = None,
    token: str | None = None,
) -> AdapterReference | None:
    """Return the adapter of a request of the native routes; None for the base model. Raises RouterError."""
    services = request.app[SERVICES]
    given, presented = source_of(source), token_of(request, token)
    if merged is not None:
        if adapter_id:
            raise ValidationError("at most one of `adapter_id` or `adapters` may be provided")
        return AdapterReference(merged=merged.recipe(), source=given, token=presented)
    if services.config.names_the_model(adapter_id):
        return None
    if adapter_id:
        return AdapterReference(name=check_name(adapter_id), source=given, token=presented)
    if lora_path:
        return _by_name(services, lora_path)
    return _default(services)


def adapter_of_model(
    request: web.Request,
    model: str | None,
    *,
    lora_path: str | None = None,
    source: str | None = None,
    token: str | None = None,
) -> AdapterReference | None:
    """Return the adapter that the name of a model means, or else SGLang's `lora_path`; None for the base model.

    Raises:
        UnknownModel: nothing has this name, and the server refuses such names.
        ValidationError: another field is wrong.

    """
    services = request.app[SERVICES]
    config = services.config
    given, presented = source_of(source), token_of(request, token)
    name = model or ""
    # LoRAX's form, base:adapter; a name of the model may have colons too.
    base = next((one for one in config.all_names if name.startswith(f"{one}:")), None)
    if base is not None and not config.names_the_model(name):
        name = check_name(name.removeprefix(f"{base}:"))
        return AdapterReference(name=name, source=given, token=presented)
    if name not in NO_NAMES and not config.names_the_model(name):
        resolver = services.adapters
        if given is not None or (resolver is not None and resolver.is_adapter(name)):
            return AdapterReference(name=check_name(name), source=given, token=presented)
        if refuses_unknown_models(services):
            raise UnknownModel(name)
    if lora_path:
        return _by_name(services, lora_path)
    return _default(services) if name in NO_NAMES else None


def refuses_unknown_models(services: Services) -> bool:
    """Return whether a model that is not served is an error: with adapters it may be a mistyped adapter."""
    word = services.config.unknown_model
    if word is not None:
        return word == "refuse"
    return services.adapters is not None and not services.dialect.ignores_adapters


def source_of(word: str | None) -> AdapterSource | None:
    """Read LoRAX's `adapter_source`; raises ValidationError."""
    if word is None:
        return None
    if word in NOT_HERE:
        raise ValidationError(
            f"`adapter_source` {word} is not supported: adapters come from `hub` or `local`"
        )
    if word not in set(AdapterSource):
        raise ValidationError("`adapter_source` must be `hub` or `local`")
    return AdapterSource(word)


def token_of(request: web.Request, token: str | None) -> str | None:
    """Return the client's own token for the hub, from the body or its header; raises ValidationError."""
    presented = token or request.headers.get(ADAPTER_TOKEN_HEADER) or None
    if presented is None:
        return None
    if len(presented) > MAX_TOKEN_LENGTH or not (presented.isascii() and presented.isprintable()):
        raise ValidationError("the token for adapters is not a token")
    return presented


def _by_name(services: Services, name: str) -> AdapterReference:
    """Return the registered adapter of this name; a path is none. Raises AdapterNotFound."""
    resolver = services.adapters
    if resolver is None or resolver.registry.get(check_name(name)) is None:
        if resolver is not None and resolver.registry.was(name):
            raise AdapterRemoved(name)
        raise AdapterNotFound(name)
    return AdapterReference(name=name)


def _default(services: Services) -> AdapterReference | None:
    return None if services.adapters is None else services.adapters.default
