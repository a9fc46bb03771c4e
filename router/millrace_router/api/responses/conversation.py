"""Reads a request for a response, with what it refers to in the store in its place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from millrace_router.api.body.request_fields.reading import request_of
from millrace_router.api.responses.items import new_id
from millrace_router.api.responses.request import ResponsesRequest
from millrace_router.api.responses.store import Json, ResponseStore
from millrace_router.errors import BodySizeError, StoreNeeded, quoted
from millrace_router.server.bodies import check_structure, read_json
from millrace_router.server.ignored import note_ignored
from millrace_router.server.keys import KEY_NAME
from millrace_router.server.request_start import counting_refusals
from millrace_router.server.services import SERVICES

STORE: web.AppKey[ResponseStore] = web.AppKey("response_store", ResponseStore)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request and the conversation that its response belongs to."""

    body: ResponsesRequest
    items: list[Json]
    """The whole input as JSON, what was stored before it among it."""
    tenant: str
    store: ResponseStore

    @property
    def is_stored(self) -> bool:
        """Whether the response will be stored."""
        return self.store.is_on and self.body.store is not False

    def keep(self, response: Json) -> None:
        """Store the finished response, if it is to be."""
        if self.is_stored:
            self.store.add(self.tenant, response, map(_named, self.items))


def _named(item: Json) -> Json:
    """Return the item with an id; those of clients are checked by no model."""
    given = item.get("id")
    return item if isinstance(given, str) and given else {**item, "id": new_id("item")}


def tenant_of(request: web.Request) -> str:
    """Return the name of the client's key, "" for none."""
    name: str = request.get(KEY_NAME, "")
    return name


async def read_asked(request: web.Request) -> Asked:
    """Read the body, and name in the answer what is left out of the prompt.

    Raises:
        BodyError: as `read_json`, or the conversation is longer than a body may be.
        StoreNeeded: it refers to a response that is not stored.
        ValidationError: as `request_of`.

    """
    parsed = await read_json(request)
    store, tenant = request.app[STORE], tenant_of(request)
    with counting_refusals(request.app[SERVICES].metrics):
        parsed = _with_stored(store, tenant, parsed, limit=request.client_max_size)
    body = request_of(request, parsed, ResponsesRequest)
    note_ignored(request, body.left_out())
    return Asked(body=body, items=_items_of(parsed), tenant=tenant, store=store)


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
    found = store.find(tenant, id_)
    if found is None:
        raise StoreNeeded(f"Previous response with id {quoted(id_)} not found")
    joined = b"[" + b",".join(found.conversation) + b"]"
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
    given = parsed["input"]
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    items: list[Json] = given
    return items
