"""Stored responses, and requests that refer to them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from millrace_router.access.keys import KEY_NAME
from millrace_router.api.body.reading import admitted, request_of
from millrace_router.api.responses.items import named_id
from millrace_router.api.responses.request import ResponsesRequest
from millrace_router.errors import BodySizeError, StoreNeeded, quoted
from millrace_router.request.names import Names
from millrace_router.server.bodies import check_structure, read_json
from millrace_router.server.headers import ANSWER, EXPANDED, names_of
from millrace_router.server.services import SERVICES, counting_refusals

Json = dict[str, Any]
OVERHEAD_BYTES = 200
"""Memory of each response and of each of its items in addition to their JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response and the items of its conversation, as JSON."""

    tenant: str
    """Name of its client's key, "" for none; only this tenant can read the response."""
    response: bytes
    input_items: tuple[bytes, ...]
    """All items that the response answers, each with an id."""
    output_items: tuple[bytes, ...]
    ends_at: float
    """Time at which the response is forgotten."""

    @property
    def conversation(self) -> tuple[bytes, ...]:
        """The items that a next response follows."""
        return self.input_items + self.output_items

    @property
    def num_bytes(self) -> int:
        """Bytes of the response, including items that it shares with earlier responses."""
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
        if id_ in self._by_id:
            # Its client has sent the request again under the same name.
            self._forget(id_)
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
        stored = self._items.get((tenant, id_))
        item: Json | None = None if stored is None else orjson.loads(stored[next(reversed(stored))])
        return item

    def delete(self, tenant: str, id_: str) -> bool:
        """Forget the tenant's response; return whether it was there."""
        stored = self.find(tenant, id_)
        if stored is not None:
            self._forget(id_)
        return stored is not None

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


STORE: web.AppKey[ResponseStore] = web.AppKey("response_store", ResponseStore)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRequest:
    """A request and the conversation that its response belongs to."""

    body: ResponsesRequest
    items: list[Json]
    """The whole input as JSON, what was stored before it among it."""
    tenant: str
    store: ResponseStore
    names: Names

    @property
    def is_stored(self) -> bool:
        """Whether the response will be stored."""
        return self.store.is_on and self.body.store is not False

    def keep(self, response: Json) -> None:
        """Store the finished response, if it is to be."""
        if self.is_stored:
            named = [_named(item, self.names, place) for place, item in enumerate(self.items)]
            self.store.add(self.tenant, response, named)


def _named(item: Json, names: Names, place: int) -> Json:
    """Return the item with an id; no model has checked the ids that clients send."""
    id_ = item.get("id")
    return item if isinstance(id_, str) and id_ else {**item, "id": named_id(names, "item", place)}


def tenant_of(request: web.Request) -> str:
    """Return the name of the client's key, "" for none."""
    name: str = request.get(KEY_NAME, "")
    return name


async def read_stored(request: web.Request) -> StoredRequest:
    """Read the body, with the stored conversation that it refers to.

    Raises:
        BodyError: as `read_json`, or the conversation is longer than a body may be.
        StoreNeeded: it refers to a response that is not stored.
        ValidationError: as `request_of`.

    """
    store, tenant = request.app[STORE], tenant_of(request)
    async with admitted(request):
        parsed = await read_json(request)
        if EXPANDED in request and isinstance(parsed, dict):
            parsed["input"] = orjson.loads(request[EXPANDED])
        else:
            with counting_refusals(request.app[SERVICES].metrics):
                whole = _with_stored(store, tenant, parsed, limit=request.client_max_size)
            if ANSWER in request and whole != parsed:
                request[ANSWER].recorder.expand(orjson.dumps(whole["input"]))
            parsed = whole
        body = await request_of(request, parsed, ResponsesRequest)
    items, names = _items_of(parsed), names_of(request)
    return StoredRequest(body=body, items=items, tenant=tenant, store=store, names=names)


def _with_stored(store: ResponseStore, tenant: str, parsed: Any, *, limit: int) -> Any:  # noqa: ANN401
    """Return the body with the earlier conversation, and the items that it refers to, in its input."""
    if not isinstance(parsed, dict):
        return parsed
    previous = parsed.get("previous_response_id")
    items = parsed.get("input")
    if isinstance(items, list) and store.is_on:
        items = list(map(partial(_dereferenced, store, tenant), items))
    if isinstance(previous, str):
        earlier = _conversation(store, tenant, previous, limit=limit)
        if isinstance(items, str | list):
            items = [*earlier, *_items_of({"input": items})]
    return {**parsed, "input": items} if "input" in parsed else parsed


def _conversation(store: ResponseStore, tenant: str, id_: str, *, limit: int) -> list[Json]:
    """Return the items of a stored response and of its input; raises StoreNeeded or BodyError."""
    if not store.is_on:
        raise StoreNeeded(
            "`previous_response_id` needs stored responses, and this server stores none without "
            "`--responses-store`: send the whole conversation as `input`"
        )
    stored = store.find(tenant, id_)
    if stored is None:
        raise StoreNeeded(f"Previous response with id {quoted(id_)} not found")
    joined = b"[" + b",".join(stored.conversation) + b"]"
    if len(joined) > limit:
        raise BodySizeError
    check_structure(joined)
    items: list[Json] = orjson.loads(joined)
    return items


def _dereferenced(store: ResponseStore, tenant: str, item: Any) -> Any:  # noqa: ANN401
    """Return the stored item in place of a reference to it."""
    is_reference = isinstance(item, dict) and (
        item.get("type") == "item_reference" or not item.keys() & {"type", "role"}
    )
    if not is_reference or not isinstance(item.get("id"), str):
        return item
    return store.item(tenant, item["id"]) or item


def _items_of(parsed: Any) -> list[Json]:  # noqa: ANN401
    """Return the input of a valid body as items."""
    input_ = parsed["input"]
    if isinstance(input_, str):
        return [{"type": "message", "role": "user", "content": input_}]
    items: list[Json] = input_
    return items
