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
from millrace_router.adapters.fetch_limits import FetchLimits
from millrace_router.adapters.names.recent import Recent
from millrace_router.adapters.names.sources import NamedSource
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

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_AT_ONCE = 2
MAX_OF_CLIENTS = 256
"""Fetches of sources that clients named, and merges, running or waiting."""
MAX_PER_CALLER = 8
MAX_KNOWN = 4096
BUSY_SECONDS = 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    """The hub, and the server's own token for the adapters that the operator named."""

    endpoint: str = DEFAULT_ENDPOINT
    token: str | None = None

    def __repr__(self) -> str:
        return f"HubAccess({self.endpoint!r})"


@dataclass(frozen=True, slots=True)
class _Known:
    """What the files of a source last were: a version, or why they cannot be used."""

    source_digest: str
    outcome: AdapterVersion | str


class Fetcher:
    """Asks the fetching process, and turns its answers into versions and errors of requests."""

    def __init__(
        self,
        cache: AdapterCache,
        modules: Sequence[AdapterModule],
        *,
        limits: FetchLimits,
        needed: Callable[[], Collection[str]],
        hub: HubAccess = HubAccess(),
        clock: Callable[[], float] = time.monotonic,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Check adapters against `modules`.

        `needed` tells the digests that are registered or in use, which never leave the cache.
        """
        self._cache = cache
        self._modules = [(module.name, module.inputs, module.outputs) for module in modules]
        self._limits = limits
        self._needed = needed
        self._hub = hub
        self._command = command
        self._permits = asyncio.Semaphore(MAX_AT_ONCE)
        self._callers: Counter[str] = Counter()
        self._back_off = BackOff(clock)
        self._known: Recent[NamedSource, _Known] = Recent(MAX_KNOWN, clock=clock)

    async def fetch(
        self, source: NamedSource, *, name: str, token: str | None, caller: str
    ) -> AdapterVersion:
        """Fetch, check and keep the adapter as it is at its source now; on the hub, access is checked each time.

        The server's own token is for sources of the operator alone, and `token` for those of a client.

        Raises:
            AdapterNotFound, AdapterForbidden, AdapterInvalid, AdapterTooLarge, AdapterUnavailable.

        """
        known = self._known.get(source)
        if known and isinstance(known.outcome, AdapterVersion):
            known = known if self.is_cached(known.outcome.digest) else None
        request = self._request("fetch") | {
            "source": {
                "kind": source.kind,
                "id": source.location,
                "revision": source.revision,
                "root": None if source.root is None else str(source.root.absolute()),
                "token": self._token(source, token),
                "endpoint": self._hub.endpoint.rstrip("/"),
            },
            "modules": self._modules,
            "known": known.source_digest if known else None,
        }
        try:
            whose = None if source.by_operator else caller
            answer = await self._ask(request, source, name=name, caller=whose)
        except AdapterInvalid as error:
            if error.source_digest is not None:
                self._known.put(source, _Known(error.source_digest, error.reason))
            raise
        if not answer.get("is_known"):
            if note := answer["note"]:
                log.warning("an adapter is used with a note", adapter=name, note=note)
            version = await self._keep(answer, name)
            self._known.put(source, _Known(answer["source_digest"], version))
            return version
        assert known is not None
        if isinstance(known.outcome, str):
            raise AdapterInvalid(name, known.outcome)
        return replace(known.outcome, name=name)

    async def merge(
        self, recipe: MergeRecipe, versions: Sequence[AdapterVersion]
    ) -> AdapterVersion:
        """Merge `versions`, which are in the cache and in the recipe's order, into a version of its own.

        Raises:
            AdapterInvalid: they cannot be merged so.
            AdapterTooLarge, AdapterUnavailable.

        """
        digests = tuple(version.digest for version in versions)
        request = self._request("merge") | {
            "digests": digests,
            "weights": recipe.weights,
            "strategy": recipe.strategy,
            "density": recipe.density,
            "majority_sign_method": recipe.majority_sign_method,
        }
        name = "+".join(recipe.ids)
        key = digests, replace(recipe, ids=())
        return await self._keep(await self._ask(request, key, name=name, caller=""), name)

    def is_cached(self, digest: str) -> bool:
        """Whether the copy of a version is in the cache; whoever asks is about to use it."""
        return self._cache.touch(digest)

    def _token(self, source: NamedSource, token: str | None) -> str | None:
        if source.kind is AdapterSource.LOCAL:
            return None
        return self._hub.token if source.by_operator else token

    def _request(self, job: str) -> Answer:
        limits = self._limits
        return {
            "job": job,
            "cache": str(self._cache.folder.absolute()),
            "limits": {
                "max_rank": limits.max_rank,
                "max_bytes": limits.max_bytes,
                "timeout_seconds": limits.timeout_seconds,
            },
        }

    async def _ask(
        self, request: Answer, key: Hashable, *, name: str, caller: str | None
    ) -> Answer:
        """Run the process when its turn has come; raises what it answers."""
        if rest := self._back_off.rest(key):
            raise AdapterUnavailable(name, rest[0], retry_after_seconds=rest[1])
        try:
            with self._place_in_line(name, caller):
                async with self._permits:
                    answer = await run_child(
                        request, timeout_seconds=self._limits.timeout_seconds, command=self._command
                    )
        except ChildError as error:
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
    def _place_in_line(self, name: str, caller: str | None) -> Iterator[None]:
        """Count a client's fetch, running or waiting; None is the operator, whose adapters are not without number."""
        if caller is None:
            yield
            return
        is_greedy = caller != "" and self._callers[caller] >= MAX_PER_CALLER
        if is_greedy or self._callers.total() >= MAX_OF_CLIENTS:
            reason = "too many adapters are being fetched"
            raise AdapterUnavailable(name, reason, retry_after_seconds=BUSY_SECONDS)
        self._callers[caller] += 1
        try:
            yield
        finally:
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]

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
