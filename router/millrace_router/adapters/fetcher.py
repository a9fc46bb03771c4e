"""Fetches adapters for the served model into the cache, two at a time, each in its own process."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError

from millrace_router.adapters.cache import DIGEST, AdapterCache
from millrace_router.adapters.child import COMMAND, ChildError, run_child
from millrace_router.adapters.memory import BackOff, FairTurns, Recent
from millrace_router.adapters.names import NamedSource
from millrace_router.errors import (
    AdapterForbidden,
    AdapterInvalid,
    AdapterNotFound,
    AdapterTooLarge,
    AdapterUnavailable,
    RouterError,
)
from millrace_router.request.adapter import (
    PAGE_BYTES,
    RANKS_PER_SLICE,
    AdapterModule,
    AdapterSource,
    AdapterVersion,
    MergeRecipe,
)

Answer = dict[str, Any]

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_AT_ONCE = 2
MAX_AT_ONCE_OF_CALLER = 1
MAX_OF_CLIENTS = 256
"""Fetches of sources that clients named, and merges, running or waiting."""
MAX_PER_CALLER = 8
MAX_RESULTS = 4096
BUSY_SECONDS = 1.0
LAST_VERSIONS = "last-versions"
_VERSION = TypeAdapter(AdapterVersion)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Limits of an adapter, and of the process that fetches it."""

    max_rank: int = 64
    max_bytes: int = 2 << 30
    """Size of the file of weights."""
    timeout_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class _Result:
    """The last result for the files of a source: a version, or why they cannot be used."""

    source_digest: str
    outcome: AdapterVersion | str


class Fetcher:
    """Asks the fetching process, and turns its answers into versions and errors of requests.

    An adapter is checked against the layers of the model and against the memory of the shards.
    """

    def __init__(  # noqa: PLR0913
        self,
        cache: AdapterCache,
        *,
        modules: Sequence[AdapterModule],
        num_pages: int,
        needed: Callable[[], Collection[str]],
        server_token: Callable[[], str | None] = lambda: None,
        limits: FetchLimits = FetchLimits(),
        endpoint: str = DEFAULT_ENDPOINT,
        clock: Callable[[], float] = time.monotonic,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Fetch into `cache`.

        `modules` are the layers that adapters may change, `num_pages` is the memory for adapters on each rank, `needed`
        returns the digests that are registered or in use and never leave the cache, and `server_token` returns the
        server's own token for the hub, which counts only for the operator's adapters.
        """
        self._cache = cache
        self._modules = modules
        self._shapes = tuple((module.name, module.inputs, module.outputs) for module in modules)
        self._num_pages = num_pages
        self._needed = needed
        self._server_token = server_token
        self._limits = limits
        self._endpoint = endpoint.rstrip("/")
        self._command = command
        self._turns = FairTurns(MAX_AT_ONCE, MAX_AT_ONCE_OF_CALLER)
        self._running: set[asyncio.Task[Any] | None] = set()
        self._callers: Counter[str] = Counter()
        self._back_off = BackOff(clock)
        self._results: Recent[Hashable, _Result] = Recent(MAX_RESULTS, clock=clock)
        self._last_versions = LastVersions(
            cache.folder, server=(self._endpoint, self._shapes, limits)
        )

    async def fetch(
        self, source: NamedSource, *, name: str, token: str | None, caller: str
    ) -> AdapterVersion:
        """Fetch, check and keep the adapter as it is at `source` now; the hub checks the token each time.

        `token` counts only for a source on the hub that a client named. `caller` is the client that asks, whose fetches
        are limited; "" has no separate limit, and the operator's sources are not limited at all.

        Raises:
            AdapterNotFound: there is no such adapter for this caller.
            AdapterForbidden: the token has no access to it.
            AdapterInvalid: its files are not valid for the served model.
            AdapterTooLarge: it is larger than the server allows.
            AdapterUnavailable: the hub or the disk failed.

        """
        result = self._results.get(source.key)
        if result and isinstance(result.outcome, AdapterVersion):
            result = result if self._cache.touch(result.outcome.digest) else None
        request = self._request("fetch") | {
            "source": self._source(source, token),
            "modules": self._shapes,
            "known": result.source_digest if result else None,
        }
        try:
            answer = await self._ask(
                request, source.key, name=name, caller=caller, by_operator=source.by_operator
            )
        except AdapterInvalid as error:
            if error.source_digest is not None:
                self._results.put(source.key, _Result(error.source_digest, error.reason))
            raise
        if not answer.get("is_known"):
            if note := answer["note"]:
                log.warning(note, adapter=name)
            version = await self._keep(answer, name)
            self._results.put(source.key, _Result(answer["source_digest"], version))
        else:
            assert result is not None
            if isinstance(result.outcome, str):
                raise AdapterInvalid(name, result.outcome)
            version = replace(result.outcome, name=name)
        if source.by_operator and source.kind is AdapterSource.HUB:
            await self._keep_as_last(source, version)
        return self._fitting(version)

    async def commit_of(
        self, source: NamedSource, *, name: str, token: str | None, caller: str
    ) -> str:
        """Ask the hub for the commit of the source's revision, and so check access to it; raises as `fetch`."""
        request = self._request("commit") | {"source": self._source(source, token)}
        answer = await self._ask(
            request, source.key, name=name, caller=caller, by_operator=source.by_operator
        )
        return str(answer["commit"])

    async def merge(
        self, recipe: MergeRecipe, versions: Sequence[AdapterVersion]
    ) -> AdapterVersion:
        """Merge `versions`, which are in the cache and in the recipe's order, into a new version.

        Raises:
            AdapterInvalid: they cannot be merged so.
            AdapterTooLarge, AdapterUnavailable.

        """
        name, digests = ",".join(recipe.ids), [version.digest for version in versions]
        request = self._request("merge") | {
            "digests": digests,
            "weights": recipe.weights,
            "strategy": recipe.strategy,
            "density": recipe.density,
            "majority_sign_method": recipe.majority_sign_method,
        }
        answer = await self._ask(request, (tuple(digests), replace(recipe, ids=())), name=name)
        return self._fitting(await self._keep(answer, name))

    async def last_version(self, source: NamedSource, *, name: str) -> AdapterVersion | None:
        """Return the version of the operator's source on the hub at its last fetch, also by an earlier process.

        None if there is no record of it, or its copy has left the cache. Raises AdapterTooLarge.
        """
        version = await asyncio.to_thread(self._last_versions.get, source.key, name)
        if version is None or not self.is_cached(version.digest):
            return None
        return self._fitting(version)

    def is_cached(self, digest: str) -> bool:
        """Return whether the copy of a version is in the cache."""
        return self._cache.touch(digest)

    async def close(self) -> None:
        """End all fetches, and their processes."""
        tasks = [task for task in self._running if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _source(self, source: NamedSource, token: str | None) -> Answer:
        """Return the source for the process; a token goes there on its standard input, and nowhere else."""
        if source.by_operator:
            token = self._server_token()
        return {
            "kind": source.kind,
            "id": source.location,
            "revision": source.revision,
            "root": None if source.root is None else str(source.root.absolute()),
            "token": token if source.kind is AdapterSource.HUB else None,
            "endpoint": self._endpoint,
        }

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
        self,
        request: Answer,
        key: Hashable,
        *,
        name: str,
        caller: str = "",
        by_operator: bool = False,
    ) -> Answer:
        """Run the process when its turn has come; raises what it answers. Failures are counted by `key`."""
        if rest := self._back_off.rest(key):
            raise AdapterUnavailable(name, rest[0], retry_after_seconds=rest[1])
        try:
            with self._in_line(name, caller, by_operator=by_operator):
                async with self._turns.turn(caller):
                    answer = await run_child(
                        request, timeout_seconds=self._limits.timeout_seconds, command=self._command
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
    def _in_line(self, name: str, caller: str, *, by_operator: bool) -> Iterator[None]:
        """Count a fetch, running or waiting; raises AdapterUnavailable when clients request too many."""
        callers = self._callers if not by_operator else Counter[str]()
        is_greedy = caller != "" and callers[caller] >= MAX_PER_CALLER
        if is_greedy or callers.total() >= MAX_OF_CLIENTS:
            reason = "too many adapters are being fetched"
            raise AdapterUnavailable(name, reason, retry_after_seconds=BUSY_SECONDS)
        task = asyncio.current_task()
        self._running.add(task)
        callers[caller] += 1
        try:
            yield
        finally:
            self._running.discard(task)
            callers[caller] -= 1
            if not callers[caller]:
                del callers[caller]

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

    async def _keep_as_last(self, source: NamedSource, version: AdapterVersion) -> None:
        try:
            await asyncio.to_thread(self._last_versions.keep, source.key, version)
        except OSError as error:
            log.warning(
                "the version of an adapter is not kept", adapter=version.name, reason=str(error)
            )

    def _fitting(self, version: AdapterVersion) -> AdapterVersion:
        """Return `version`, unless it is larger than all memory for adapters; raises AdapterTooLarge."""
        pages = version.num_pages({one.name: one.bytes_per_slice for one in self._modules})
        if pages > self._num_pages:
            raise AdapterTooLarge(
                version.name, num_bytes=pages * PAGE_BYTES, limit=self._num_pages * PAGE_BYTES
            )
        return version


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


class LastVersions:
    """The last versions of the operator's adapters from the hub, which outlast the router.

    There is a file for each source in a folder of the adapter cache, which servers of other models may share.
    """

    def __init__(self, cache: Path, *, server: Hashable) -> None:
        """`server` is what a version depends on besides its source: the hub, the model's layers and the limits."""
        self._folder = cache / LAST_VERSIONS
        self._server = server

    def keep(self, source: Hashable, version: AdapterVersion) -> None:
        """Write the version that `source` has now, whole or not at all; raises OSError. Blocks."""
        path = self._path(source)
        partial = path.with_suffix(f".{os.getpid()}")
        self._folder.mkdir(exist_ok=True)
        partial.write_bytes(_VERSION.dump_json(version))
        partial.replace(path)

    def get(self, source: Hashable, name: str) -> AdapterVersion | None:
        """Read the last version of `source`, by its name now; None if there is none. Blocks."""
        try:
            version = _VERSION.validate_json(self._path(source).read_bytes())
        except (OSError, ValidationError):
            return None
        # The digest becomes a path.
        return replace(version, name=name) if DIGEST.fullmatch(version.digest) else None

    def _path(self, source: Hashable) -> Path:
        key = sha256(repr((self._server, source)).encode(errors="surrogatepass"))
        return self._folder / f"{key.hexdigest()}.json"
