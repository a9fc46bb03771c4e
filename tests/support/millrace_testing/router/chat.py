"""Chat as a client reads it: what the chunks of a stream add up to, by the rules of OpenAI's own clients."""

from __future__ import annotations

import json
from typing import Any

from millrace_testing.router.edge import Edge

URL = "/v1/chat/completions"
Json = dict[str, Any]


async def chunks_of(edge: Edge, body: Json) -> list[Json]:
    """The chunks of a stream that ends as it should, its usage among them."""
    async with edge.client.post(edge.url + URL, json={**body, "stream": True}) as response:
        text = await response.text()
        assert response.status == 200, text
    *events, done, empty = text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def added_up(chunks: list[Json]) -> list[Json]:
    """Message and finish reason of each choice, by index.

    As `openai` for Python adds deltas up: texts are joined, lists by their items' `index`. As `ai` for JavaScript
    demands, the first piece of a call has its id, its type and its function's name.
    """
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            told = choices.setdefault(choice["index"], {"message": {}, "finish_reason": None})
            assert told["finish_reason"] is None, "a choice goes on after its end"
            told["finish_reason"] = choice["finish_reason"]
            for call in choice["delta"].get("tool_calls", ()):
                _check_first(told["message"].get("tool_calls", []), call)
            _add(told["message"], choice["delta"])
    return [choices[index] for index in sorted(choices)]


def _check_first(known: list[Json], call: Json) -> None:
    if call["index"] < len(known):
        return
    assert call["index"] == len(known)
    assert (bool(call["id"]), call["type"]) == (True, "function")
    assert call["function"]["name"]
    assert isinstance(call["function"]["arguments"], str)


def _add(total: Json, delta: Json) -> None:
    for key, value in delta.items():
        if total.get(key) is None or key in {"index", "type"}:
            total[key] = [dict(item) for item in value] if isinstance(value, list) else value
        elif isinstance(value, str):
            total[key] += value
        elif isinstance(value, dict):
            _add(total[key], value)
        elif isinstance(value, list):
            for item in value:
                if item["index"] < len(total[key]):
                    _add(total[key][item["index"]], item)
                else:
                    total[key].append(item)
