"""Fetches adapters into the cache, two at a time, each in a process of its own."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import orjson
import structlog

from millrace_router.adapters.cache import AdapterCache
from millrace_router.adapters.child import COMMAND, ChildError, run_child
from millrace_router.adapters.failures import Failures, Refusal
from millrace_router.adapters.fetch_request import DEFAULT_ENDPOINT, FetchLimits, FetchSource
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

T = TypeVar("T")
Answer = dict[str, Any]

MAX_AT_ONCE = 2
MAX_WAITING = 64
MAX_PER_CALLER = 8
MAX_RECIPES = 1024
BUSY_SECONDS = 1.0

log = structlog.get_logger(__name__)


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
        self._failures = Failures(clock)
        self._permits = asyncio.Semaphore(MAX_AT_ONCE)
        self._callers: Counter[str] = Counter()
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._merged: OrderedDict[str, AdapterVersion] = OrderedDict()

    async def fetch(
        self, source: FetchSource, *, modules: Sequence[AdapterModule], limits: FetchLimits
    ) -> AdapterVersion:
        """Fetch, check and keep the adapter as it is at its source now.

        Raises:
            AdapterNotFound, AdapterForbidden, AdapterInvalid, AdapterTooLarge, AdapterUnavailable.

        """
        shapes = [(module.name, module.inputs, module.outputs) for module in modules]
        key = _key(source)
        refused = self._failures.refusal(key)
        request = _request("fetch", self._source_json(source), limits) | {
            "cache": str(self._cache.folder.absolute()),
            "modules": shapes,
            "refused": refused.source_digest if refused else None,
        }

        async def fetch() -> AdapterVersion:
            answer = await self._ask(request, source, limits, key)
            if answer.get("error") == "refused_before" and refused:
                raise AdapterInvalid(source.name, refused.reason)
            if note := answer.get("note"):
                log.warning("an adapter is used with a note", adapter=source.name, note=note)
            return await self._keep(answer, source.name)

        version = await self._once(_digest(request), fetch)
        return replace(version, name=source.name)

    async def commit_of(self, source: FetchSource, *, limits: FetchLimits) -> str:
        """Ask the hub for the commit of the source's revision, and so check access to it; raises as `fetch`."""
        request = _request("commit", self._source_json(source), limits)

        async def ask() -> str:
            answer = await self._ask(request, source, limits, _key(source))
            return str(answer["commit"])

        return await self._once(_digest(request), ask)

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
        source = FetchSource(kind=AdapterSource.LOCAL, id="", name=name)
        request = _request("merge", {}, limits) | {
            "cache": str(self._cache.folder.absolute()),
            "digests": [version.digest for version in versions],
            "weights": list(recipe.weights),
            "strategy": recipe.strategy,
            "density": recipe.density,
            "majority_sign_method": recipe.majority_sign_method,
        }
        key = _digest(request)
        if (known := self._merged.get(key)) and known.digest in self._cache:
            self._cache.use(known.digest, known.num_bytes)
            return replace(known, name=name)

        async def merge() -> AdapterVersion:
            answer = await self._ask(request, source, limits, key)
            return await self._keep(answer, name)

        version = await self._once(key, merge)
        self._merged[key] = version
        if len(self._merged) > MAX_RECIPES:
            self._merged.popitem(last=False)
        return replace(version, name=name)

    async def close(self) -> None:
        """End all fetches, and their processes."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _source_json(self, source: FetchSource) -> Answer:
        return {
            "kind": source.kind,
            "id": source.id,
            "revision": source.revision,
            "root": None if source.root is None else str(source.root.absolute()),
            "token": source.token,
            "endpoint": self._endpoint,
        }

    async def _once(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Share one run among callers that ask for the same at the same time; it goes on when they leave."""
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(start())
            self._running[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(task)

    def _ended(self, key: str, task: asyncio.Task[Any]) -> None:
        del self._running[key]
        if not task.cancelled():
            # The callers that stayed have the error too.
            task.exception()

    async def _ask(
        self, request: Answer, source: FetchSource, limits: FetchLimits, key: str
    ) -> Answer:
        """Run the process when its turn has come; raises what it answers."""
        if waiting := self._failures.waiting(key):
            raise AdapterUnavailable(source.name, waiting[0], retry_after_seconds=waiting[1])
        caller, total = source.caller, self._callers.total()
        if self._callers[caller] >= MAX_PER_CALLER or total >= MAX_WAITING + MAX_AT_ONCE:
            raise AdapterUnavailable(
                source.name, "too many adapters are fetched", retry_after_seconds=BUSY_SECONDS
            )
        self._callers[caller] += 1
        try:
            async with self._permits:
                answer = await run_child(
                    request, timeout_seconds=limits.timeout_seconds, command=self._command
                )
        except ChildError as error:
            answer = {"error": "unavailable", "reason": str(error)}
        finally:
            self._callers[caller] -= 1
            self._callers += Counter()
        if answer.get("error") in (None, "refused_before"):
            return answer
        raise self._error(answer, source.name, key)

    def _error(self, answer: Answer, name: str, key: str) -> RouterError:
        match answer["error"]:
            case "not_found":
                return AdapterNotFound(name)
            case "forbidden":
                return AdapterForbidden(name)
            case "too_large":
                return AdapterTooLarge(name, num_bytes=answer["num_bytes"], limit=answer["limit"])
            case "invalid":
                if digest := answer.get("source_digest"):
                    self._failures.refuse(key, Refusal(digest, answer["reason"]))
                return AdapterInvalid(name, answer["reason"])
        seconds = self._failures.back_off(key, answer["reason"], answer.get("retry_after_seconds"))
        log.warning("an adapter cannot be fetched", adapter=name, reason=answer["reason"])
        return AdapterUnavailable(name, answer["reason"], retry_after_seconds=seconds)

    async def _keep(self, answer: Answer, name: str) -> AdapterVersion:
        """Enter a version into the cache, and make room for it."""
        digest, num_bytes = answer["digest"], answer["num_bytes"]
        needed = {*self._needed(), digest}
        self._cache.use(digest, num_bytes)
        victims = self._cache.evict(needed)
        is_full = self._cache.size_of(needed) > self._cache.max_bytes
        if is_full and digest not in self._needed():
            self._cache.forget(digest)
            victims.append(digest)
        await asyncio.to_thread(self._cache.delete, victims)
        if digest not in victims:
            return AdapterVersion(
                digest=digest,
                name=name,
                num_slices=tuple(
                    (module, -(-rank // RANKS_PER_SLICE) + has_bias)
                    for module, rank, has_bias in answer["modules"]
                ),
                num_bytes=num_bytes,
            )
        if num_bytes > self._cache.max_bytes:
            raise AdapterTooLarge(name, num_bytes=num_bytes, limit=self._cache.max_bytes)
        raise AdapterUnavailable(
            name, "the adapter cache is full of adapters in use", retry_after_seconds=BUSY_SECONDS
        )


def _request(job: str, source: Answer, limits: FetchLimits) -> Answer:
    return {
        "job": job,
        "source": source,
        "limits": {
            "max_rank": limits.max_rank,
            "max_bytes": limits.max_bytes,
            "timeout_seconds": limits.timeout_seconds,
        },
    }


def _digest(request: Answer) -> str:
    """What two requests have in common that are the same, the token included."""
    return hashlib.sha256(orjson.dumps(request, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _key(source: FetchSource) -> str:
    """What failures are remembered by: the place, and whether by a token, whose hash alone is kept."""
    parts = [source.kind, source.id, source.revision, str(source.root), source.token]
    return hashlib.sha256(orjson.dumps(parts)).hexdigest()
