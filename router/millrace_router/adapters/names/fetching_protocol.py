"""The calls to the fetching process that names need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millrace_router.adapters.names.sources import NamedSource
from millrace_router.request.adapter import AdapterVersion, MergeRecipe


class Fetching(Protocol):
    """Makes checked copies of adapters in the cache."""

    async def fetch(
        self, source: NamedSource, *, name: str, token: str | None, caller: str
    ) -> AdapterVersion:
        """Fetch and check the adapter at `source`; on the hub `token` alone counts, if a client named the source.

        `caller` is the client that asks, whose fetches are limited.

        Raises:
            AdapterNotFound, AdapterForbidden, AdapterInvalid, AdapterTooLarge, AdapterUnavailable.

        """

    async def commit_of(
        self, source: NamedSource, *, name: str, token: str | None, caller: str
    ) -> str:
        """Ask the hub which commit a revision is at, and so whether `token` may read it; raises as `fetch`."""

    async def last_version(self, source: NamedSource, *, name: str) -> AdapterVersion | None:
        """Return the version of the operator's source on the hub at its last fetch, also by an earlier process.

        None if it is not known, or its copy has left the cache. Raises AdapterTooLarge.
        """

    async def merge(
        self, recipe: MergeRecipe, versions: Sequence[AdapterVersion]
    ) -> AdapterVersion:
        """Merge the versions of `recipe.ids`; raises as `fetch`."""

    def is_cached(self, digest: str) -> bool:
        """Return whether the copy of a version is in the cache."""
