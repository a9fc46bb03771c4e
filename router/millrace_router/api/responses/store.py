"""Responses in memory, for clients that send an id in place of the conversation."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import orjson

Json = dict[str, Any]
OVERHEAD_BYTES = 200
"""Of each response and of each of its items, beside their JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response and the items of its conversation, as JSON."""

    tenant: str
    """Name of the key of its client, "" for none: nobody else finds it."""
    response: bytes
    input_items: tuple[bytes, ...]
    """All items that it is an answer to; each has an id."""
    output_items: tuple[bytes, ...]
    ends_at: float
    """Time at which it is forgotten."""

    @property
    def conversation(self) -> tuple[bytes, ...]:
        """The items that a next response follows."""
        return self.input_items + self.output_items

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes, items that it shares with earlier responses among them."""
        items = self.conversation
        num_overhead = OVERHEAD_BYTES * (1 + len(items))
        return len(self.response) + sum(map(len, items)) + num_overhead


class ResponseStore:
    """Keeps the newest responses, in a number of bytes and for a time."""

    def __init__(
        self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """With 0 bytes, nothing is stored; `clock` returns seconds."""
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        """Oldest first."""
        self._items: dict[tuple[str, str], dict[str, bytes]] = {}
        """Items of stored responses by tenant and id, and by the response that has it; its last one with this id."""
        self.num_bytes = 0
        """Bytes of all stored responses."""

    @property
    def is_on(self) -> bool:
        """Whether responses are stored at all."""
        return self._max_bytes > 0

    def __len__(self) -> int:
        """Return the number of responses that are stored."""
        self._forget_old()
        return len(self._by_id)

    def add(self, tenant: str, response: Json, input_items: Iterable[Json]) -> None:
        """Store a response with its input, and forget the oldest ones where memory is short."""
        stored = StoredResponse(
            tenant=tenant,
            response=orjson.dumps(response),
            input_items=tuple(map(orjson.dumps, input_items)),
            output_items=tuple(map(orjson.dumps, response["output"])),
            ends_at=self._clock() + self._seconds,
        )
        if stored.num_bytes > self._max_bytes:
            return
        id_: str = response["id"]
        self._by_id[id_] = stored
        self.num_bytes += stored.num_bytes
        for item in stored.conversation:
            self._items.setdefault((tenant, _id_of(item)), {})[id_] = item
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._by_id)))
        self._forget_old()

    def find(self, tenant: str, id_: str) -> StoredResponse | None:
        """Return the tenant's response with this id, if it is there."""
        self._forget_old()
        stored = self._by_id.get(id_)
        return stored if stored is not None and stored.tenant == tenant else None

    def item(self, tenant: str, id_: str) -> Json | None:
        """Return the tenant's item with this id, if it is there."""
        self._forget_old()
        found = self._items.get((tenant, id_))
        item: Json | None = None if found is None else orjson.loads(found[next(reversed(found))])
        return item

    def delete(self, tenant: str, id_: str) -> bool:
        """Forget the tenant's response; return whether it was there."""
        found = self.find(tenant, id_)
        if found is not None:
            self._forget(id_)
        return found is not None

    def _forget_old(self) -> None:
        now = self._clock()
        while self._by_id:
            oldest = next(iter(self._by_id))
            if self._by_id[oldest].ends_at > now:
                return
            self._forget(oldest)

    def _forget(self, id_: str) -> None:
        gone = self._by_id.pop(id_)
        self.num_bytes -= gone.num_bytes
        for item in gone.conversation:
            key = gone.tenant, _id_of(item)
            # A client may send several items with one id.
            holders = self._items.get(key, {})
            holders.pop(id_, None)
            if not holders:
                self._items.pop(key, None)


def _id_of(item: bytes) -> str:
    id_: str = orjson.loads(item)["id"]
    return id_
