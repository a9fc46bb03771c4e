"""Opens the adapter cache at the start, registers the adapters of the flags, and fetches those that are to be there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog

from millrace_router.adapters.cache import AdapterCache
from millrace_router.adapters.fetcher import Fetcher, FetchLimits
from millrace_router.adapters.names import (
    Registration,
    Registry,
    check_name,
    local_source,
    operators_source,
)
from millrace_router.adapters.resolver import ClientRules, Resolver
from millrace_router.config import AdapterSpec, RouterConfig
from millrace_router.errors import RouterError, ValidationError
from millrace_router.request.adapter import AdapterReference, AdapterSource
from millrace_router.start.shards import RouterDeployment, StartupError
from millrace_router.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class OpenAdapters:
    """The names of a server with adapters, and what fetches them."""

    resolver: Resolver
    fetcher: Fetcher
    in_use: Callable[[], Collection[str]] = frozenset
    """Returns the digests of running requests, whose copies stay in the cache."""


async def open_adapters(deployment: RouterDeployment, metrics: Metrics) -> OpenAdapters | None:
    """Open what the flags name; None if the shards take no adapters.

    Raises:
        StartupError: a flag is wrong, or an adapter that is to be there cannot be used.

    """
    config, registry = deployment.config, Registry()
    _register(config, registry)
    modules = deployment.info.adapter_modules
    if not modules:
        if len(registry) or config.adapter_root is not None or config.adapter_allow:
            raise StartupError("the shards take no LoRA adapters: start them with --enable-lora")
        return None
    cache = AdapterCache(
        config.adapter_cache_folder, max_bytes=config.adapter_cache_size, clock=time.monotonic
    )
    try:
        await asyncio.to_thread(cache.open)
    except OSError as error:
        raise StartupError(f"cannot use --adapter-cache: {error}") from error
    fetcher = Fetcher(
        cache,
        modules=modules,
        num_pages=deployment.capacity.adapter_pages,
        limits=FetchLimits(max_rank=config.max_lora_rank),
        server_token=lambda: config.hub_token,
        needed=lambda: {*resolver.digests(), *opened.in_use()},
        endpoint=config.hub_endpoint,
    )
    resolver = Resolver(
        registry,
        fetcher,
        metrics,
        rules=ClientRules(
            source=AdapterSource(config.adapter_source),
            root=config.adapter_root,
            patterns=config.adapter_allow,
        ),
        default=AdapterReference(name=config.adapter_id) if config.adapter_id else None,
    )
    opened = OpenAdapters(resolver=resolver, fetcher=fetcher)
    await _preload(config, opened)
    return opened


def _register(config: RouterConfig, registry: Registry) -> None:
    """Register the adapters of all flags; raises StartupError."""
    for spec in config.registered_adapters:
        if registry.get(spec.name) is not None:
            raise StartupError(f"two LoRA adapters have the name {spec.name}")
        _add(config, registry, spec)
    for name in _preloaded(config):
        if registry.get(name) is None:
            _add(config, registry, AdapterSpec(name=name, path=name))


def _add(config: RouterConfig, registry: Registry, spec: AdapterSpec) -> None:
    if config.names_the_model(spec.name):
        raise StartupError(f"the LoRA adapter {spec.name} has the name of the model")
    source = None
    if config.adapter_source == "local" and config.adapter_root is not None:
        source = local_source(spec.path, config.adapter_root)
    try:
        check_name(spec.name)
        source = source or operators_source(spec)
    except (ValidationError, ValueError) as error:
        raise StartupError(f"the LoRA adapter {spec.name!r} cannot be used: {error}") from error
    registry.add(Registration(spec.name, source))


def _preloaded(config: RouterConfig) -> list[str]:
    """Return the names of adapters to fetch at the start, each once."""
    default = [config.adapter_id] if config.adapter_id else []
    return list(dict.fromkeys([*default, *config.preloaded_adapter_ids]))


async def _preload(config: RouterConfig, opened: OpenAdapters) -> None:
    resolver = opened.resolver
    for name in _preloaded(config):
        registration = resolver.registry.get(name)
        assert registration is not None
        log.info("Fetching an adapter", adapter=name)
        try:
            await resolver.current(registration)
        except RouterError as error:
            await opened.fetcher.close()
            raise StartupError(str(error)) from error
