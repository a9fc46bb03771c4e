"""Fetches adapters into the cache, two at a time, each in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import structlog

from millrace_router.adapters.back_off import BackOff
from millrace_router.adapters.cache import AdapterCache
from millrace_router.adapters.child import COMMAND, ChildError, run_child
from millrace_router.adapters.fetch_request import DEFAULT_ENDPOINT, FetchLimits, FetchSource
from millrace_router.adapters.names.recent import Recent
from millrace_router.errors import (
    AdapterForbidden,
    AdapterInvalid,
    AdapterNotFound,
    AdapterTooLarge,
    AdapterUnavailable,
    RouterError,
)
from millrace_router.request.adapter import (
    RANKS_PER_SLICE,
    AdapterModule,
    AdapterSource,
    AdapterVersion,
    MergeRecipe,
)

Answer = dict[str, Any]

MAX_AT_ONCE = 2
MAX_OF_CLIENTS = 256
"""Fetches of sources that clients named, and merges, running or waiting."""
MAX_PER_CALLER = 8
MAX_KNOWN = 4096
BUSY_SECONDS = 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    """The last result for the files of a source: a version, or why they cannot be used."""

    source_digest: str
    outcome: AdapterVersion | str


class Fetcher:
    """Asks the fetching process, and turns its answers into versions and errors of requests."""

    def __init__(
        self,
        cache: AdapterCache,
        *,
        needed: Callable[[], Collection[str]],
        endpoint: str = DEFAULT_ENDPOINT,
        clock: Callable[[], float] = time.monotonic,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Fetch into `cache`; `needed` tells the digests that are registered or in use, and never leave it."""
        self._cache = cache
        self._needed = needed
        self._endpoint = endpoint.rstrip("/")
        self._command = command
        self._permits = asyncio.Semaphore(MAX_AT_ONCE)
        self._running: set[asyncio.Task[Any] | None] = set()
        self._callers: Counter[str] = Counter()
        self._back_off = BackOff(clock)
        self._known: Recent[Hashable, _Known] = Recent(MAX_KNOWN, clock=clock)

    async def fetch(
        self, source: FetchSource, *, modules: Sequence[AdapterModule], limits: FetchLimits
    ) -> AdapterVersion:
        """Fetch, check and keep the adapter as it is at its source now; the hub checks the token each time.

        Raises:
            AdapterNotFound, AdapterForbidden, AdapterInvalid, AdapterTooLarge, AdapterUnavailable.

        """
        shapes = tuple((module.name, module.inputs, module.outputs) for module in modules)
        key = source.place, shapes, limits
        known = self._known.get(key)
        if known and isinstance(known.outcome, AdapterVersion):
            known = known if self._cache.touch(known.outcome.digest) else None
        request = self._request("fetch", limits) | {
            "source": self._source(source),
            "modules": shapes,
            "known": known.source_digest if known else None,
        }
        try:
            answer = await self._ask(request, source, limits)
        except AdapterInvalid as error:
            if error.source_digest is not None:
                self._known.put(key, _Known(error.source_digest, error.reason))
            raise
        if not answer.get("is_known"):
            if note := answer["note"]:
                log.warning("an adapter is used with a note", adapter=source.name, note=note)
            version = await self._keep(answer, source.name)
            self._known.put(key, _Known(answer["source_digest"], version))
            return version
        assert known is not None
        if isinstance(known.outcome, str):
            raise AdapterInvalid(source.name, known.outcome)
        return replace(known.outcome, name=source.name)

    async def commit_of(self, source: FetchSource, *, limits: FetchLimits) -> str:
        """Ask the hub for the commit of the source's revision, and so check access to it; raises as `fetch`."""
        request = self._request("commit", limits) | {"source": self._source(source)}
        answer = await self._ask(request, source, limits)
        return str(answer["commit"])

    async def merge(
        self,
        recipe: MergeRecipe,
        versions: Sequence[AdapterVersion],
        *,
        limits: FetchLimits,
        name: str,
    ) -> AdapterVersion:
        """Merge `versions`, which are in the cache and in the recipe's order, into a version of its own.

        Raises:
            AdapterInvalid: they cannot be merged so.
            AdapterTooLarge, AdapterUnavailable.

        """
        digests = [version.digest for version in versions]
        request = self._request("merge", limits) | {
            "digests": digests,
            "weights": recipe.weights,
            "strategy": recipe.strategy,
            "density": recipe.density,
            "majority_sign_method": recipe.majority_sign_method,
        }
        place = " ".join([*digests, repr(replace(recipe, ids=()))])
        source = FetchSource(kind=AdapterSource.LOCAL, id=place, name=name)
        return await self._keep(await self._ask(request, source, limits), name)

    async def close(self) -> None:
        """End all fetches, and their processes."""
        tasks = [task for task in self._running if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _source(self, source: FetchSource) -> Answer:
        return {
            "kind": source.kind,
            "id": source.id,
            "revision": source.revision,
            "root": None if source.root is None else str(source.root.absolute()),
            "token": source.token if source.kind is AdapterSource.HUB else None,
            "endpoint": self._endpoint,
        }

    def _request(self, job: str, limits: FetchLimits) -> Answer:
        return {
            "job": job,
            "cache": str(self._cache.folder.absolute()),
            "limits": {
                "max_rank": limits.max_rank,
                "max_bytes": limits.max_bytes,
                "timeout_seconds": limits.timeout_seconds,
            },
        }

    async def _ask(self, request: Answer, source: FetchSource, limits: FetchLimits) -> Answer:
        """Run the process when its turn has come; raises what it answers."""
        name, key = source.name, source.place
        if rest := self._back_off.rest(key):
            raise AdapterUnavailable(name, rest[0], retry_after_seconds=rest[1])
        try:
            with self._place_in_line(source):
                async with self._permits:
                    answer = await run_child(
                        request, timeout_seconds=limits.timeout_seconds, command=self._command
                    )
        except ChildError as error:
            await asyncio.to_thread(self._cache.delete_partials, error.pid)
            answer = {"error": "unavailable", "reason": str(error)}
        if answer.get("error") == "unavailable":
            reason, after = answer["reason"], answer.get("retry_after_seconds")
            log.warning("an adapter cannot be fetched", adapter=name, reason=reason)
            seconds = self._back_off.fail(key, reason, after)
            raise AdapterUnavailable(name, reason, retry_after_seconds=seconds)
        self._back_off.succeed(key)
        if "error" in answer:
            raise _refusal(answer, name)
        return answer

    @contextmanager
    def _place_in_line(self, source: FetchSource) -> Iterator[None]:
        """Count a fetch, running or waiting; raises AdapterUnavailable when clients ask for too many."""
        callers = self._callers if not source.by_operator else Counter[str]()
        is_greedy = source.caller != "" and callers[source.caller] >= MAX_PER_CALLER
        if is_greedy or callers.total() >= MAX_OF_CLIENTS:
            reason = "too many adapters are being fetched"
            raise AdapterUnavailable(source.name, reason, retry_after_seconds=BUSY_SECONDS)
        task = asyncio.current_task()
        self._running.add(task)
        callers[source.caller] += 1
        try:
            yield
        finally:
            self._running.discard(task)
            callers[source.caller] -= 1
            if not callers[source.caller]:
                del callers[source.caller]

    async def _keep(self, answer: Answer, name: str) -> AdapterVersion:
        """Enter a version into the cache, and make room for it."""
        digest, num_bytes = answer["digest"], answer["num_bytes"]
        needed = {*self._needed(), digest}
        self._cache.use(digest, num_bytes)
        victims = self._cache.evict(needed)
        has_room = self._cache.size_of(needed) <= self._cache.max_bytes
        if not has_room and digest not in self._needed():
            self._cache.forget(digest)
            victims.append(digest)
        await asyncio.to_thread(self._cache.delete, victims)
        if num_bytes > self._cache.max_bytes:
            raise AdapterTooLarge(name, num_bytes=num_bytes, limit=self._cache.max_bytes)
        if digest in victims:
            reason = "the adapter cache is full of adapters in use"
            raise AdapterUnavailable(name, reason, retry_after_seconds=BUSY_SECONDS)
        return AdapterVersion(
            digest=digest,
            name=name,
            num_slices=tuple(
                (module, -(-rank // RANKS_PER_SLICE) + has_bias)
                for module, rank, has_bias in answer["modules"]
            ),
            num_bytes=num_bytes,
        )


def _refusal(answer: Answer, name: str) -> RouterError:
    match answer["error"]:
        case "not_found":
            return AdapterNotFound(name)
        case "forbidden":
            return AdapterForbidden(name)
        case "too_large":
            return AdapterTooLarge(name, num_bytes=answer["num_bytes"], limit=answer["limit"])
    assert answer["error"] == "invalid"
    return AdapterInvalid(name, answer["reason"], source_digest=answer.get("source_digest"))
