"""Resolves the name in a request to a version in the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from millrace_router.adapters.names.access import Access, holder_of
from millrace_router.adapters.names.fetch_once import FAILURE_SECONDS, MAX_FAILURES, FetchOnce
from millrace_router.adapters.names.fetching_protocol import Fetching
from millrace_router.adapters.names.recent import Recent
from millrace_router.adapters.names.registry import Registration, Registry
from millrace_router.adapters.names.sources import (
    NamedSource,
    Stamp,
    check_name,
    hub_source,
    is_allowed,
    local_source,
    split_digest,
    stamp_of,
)
from millrace_router.errors import (
    AdapterForbidden,
    AdapterNotFound,
    AdapterRemoved,
    AdapterUnavailable,
    RouterError,
)
from millrace_router.request.adapter import AdapterReference, AdapterSource, AdapterVersion
from millrace_router.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

MAX_CLIENT_ADAPTERS = 4096
"""Adapters that clients named, whose versions are remembered."""
MAX_MERGED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRules:
    """The unregistered adapters that clients may name."""

    source: AdapterSource = AdapterSource.HUB
    """Where an id is looked up if the request does not say it."""
    root: Path | None = None
    patterns: tuple[str, ...] = ()


class Resolver:
    """Resolves names; each version is fetched once, however many requests wait for it."""

    def __init__(
        self,
        registry: Registry,
        fetcher: Fetching,
        metrics: Metrics,
        *,
        rules: ClientRules,
        default: AdapterReference | None = None,
        access: Access | None = None,
        failures: Recent[Hashable, RouterError] | None = None,
    ) -> None:
        """`default` is the adapter of requests that name nothing."""
        self.registry = registry
        self.default = default
        self._fetcher = fetcher
        self._rules = rules
        self._access = Access() if access is None else access
        if failures is None:
            failures = Recent(MAX_FAILURES, seconds=FAILURE_SECONDS)
        self._once = FetchOnce(fetcher, metrics, failures)
        self._clients: Recent[Hashable, AdapterVersion] = Recent(MAX_CLIENT_ADAPTERS)
        self._merged: Recent[Hashable, AdapterVersion] = Recent(MAX_MERGED)

    async def resolve(self, reference: AdapterReference, caller: str) -> AdapterVersion:
        """Return the version that a request gets; raises RouterError."""
        if reference.merged is not None:
            return await self._merge(reference, caller)
        return await self._resolve(reference, caller)

    async def _resolve(self, reference: AdapterReference, caller: str) -> AdapterVersion:
        """Return the version of one name."""
        name, digest = split_digest(check_name(reference.name))
        registration = self._registered(name, reference.source)
        if registration is None:
            version = await self._of_client(name, reference, caller)
            if digest not in {None, version.digest}:
                raise AdapterNotFound(reference.name)
            return version
        version = await self.current(registration)
        if digest is None or digest == version.digest:
            return version
        older = registration.version(digest)
        if older is None or not self._fetcher.is_cached(digest):
            raise AdapterNotFound(reference.name)
        return older

    def is_adapter(self, name: str) -> bool:
        """Return whether `name` is one of an adapter, was one, or may become one by a client's request."""
        bare, _ = split_digest(name)
        if self.registry.get(bare) is not None or self.registry.was(bare):
            return True
        source = self._clients_source(bare, None)
        if source is None:
            return False
        # Any word may be the name of a folder.
        return source.kind is AdapterSource.HUB or source.folder.is_dir()

    def named_by(self, token: str | None) -> list[str]:
        """Return the ids that nobody registered and that the holder of `token` may use now."""
        return [
            repository if revision is None else f"{repository}@{revision}"
            for repository, revision in self._access.allowed(holder_of(token))
        ]

    async def current(self, registration: Registration) -> AdapterVersion:
        """Return the version of a registered name, which is fetched when its folder has changed; raises RouterError.

        If the hub is down at the first use, it is the version that was last fetched.
        """
        stamp = await self._stamp(registration.source)
        version = registration.current
        # A folder that is gone is no new version.
        is_same = stamp is None or stamp == registration.stamp
        if version is not None and is_same and self._fetcher.is_cached(version.digest):
            return version
        try:
            version = await self._once.fetch(registration.source, registration.name, stamp=stamp)
        except AdapterUnavailable as error:
            version = await self._fetcher.last_version(registration.source, name=registration.name)
            if version is None:
                raise
            log.warning(
                "an adapter is used as it was last fetched",
                adapter=registration.name,
                digest=version.digest,
                reason=error.reason,
            )
        registration.update(version, stamp)
        return version

    async def reload(self, registration: Registration) -> AdapterVersion:
        """Fetch a registered name anew, whatever is known of it; raises RouterError."""
        stamp = await self._stamp(registration.source)
        self._once.forget(registration.source, registration.name, stamp)
        version = await self._once.fetch(registration.source, registration.name, stamp=stamp)
        registration.update(version, stamp)
        return version

    async def _stamp(self, source: NamedSource) -> Stamp | None:
        """Return the stamp of a folder; None on the hub, and for a folder without the files of an adapter."""
        if source.kind is AdapterSource.HUB:
            return None
        return await asyncio.to_thread(stamp_of, source.folder)

    def _registered(self, name: str, source: AdapterSource | None) -> Registration | None:
        """Return the registration that a request means; raises AdapterRemoved."""
        registration = self.registry.get(name)
        if registration is None:
            if self.registry.was(name):
                raise AdapterRemoved(name)
            return None
        return registration if source in {None, registration.source.kind} else None

    def _clients_source(self, name: str, kind: AdapterSource | None) -> NamedSource | None:
        """Return the source of a name that nobody registered, if clients may name it."""
        rules = self._rules
        if (kind or rules.source) is AdapterSource.LOCAL:
            return None if rules.root is None else local_source(name, rules.root)
        source = hub_source(name)
        return source if source is not None and is_allowed(source, rules.patterns) else None

    async def _of_client(
        self, name: str, reference: AdapterReference, caller: str
    ) -> AdapterVersion:
        source = self._clients_source(name, reference.source)
        if source is None:
            raise AdapterNotFound(name)
        if source.kind is AdapterSource.LOCAL:
            if not await asyncio.to_thread(source.folder.is_dir):
                raise AdapterNotFound(name)
            return await self._from_folder(source, name, caller)
        return await self._from_hub(source, name, reference.token, caller)

    async def _from_hub(
        self, source: NamedSource, name: str, token: str | None, caller: str
    ) -> AdapterVersion:
        """Return the version of an id on the hub; the hub is asked again after a minute, for each token by itself."""
        place = (holder_of(token), source.location, source.revision)
        commit = self._access.commit(*place)
        if commit is None:
            try:
                commit = await self._once.commit_of(source, name, caller=caller, token=token)
            except AdapterForbidden:
                if token is None:
                    # The name of a private repository is not confirmed.
                    raise AdapterNotFound(name) from None
                raise
            self._access.allow(*place, commit)
        version = self._clients.get((source.location, commit))
        if version is None or not self._fetcher.is_cached(version.digest):
            pinned = replace(source, revision=commit)
            version = await self._once.fetch(pinned, name, caller=caller, token=token)
            self._clients.put((source.location, commit), version)
        return version

    async def _from_folder(self, source: NamedSource, name: str, caller: str) -> AdapterVersion:
        """Return the version of a folder that a client named, as its files are now."""
        stamp = await self._stamp(source)
        version = self._clients.get((source, stamp))
        if stamp is None or version is None or not self._fetcher.is_cached(version.digest):
            version = await self._once.fetch(source, name, caller=caller, stamp=stamp)
            self._clients.put((source, stamp), version)
        return version

    def digests(self) -> set[str]:
        """Return the versions of registered names, whose copies are kept."""
        return {one.current.digest for one in self.registry if one.current is not None}

    async def _merge(self, reference: AdapterReference, caller: str) -> AdapterVersion:
        recipe = reference.merged
        assert recipe is not None
        versions = [
            await self._resolve(replace(reference, name=name, merged=None), caller)
            for name in recipe.ids
        ]
        digests = tuple(version.digest for version in versions)
        key = (digests, replace(recipe, ids=()))
        merged = self._merged.get(key)
        if merged is None or not self._fetcher.is_cached(merged.digest):
            merged = await self._once.merge(key, recipe, versions)
            self._merged.put(key, merged)
        return merged
