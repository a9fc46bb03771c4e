"""Resolves the name in a request to a version in the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog

from millrace_router.adapters.fetcher import Fetcher
from millrace_router.adapters.memory import Grants, Recent, SingleFlight, holder_of, new_grants
from millrace_router.adapters.names import (
    NamedSource,
    Registration,
    Registry,
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
from millrace_router.request.adapter import (
    AdapterReference,
    AdapterSource,
    AdapterVersion,
)
from millrace_router.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

MAX_CLIENT_ADAPTERS = 4096
"""Adapters that clients named, whose versions are remembered."""
MAX_MERGED = 1024
MAX_SHAPES = 1024
MAX_REFUSALS = 1024
REFUSAL_SECONDS = 30.0
"""Time before a refused fetch is tried again, unless the files change sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRules:
    """The unregistered adapters that clients may name."""

    source: AdapterSource = AdapterSource.HUB
    """Where an id is looked up if the request does not name a source."""
    root: Path | None = None
    patterns: tuple[str, ...] = ()


class Resolver:
    """Resolves names; each version is fetched once, however many requests wait for it."""

    def __init__(
        self,
        registry: Registry,
        fetcher: Fetcher,
        metrics: Metrics,
        *,
        rules: ClientRules,
        default: AdapterReference | None = None,
        grants: Grants | None = None,
        refusals: Recent[Hashable, RouterError] | None = None,
    ) -> None:
        """`default` is the adapter of requests that name nothing."""
        self.registry = registry
        self.default = default
        self._fetcher = fetcher
        self._rules = rules
        self._grants = new_grants() if grants is None else grants
        self._metrics = metrics
        if refusals is None:
            refusals = Recent(MAX_REFUSALS, seconds=REFUSAL_SECONDS)
        self._refusals = refusals
        self._fetches: SingleFlight[AdapterVersion] = SingleFlight(refusals)
        self._commits: SingleFlight[str] = SingleFlight(refusals)
        self._shapes: Recent[Hashable, tuple[tuple[str, int], ...]] = Recent(MAX_SHAPES)
        self._clients: Recent[Hashable, AdapterVersion] = Recent(MAX_CLIENT_ADAPTERS)
        self._merged: Recent[Hashable, AdapterVersion] = Recent(MAX_MERGED)

    async def resolve(self, reference: AdapterReference, caller: str) -> AdapterVersion:
        """Return the version that `caller` gets for `reference`; its canonical file is on disk. Raises as `Fetcher`."""
        if reference.merged is not None:
            return await self._merge(reference, caller)
        return await self._resolve(reference, caller)

    async def _resolve(self, reference: AdapterReference, caller: str) -> AdapterVersion:
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
        """Return the ids that are not registered and that the holder of `token` may use now."""
        holder = holder_of(token)
        return [
            repository if revision is None else f"{repository}@{revision}"
            for who, repository, revision in self._grants.kept()
            if who == holder
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
            version = await self._fetch(registration.source, registration.name, stamp=stamp)
        except AdapterUnavailable as error:
            version = await self._fetcher.last_version(registration.source, name=registration.name)
            if version is None:
                raise
            log.warning(
                "hub unreachable: serving the cached version",
                adapter=registration.name,
                digest=version.digest,
                reason=error.reason,
            )
        registration.update(version, stamp)
        return version

    async def reload(self, registration: Registration) -> AdapterVersion:
        """Fetch a registered name anew, whatever is known of it; raises RouterError."""
        stamp = await self._stamp(registration.source)
        self._refusals.drop(_key(registration.source, registration.name, None, stamp))
        version = await self._fetch(registration.source, registration.name, stamp=stamp)
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
        """Return the source of a name that is not registered, if clients may name it."""
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
        """Return the version of an id on the hub; its access is checked again after a minute, for each token."""
        grant = (holder_of(token), source.location, source.revision)
        commit = self._grants.get(grant)
        if commit is None:
            try:
                commit = await self._commit_of(source, name, caller=caller, token=token)
            except AdapterForbidden:
                if token is None:
                    # The name of a private repository is not confirmed.
                    raise AdapterNotFound(name) from None
                raise
            self._grants.put(grant, commit)
        version = self._clients.get((source.location, commit))
        if version is None or not self._fetcher.is_cached(version.digest):
            pinned = replace(source, revision=commit)
            version = await self._fetch(pinned, name, caller=caller, token=token)
            self._clients.put((source.location, commit), version)
        return version

    async def _from_folder(self, source: NamedSource, name: str, caller: str) -> AdapterVersion:
        """Return the version of a folder that a client named, as its files are now."""
        stamp = await self._stamp(source)
        version = self._clients.get((source, stamp))
        if stamp is None or version is None or not self._fetcher.is_cached(version.digest):
            version = await self._fetch(source, name, caller=caller, stamp=stamp)
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
            merge = partial(self._fetcher.merge, recipe, versions)
            merged = await self._fetches.run(key, partial(self._counted, merge))
            self._merged.put(key, merged)
        return merged

    async def _fetch(
        self,
        source: NamedSource,
        name: str,
        *,
        caller: str = "",
        token: str | None = None,
        stamp: Stamp | None = None,
    ) -> AdapterVersion:
        """Fetch once; requests with another token, or after a change of the files, need their own."""
        fetch = partial(self._fetcher.fetch, source, name=name, token=token, caller=caller)
        return await self._fetches.run(
            _key(source, name, token, stamp), partial(self._counted, fetch)
        )

    async def _commit_of(
        self, source: NamedSource, name: str, *, caller: str, token: str | None
    ) -> str:
        """Ask the hub which commit a revision is at; raises RouterError."""
        ask = partial(self._fetcher.commit_of, source, name=name, token=token, caller=caller)
        return await self._commits.run(_key(source, name, token, None), ask)

    async def _counted(self, fetch: Callable[[], Awaitable[AdapterVersion]]) -> AdapterVersion:
        try:
            version = await fetch()
        except RouterError as error:
            outcome = "failed" if isinstance(error, AdapterUnavailable) else "refused"
            self._metrics.adapter_fetches.labels(outcome=outcome).inc()
            raise
        self._metrics.adapter_fetches.labels(outcome="fetched").inc()
        self._metrics.adapter_fetched_bytes.inc(version.num_bytes)
        return self._lean(version)

    def _lean(self, version: AdapterVersion) -> AdapterVersion:
        """Let versions of the same shape share its description, which is the largest part of them."""
        shape = self._shapes.get(version.num_slices)
        if shape is None:
            self._shapes.put(version.num_slices, version.num_slices)
            return version
        return replace(version, num_slices=shape)


def _key(source: NamedSource, name: str, token: str | None, stamp: Stamp | None) -> Hashable:
    return source, name, holder_of(token), stamp
