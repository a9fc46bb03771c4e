"""Fetches adapters for the served model: its layers, the operator's limits, and whose token counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from millrace_router.adapters.cache import AdapterCache
from millrace_router.adapters.fetch_request import FetchLimits, FetchSource
from millrace_router.adapters.fetcher import Fetcher
from millrace_router.adapters.names.last_versions import LastVersions
from millrace_router.adapters.names.sources import NamedSource
from millrace_router.errors import AdapterTooLarge
from millrace_router.request.adapter import (
    PAGE_BYTES,
    AdapterModule,
    AdapterSource,
    AdapterVersion,
    MergeRecipe,
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFetcher:
    """Checks adapters against the layers of the model, and against the memory of the shards."""

    fetcher: Fetcher
    cache: AdapterCache
    last_versions: LastVersions
    modules: Sequence[AdapterModule]
    limits: FetchLimits
    num_pages: int
    """Memory for adapters on each rank, in pages."""
    server_token: Callable[[], str | None]
    """Returns the server's own token for the hub, which counts for the operator's adapters alone."""

    async def fetch(
        self, source: NamedSource, *, name: str, token: str | None, caller: str
    ) -> AdapterVersion:
        """Fetch and check; raises RouterError."""
        given = self._source(source, name=name, token=token, caller=caller)
        version = await self.fetcher.fetch(given, modules=self.modules, limits=self.limits)
        if source.by_operator and source.kind is AdapterSource.HUB:
            try:
                await asyncio.to_thread(self.last_versions.keep, given.place, version)
            except OSError as error:
                log.warning(
                    "the version of an adapter is not kept", adapter=name, reason=str(error)
                )
        return self._that_fits(version)

    async def last_version(self, source: NamedSource, *, name: str) -> AdapterVersion | None:
        """Return the version of the operator's source at its last fetch; raises AdapterTooLarge."""
        place = self._source(source, name=name, token=None, caller="").place
        version = await asyncio.to_thread(self.last_versions.get, place, name)
        if version is None or not self.is_cached(version.digest):
            return None
        return self._that_fits(version)

    async def commit_of(
        self, source: NamedSource, *, name: str, token: str | None, caller: str
    ) -> str:
        """Ask the hub; raises RouterError."""
        given = self._source(source, name=name, token=token, caller=caller)
        return await self.fetcher.commit_of(given, limits=self.limits)

    async def merge(
        self, recipe: MergeRecipe, versions: Sequence[AdapterVersion]
    ) -> AdapterVersion:
        """Merge; raises RouterError."""
        name = ",".join(recipe.ids)
        merged = await self.fetcher.merge(recipe, versions, limits=self.limits, name=name)
        return self._that_fits(merged)

    def is_cached(self, digest: str) -> bool:
        """Return whether the copy of a version is in the cache."""
        return self.cache.touch(digest)

    def _source(
        self, source: NamedSource, *, name: str, token: str | None, caller: str
    ) -> FetchSource:
        return FetchSource(
            kind=source.kind,
            id=source.location,
            name=name,
            revision=source.revision,
            root=source.root,
            token=self.server_token() if source.by_operator else token,
            caller=caller,
            by_operator=source.by_operator,
        )

    def _that_fits(self, version: AdapterVersion) -> AdapterVersion:
        """Return `version`, unless it is larger than all memory for adapters; raises AdapterTooLarge."""
        pages = version.num_pages({one.name: one.bytes_per_slice for one in self.modules})
        if pages > self.num_pages:
            raise AdapterTooLarge(
                version.name, num_bytes=pages * PAGE_BYTES, limit=self.num_pages * PAGE_BYTES
            )
        return version
