"""Asks the fetcher once for all requests that want the same, and remembers what it refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

from millrace_router.adapters.names.access import holder_of
from millrace_router.adapters.names.fetching_protocol import Fetching
from millrace_router.adapters.names.recent import Recent
from millrace_router.adapters.names.shared_work import SharedWork
from millrace_router.adapters.names.sources import NamedSource, Stamp
from millrace_router.errors import AdapterUnavailable, RouterError
from millrace_router.request.adapter import AdapterVersion, MergeRecipe
from millrace_router.telemetry.metrics import Metrics

MAX_SHAPES = 1024
MAX_FAILURES = 1024
FAILURE_SECONDS = 30.0
"""A refused fetch is not tried again for so long, unless the files change."""


class FetchOnce:
    """Fetches, merges and asks for commits; counts fetches."""

    def __init__(
        self, fetcher: Fetching, metrics: Metrics, failures: Recent[Hashable, RouterError]
    ) -> None:
        self._fetcher = fetcher
        self._metrics = metrics
        self._failures = failures
        self._versions: SharedWork[Hashable, AdapterVersion] = SharedWork()
        self._commits: SharedWork[Hashable, str] = SharedWork()
        self._shapes: Recent[Hashable, tuple[tuple[str, int], ...]] = Recent(MAX_SHAPES)

    async def fetch(
        self,
        source: NamedSource,
        name: str,
        *,
        caller: str = "",
        token: str | None = None,
        stamp: Stamp | None = None,
    ) -> AdapterVersion:
        """Fetch; requests with another token, or after a change of the files, need their own. Raises RouterError."""
        key = _key(source, name, token, stamp)
        fetch = partial(self._fetcher.fetch, source, name=name, token=token, caller=caller)
        return await self._version(key, fetch)

    async def commit_of(
        self, source: NamedSource, name: str, *, caller: str, token: str | None
    ) -> str:
        """Ask the hub which commit a revision is at; raises RouterError."""
        key = _key(source, name, token, None)
        self._check(key)
        ask = partial(self._fetcher.commit_of, source, name=name, token=token, caller=caller)
        try:
            return await self._commits.run(key, ask)
        except RouterError as error:
            self._remember(key, error)
            raise

    async def merge(
        self, key: Hashable, recipe: MergeRecipe, versions: Sequence[AdapterVersion]
    ) -> AdapterVersion:
        """Merge; `key` names recipe and versions. Raises RouterError."""
        return await self._version(key, partial(self._fetcher.merge, recipe, versions))

    def forget(self, source: NamedSource, name: str, stamp: Stamp | None) -> None:
        """Forget a refusal of the operator's adapter."""
        self._failures.drop(_key(source, name, None, stamp))

    async def _version(
        self, key: Hashable, fetch: Callable[[], Awaitable[AdapterVersion]]
    ) -> AdapterVersion:
        self._check(key)
        return await self._versions.run(key, partial(self._counted, key, fetch))

    async def _counted(
        self, key: Hashable, fetch: Callable[[], Awaitable[AdapterVersion]]
    ) -> AdapterVersion:
        try:
            version = await fetch()
        except RouterError as error:
            outcome = "failed" if isinstance(error, AdapterUnavailable) else "refused"
            self._metrics.adapter_fetches.labels(outcome=outcome).inc()
            self._remember(key, error)
            raise
        self._metrics.adapter_fetches.labels(outcome="fetched").inc()
        self._metrics.adapter_fetched_bytes.inc(version.num_bytes)
        return self._lean(version)

    def _check(self, key: Hashable) -> None:
        """Raise the refusal that is remembered, if there is one."""
        failure = self._failures.get(key)
        if failure is not None:
            raise _copy(failure)

    def _remember(self, key: Hashable, error: RouterError) -> None:
        """Remember a refusal; the fetcher itself remembers outages."""
        if not isinstance(error, AdapterUnavailable):
            self._failures.put(key, _copy(error))

    def _lean(self, version: AdapterVersion) -> AdapterVersion:
        """Let versions of the same shape share its description, which is the largest part of them."""
        shape = self._shapes.get(version.num_slices)
        if shape is None:
            self._shapes.put(version.num_slices, version.num_slices)
            return version
        return replace(version, num_slices=shape)


def _key(source: NamedSource, name: str, token: str | None, stamp: Stamp | None) -> Hashable:
    return source, name, holder_of(token), stamp


def _copy(error: RouterError) -> RouterError:
    """Return the same error without its traceback, whose frames would be kept with it."""
    kind = type(error)
    copied = kind.__new__(kind, *error.args)
    copied.__dict__.update(error.__dict__)
    return copied
