"""The store of responses: what it keeps, for whom, how long and how much of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace_router.api.responses.store import ResponseStore
from millrace_testing.clock import Clock
from millrace_testing.router.edge import limits_with, plays, serving
from millrace_testing.router.streams import RESPONSES, events_of, response_of

ITEM = {"type": "message", "role": "user", "content": "a" * 100, "id": "item_1"}


def response(id_: str) -> dict[str, Any]:
    return {"id": id_, "output": [{"type": "message", "id": f"msg_{id_}", "content": []}]}


def store_with(num_responses: int, clock: Clock | None = None) -> ResponseStore:
    """A store with room for so many of the responses below."""
    measured = ResponseStore(10**6, 60)
    measured.add("", response("1"), [ITEM])
    return ResponseStore(num_responses * measured.num_bytes, 60, clock or Clock())


def test_only_its_tenant_has_access_to_a_response() -> None:
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


TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }} {{ turn.content }}"
    "{% for call in turn.tool_calls %}{{ call.function.name }}{% endfor %} {% endfor %}"
)
WIDE = limits_with(max_input_tokens=400, max_total_tokens=900)
ON = {"limits": WIDE, "template": TEMPLATE, "responses_store": 1}
ASKED: dict[str, Any] = {"input": "hello"}
SAYS_WORLD = plays("wor", "ld")
CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "2"}


def words_of(answer: dict[str, Any]) -> int:
    """The tokens of the prompt: the fake edge counts words."""
    count: int = answer["usage"]["input_tokens"]
    return count


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_a_conversation_goes_on_by_the_id_of_its_last_response(streams: bool) -> None:
    async with serving(SAYS_WORLD, **ON) as edge:

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            return (
                response_of(await events_of(edge, body))
                if streams
                else await edge.answer(RESPONSES, body)
            )

        first = await ask(ASKED | {"instructions": "be brief"})
        assert first["store"] is True
        second = await ask({"input": "again", "previous_response_id": first["id"]})
        assert second["previous_response_id"] == first["id"]
        third = await ask(
            {"input": [CALL, RESULT], "previous_response_id": second["id"], "store": False}
        )
        assert third["store"] is False
        turns = [
            {"role": "user", "content": "hello"},
            *first["output"],
            {"role": "user", "content": "again"},
            *second["output"],
        ]
        whole = await ask({"input": [*turns, CALL, RESULT]})
        # The instructions are not carried over, as with OpenAI.
        assert words_of(first) == 2 + 3
        assert words_of(third) == words_of(whole) == 5 * 2
        status, *_ = await edge.get(f"{RESPONSES}/{third['id']}")
        assert status == 404


async def test_a_stored_response_is_read_and_forgotten() -> None:
    async with serving(SAYS_WORLD, **ON) as edge:
        first = await edge.answer(RESPONSES, ASKED)
        second = await edge.answer(
            RESPONSES, {"input": "again", "previous_response_id": first["id"]}
        )
        path = f"{RESPONSES}/{second['id']}"
        async with edge.client.get(edge.url + path) as response:
            assert await response.json() == second
        async with edge.client.get(f"{edge.url}{path}?stream=true") as response:
            assert response.status == 422
        async with edge.client.delete(edge.url + path) as response:
            deleted = {"id": second["id"], "object": "response", "deleted": True}
            assert await response.json() == deleted
        for method in ("get", "delete"):
            async with edge.client.request(method, edge.url + path) as response:
                assert response.status == 404
                assert second["id"] in (await response.json())["error"]["message"]


async def test_the_items_of_a_stored_response_are_listed() -> None:
    async with serving(SAYS_WORLD, **ON) as edge:
        first = await edge.answer(RESPONSES, ASKED)
        turns = [{"role": "user", "content": "b"}, CALL | {"id": "fc_1"}, RESULT]
        second = await edge.answer(RESPONSES, {"input": turns, "previous_response_id": first["id"]})
        path = f"{edge.url}{RESPONSES}/{second['id']}/input_items"

        async def items(query: str = "") -> Any:
            async with edge.client.get(path + query) as response:
                return response.status, await response.json()

        _, listed = await items("?order=asc")
        data = listed["data"]
        assert [item.get("content") for item in data[:1]] == ["hello"]
        assert data[1] == first["output"][0]
        assert data[3] == CALL | {"id": "fc_1"}
        assert len({item["id"] for item in data}) == len(data) == 5
        assert (listed["object"], listed["has_more"]) == ("list", False)
        assert (listed["first_id"], listed["last_id"]) == (data[0]["id"], data[-1]["id"])
        assert (await items())[1]["data"] == data[::-1]
        _, page = await items(f"?order=asc&limit=2&after={data[1]['id']}")
        assert (page["data"], page["has_more"]) == (data[2:4], True)
        for query in (
            "?limit=0",
            "?limit=101",
            f"?limit=0100{'0' * 5000}",
            "?limit=x",
            "?order=up",
            "?after=none",
        ):
            status, answer = await items(query)
            assert status == 422, answer


async def test_a_reference_stands_for_a_stored_item() -> None:
    async with serving(SAYS_WORLD, **ON) as edge:
        first = await edge.answer(RESPONSES, ASKED)
        (message,) = first["output"]
        reference = {"type": "item_reference", "id": message["id"]}
        turns = [{"role": "user", "content": "hello"}, reference, {"id": message["id"]}]
        second = await edge.answer(RESPONSES, {"input": turns})
        assert words_of(second) == 3 * 2
        status, answer, _ = await edge.post(RESPONSES, {"input": [reference | {"id": "msg_1"}]})
        assert status == 400
        assert "msg_1" in answer["error"]["message"]


async def test_input_tokens_are_those_of_the_whole_conversation() -> None:
    async with serving(SAYS_WORLD, **ON) as edge:
        first = await edge.answer(RESPONSES, ASKED)
        body = {"input": "again", "previous_response_id": first["id"]}
        _, counted, _ = await edge.post(f"{RESPONSES}/input_tokens", body)
        assert counted["input_tokens"] == words_of(await edge.answer(RESPONSES, body)) == 6


async def test_no_client_can_read_the_response_of_another_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:key-a\nbob:key-b\n")
    ann, bob = ({"authorization": f"Bearer key-{one}"} for one in "ab")
    async with serving(SAYS_WORLD, **ON, api_key_file=keys) as edge:
        first = await edge.answer(RESPONSES, ASKED, **ann)
        path = f"{RESPONSES}/{first['id']}"
        for method, end in (("get", ""), ("get", "/input_items"), ("delete", "")):
            url = edge.url + path + end
            async with edge.client.request(method, url, headers=bob) as response:
                assert response.status == 404
        follow = {"input": "again", "previous_response_id": first["id"]}
        refer = {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}]}
        for body in (follow, refer):
            status, answer, _ = await edge.post(RESPONSES, body, headers=bob)
            assert status == 400
            assert answer["error"]["code"] == "previous_response_not_found"
            await edge.answer(RESPONSES, body, **ann)


async def test_without_a_store_an_earlier_response_is_refused_by_name() -> None:
    async with serving(SAYS_WORLD, **ON | {"responses_store": 0}) as edge:
        first = await edge.answer(RESPONSES, ASKED | {"store": True})
        assert first["store"] is False
        for stream in (False, True):
            body = {"input": "a", "previous_response_id": first["id"], "stream": stream}
            status, answer, _ = await edge.post(RESPONSES, body)
            assert status == 400
            assert "previous_response_id" in answer["error"]["message"]
            assert "--responses-store" in answer["error"]["message"]
        status, answer, _ = await edge.post(RESPONSES, {"input": [{"id": "msg_1"}]})
        assert status == 400
        for method in ("get", "delete"):
            async with edge.client.request(
                method, f"{edge.url}{RESPONSES}/{first['id']}"
            ) as response:
                assert response.status == 404
                assert "--responses-store" in (await response.json())["error"]["message"]


async def test_a_conversation_may_not_grow_beyond_a_body() -> None:
    async with serving(SAYS_WORLD, **ON, payload_limit=2000) as edge:
        first = await edge.answer(RESPONSES, {"input": "a" * 1500})
        second = await edge.answer(
            RESPONSES, {"input": "b" * 1500, "previous_response_id": first["id"]}
        )
        body = {"input": "c", "previous_response_id": second["id"]}
        status, answer, _ = await edge.post(RESPONSES, body)
        assert status == 413, answer


async def test_malformed_bodies_are_refused_with_a_store_too() -> None:
    async with serving(SAYS_WORLD, **ON) as edge:
        first = await edge.answer(RESPONSES, ASKED)
        previous = {"previous_response_id": first["id"]}
        bodies: list[Any] = [previous, previous | {"input": 1}, previous | {"input": None}]
        bodies += [{"input": [1]}, {"input": "a", "previous_response_id": 1}, [], "a"]
        for body in bodies:
            status, answer, _ = await edge.post(RESPONSES, body)
            assert status == 422, answer


@pytest.mark.parametrize("id_", [5, ["a"], {"a": 1}, True, "", None], ids=str)
async def test_an_item_whose_id_is_not_text_gets_another(id_: object) -> None:
    async with serving(SAYS_WORLD, **ON) as edge:
        item = {"role": "user", "content": "hello", "id": id_}
        first = await edge.answer(RESPONSES, {"input": [item]})
        second = await edge.answer(
            RESPONSES, {"input": "again", "previous_response_id": first["id"]}
        )
        assert words_of(second) == 3 * 2
        _, page, _ = await edge.get(f"{RESPONSES}/{first['id']}/input_items")
    (stored,) = json.loads(page)["data"]
    assert stored["id"].startswith("item_")
