"""The store of responses: what it keeps, for whom, how long and how much of it."""

from __future__ import annotations

from typing import Any

from millrace_router.api.responses.store import ResponseStore

ITEM = {"type": "message", "role": "user", "content": "a" * 100, "id": "item_1"}


class Clock:
    """Shows the time that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def response(id_: str) -> dict[str, Any]:
    return {"id": id_, "output": [{"type": "message", "id": f"msg_{id_}", "content": []}]}


def store_with(num_responses: int, clock: Clock | None = None) -> ResponseStore:
    """A store with room for so many of the responses below."""
    measured = ResponseStore(10**6, 60)
    measured.add("", response("1"), [ITEM])
    return ResponseStore(num_responses * measured.num_bytes, 60, clock or Clock())


def test_a_response_is_found_only_by_its_tenant() -> None:
    store = store_with(3)
    store.add("ann", response("1"), [ITEM])
    found = store.find("ann", "1")
    assert found is not None
    assert len(found.conversation) == 2
    assert store.item("ann", "msg_1") == response("1")["output"][0]
    assert store.item("ann", "item_1") == ITEM
    for tenant in ("", "bob"):
        assert store.find(tenant, "1") is None
        assert store.item(tenant, "msg_1") is None
        assert not store.delete(tenant, "1")
    assert store.delete("ann", "1")
    assert store.find("ann", "1") is None
    assert store.item("ann", "item_1") is None
    assert store.num_bytes == 0


def test_the_oldest_is_forgotten_when_memory_is_short() -> None:
    store = store_with(2)
    for id_ in ("1", "2", "3"):
        store.add("", response(id_), [ITEM])
    assert [store.find("", id_) is None for id_ in ("1", "2", "3")] == [True, False, False]
    assert store.item("", "msg_1") is None
    # The later ones have the item, too.
    assert store.item("", "item_1") == ITEM
    large = ITEM | {"content": "a" * 10_000}
    store.add("", response("4"), [large])
    assert store.find("", "4") is None
    assert len(store) == 2


def test_a_response_is_forgotten_in_time() -> None:
    clock = Clock()
    store = store_with(3, clock)
    store.add("", response("1"), [ITEM])
    clock.now = 30.0
    store.add("", response("2"), [ITEM])
    clock.now = 60.0
    assert store.find("", "1") is None
    assert store.item("", "item_1") == ITEM
    assert len(store) == 1
    clock.now = 90.0
    assert store.item("", "item_1") is None
    assert store.num_bytes == 0


def test_nothing_is_kept_without_memory() -> None:
    store = ResponseStore(0, 60)
    assert not store.is_on
    store.add("", response("1"), [ITEM])
    assert len(store) == 0


def test_items_of_one_id_are_stored_and_forgotten_at_once() -> None:
    """A client chooses the ids; their number squared would stop the server."""
    store = ResponseStore(10**9, 60)
    num_items = 50_000
    store.add("", response("1"), [ITEM | {"content": str(place)} for place in range(num_items)])
    store.add("", response("2"), [ITEM])
    found = store.item("", "item_1")
    assert found == ITEM
    assert store.delete("", "2")
    found = store.item("", "item_1")
    assert found is not None
    assert found["content"] == str(num_items - 1)
    assert store.delete("", "1")
    assert store.item("", "item_1") is None
    assert store.num_bytes == 0
