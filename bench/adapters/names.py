"""The router's names of adapters without a server: registered ones that all have a version, and a hub that has none."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import NoReturn

from millrace_router.adapters.fetcher import Fetcher
from millrace_router.adapters.names import NamedSource, Registration, Registry
from millrace_router.adapters.resolver import ClientRules, Resolver
from millrace_router.errors import AdapterNotFound
from millrace_router.request.adapter import (
    AdapterReference,
    AdapterSource,
    AdapterVersion,
    MergeRecipe,
)
from millrace_router.telemetry.metrics import Metrics

CALLER = "caller"
MODULES = tuple((f"model.layers.{layer}.self_attn.q_proj", 1) for layer in range(30))


class EmptyHub(Fetcher):
    """A hub without repositories; every copy is in the cache."""

    def __init__(self) -> None:
        """Start nothing."""

    async def fetch(
        self, source: NamedSource, *, name: str, token: str | None, caller: str
    ) -> NoReturn:
        """Raise AdapterNotFound."""
        del source, token, caller
        raise AdapterNotFound(name)

    commit_of = fetch

    async def last_version(self, source: NamedSource, *, name: str) -> None:
        """Return None: nothing was fetched before."""
        del source, name

    async def merge(self, recipe: MergeRecipe, versions: Sequence[AdapterVersion]) -> NoReturn:
        """Raise AdapterNotFound."""
        del versions
        raise AdapterNotFound(recipe.ids[0])

    def is_cached(self, digest: str) -> bool:
        """Return true for every digest."""
        return bool(digest)


class Names:
    """Registered names, and a resolver that is asked for others."""

    def __init__(self, num_registered: int) -> None:
        registry = Registry()
        for number in range(num_registered):
            registry.add(registered(f"org/adapter-{number}"))
        metrics = Metrics(max_input_tokens=1024, max_total_tokens=2048)
        rules = ClientRules(patterns=("hub:made-up/*",))
        self._registry = registry
        self._resolver = Resolver(registry, EmptyHub(), metrics, rules=rules)

    async def ask(self, begin: int, end: int) -> None:
        """Ask for the made-up names of these numbers; AssertionError if one is found."""
        for number in range(begin, end):
            name = self.made_up(number)
            self._resolver.is_adapter(name)
            try:
                await self._resolver.resolve(AdapterReference(name=name), CALLER)
            except AdapterNotFound:
                continue
            raise AssertionError(f"{name} is found")

    def made_up(self, number: int) -> str:
        """A word, an id that clients may name, or an unknown version of a registered adapter."""
        kinds = (
            f"made-up-{number}",
            f"made-up/adapter-{number}",
            f"org/adapter-{number % len(self._registry)}@sha256:{digest(str(number))}",
        )
        return kinds[number % len(kinds)]


def registered(name: str) -> Registration:
    """An adapter of the operator that was used."""
    source = NamedSource(kind=AdapterSource.HUB, location=name, by_operator=True)
    version = AdapterVersion(digest=digest(name), name=name, num_slices=MODULES, num_bytes=1)
    return Registration(name, source, current=version)


def digest(text: str) -> str:
    """SHA-256, in hexadecimal."""
    return sha256(text.encode()).hexdigest()
