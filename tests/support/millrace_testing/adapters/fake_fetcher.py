"""A fetcher without a hub: repositories with tokens, and folders whose weights are a text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from millrace_router.adapters.fetcher import Fetcher
from millrace_router.adapters.names import FILES, NamedSource, Registration, Registry
from millrace_router.adapters.resolver import ClientRules, Resolver
from millrace_router.errors import AdapterForbidden, AdapterNotFound, RouterError
from millrace_router.request.adapter import (
    AdapterReference,
    AdapterSource,
    AdapterVersion,
    MergeRecipe,
)
from millrace_router.telemetry.metrics import Metrics
from millrace_testing.router.edge import Edge

SERVER_TOKEN = "server"


@dataclass
class Repository:
    """A repository on the fake hub; without tokens it is public."""

    weights: str = "weights"
    tokens: frozenset[str] = frozenset()


@dataclass
class FakeFetcher(Fetcher):
    """Records its calls; each waits for `gate` and then raises `error`, if they are set."""

    hub: dict[str, Repository] = field(default_factory=dict)
    error: RouterError | None = None
    gate: asyncio.Event | None = None
    fetched: list[tuple[str, str | None]] = field(default_factory=list)
    """(name, token) of each fetch."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """(name, token) of each question about a commit."""
    merged: list[tuple[MergeRecipe, tuple[str, ...]]] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    """Digests that have left the cache."""

    async def fetch(
        self, source: NamedSource, *, name: str, token: str | None, caller: str
    ) -> AdapterVersion:
        self.fetched.append((name, token))
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        if source.kind is AdapterSource.HUB:
            used = SERVER_TOKEN if source.by_operator else token
            commit = self._commit(source, name, used)
            return version(name, commit if source.by_operator else source.revision or "")
        try:
            return version(name, (source.folder / FILES[1]).read_text())
        except OSError:
            raise AdapterNotFound(name) from None

    async def commit_of(
        self, source: NamedSource, *, name: str, token: str | None, caller: str
    ) -> str:
        self.asked.append((name, token))
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self._commit(source, name, token)

    def _commit(self, source: NamedSource, name: str, token: str | None) -> str:
        repository = self.hub.get(source.location)
        if repository is None:
            raise AdapterNotFound(name)
        if repository.tokens and token not in repository.tokens:
            raise AdapterForbidden(name)
        return f"{repository.weights} {source.revision}"

    async def last_version(self, source: NamedSource, *, name: str) -> AdapterVersion | None:
        return None

    async def merge(
        self, recipe: MergeRecipe, versions: Sequence[AdapterVersion]
    ) -> AdapterVersion:
        digests = tuple(one.digest for one in versions)
        self.merged.append((recipe, digests))
        return version("+".join(recipe.ids), f"{digests} {recipe.weights} {recipe.strategy}")

    def is_cached(self, digest: str) -> bool:
        return digest not in self.missing


def version(name: str, weights: str) -> AdapterVersion:
    """The version of these weights."""
    digest = sha256(weights.encode()).hexdigest()
    return AdapterVersion(digest=digest, name=name, num_slices=(("q", 1),), num_bytes=100)


def write_adapter(folder: Path, weights: str) -> None:
    """Write the files of an adapter, or write them anew."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        part = folder / f"{name}.part"
        part.write_text(weights)
        part.rename(folder / name)


def registered(name: str, location: str | Path) -> Registration:
    """A name of the operator; a path is a folder, a text an id on the hub."""
    kind = AdapterSource.LOCAL if isinstance(location, Path) else AdapterSource.HUB
    return Registration(name, NamedSource(kind=kind, location=str(location), by_operator=True))


def resolver_of(
    fetcher: FakeFetcher,
    *registrations: Registration,
    rules: ClientRules | None = None,
    default: str | None = None,
    metrics: Metrics | None = None,
) -> Resolver:
    """Resolves these names with `fetcher`."""
    registry = Registry()
    for registration in registrations:
        registry.add(registration)
    return Resolver(
        registry,
        fetcher,
        metrics or Metrics(max_input_tokens=8, max_total_tokens=16),
        rules=rules or ClientRules(),
        default=None if default is None else AdapterReference(name=default),
    )


A, B = version("a", "A None"), version("b", "B None")
"""The versions of `adapters`."""


def adapters(fetcher: FakeFetcher | None = None, **options: Any) -> Resolver:
    """Resolves `a` and `b`, which are `org/a` and `org/b` on the hub."""
    hub = {"org/a": Repository("A"), "org/b": Repository("B")}
    known = registered("a", "org/a"), registered("b", "org/b")
    return resolver_of(fetcher or FakeFetcher(hub=hub), *known, **options)


def digests(edge: Edge) -> list[str | None]:
    """The adapters of the requests so far; None for the base."""
    return [one.adapter.digest if one.adapter else None for one in edge.batcher.requests]
