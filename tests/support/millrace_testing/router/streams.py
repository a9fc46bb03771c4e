"""Chat as a client reads it: what the chunks of a stream add up to, by the rules of OpenAI's own clients."""

from __future__ import annotations

import json
from typing import Any

from millrace_testing.router.edge import Edge

CHAT = "/v1/chat/completions"
Json = dict[str, Any]


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


def message_events_in(body: str) -> list[tuple[str, Any]]:
    """Names and data of a stream's events; ids are left out."""
    assert body.endswith("\n\n")
    events = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        name, data = [line for line in block.split("\n") if not line.startswith("id: ")]
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in events)
    return events


def message_of(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """Put a message together as Anthropic's documentation says, checking the order of events."""
    (first, start), *rest, (last, _) = [event for event in events if event[0] != "ping"]
    assert (first, last) == ("message_start", "message_stop")
    message: dict[str, Any] = start["message"]
    is_open = False
    inputs: dict[int, list[str]] = {}
    for name, data in rest:
        if name == "message_delta":
            message |= data["delta"]
            message["usage"] |= data["usage"]
            continue
        assert message["stop_reason"] is None, "nothing follows the end but the last event"
        assert is_open == (name != "content_block_start")
        if name == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append(data["content_block"])
            is_open = True
        elif name == "content_block_stop":
            is_open = False
        else:
            assert (name, data["index"]) == ("content_block_delta", len(message["content"]) - 1)
            delta = data["delta"]
            if delta["type"] == "text_delta":
                message["content"][-1]["text"] += delta["text"]
            elif delta["type"] == "thinking_delta":
                message["content"][-1]["thinking"] += delta["thinking"]
            elif delta["type"] == "signature_delta":
                message["content"][-1]["signature"] += delta["signature"]
            else:
                inputs.setdefault(data["index"], []).append(delta["partial_json"])
    assert not is_open
    for index, parts in inputs.items():
        assert message["content"][index]["input"] == {}
        message["content"][index]["input"] = json.loads("".join(parts))
    return message


RESPONSES = "/v1/responses"
PREFIXES = {"message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_"}


def response_events_in(body: str) -> list[Json]:
    """The events of a stream, which are numbered without gaps and say twice what they are; ids are left out."""
    assert body.endswith("\n\n")
    events = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        name, data = [line for line in block.split("\n") if not line.startswith("id: ")]
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def events_of(edge: Edge, body: Json, **headers: str) -> list[Json]:
    """The events of a stream that begins as it should."""
    return response_events_in(await edge.stream(RESPONSES, body, **headers))


class Told:
    """Adds events up; anything out of order is an error."""

    def __init__(self) -> None:
        self.output: list[Json] = []
        self.response: Json | None = None
        self._open: Json | None = None
        self._part: Json | None = None

    def take(self, event: Json) -> None:
        """Take the next event before the last."""
        kind = event["type"].removeprefix("response.")
        match kind:
            case "output_item.added":
                assert self._open is None
                assert event["output_index"] == len(self.output)
                self._open = event["item"]
                assert self._open["status"] == "in_progress"
                assert not self._open.get("content")
                assert not self._open.get("arguments")
                assert not self._open.get("input")
                self.output.append(self._open)
                return
            case "output_item.done":
                self._end_item(event)
                return
        assert self._open is not None
        assert event["item_id"] == self._open["id"]
        assert event["output_index"] == len(self.output) - 1
        if self._open["type"] == "reasoning":
            self._take_thought(kind, event, self._open)
        elif self._open["type"] == "message":
            self._take_text(kind, event, self._open)
        elif kind == "custom_tool_call_input.delta":
            assert event["delta"]
            self._open["input"] += event["delta"]
        elif kind == "custom_tool_call_input.done":
            assert event["input"] == self._open["input"]
        elif kind == "function_call_arguments.delta":
            assert event["delta"]
            self._open["arguments"] += event["delta"]
        else:
            assert kind == "function_call_arguments.done"
            assert event["arguments"] == self._open["arguments"]
            assert event["name"] == self._open["name"]

    def _take_text(self, kind: str, event: Json, item: Json) -> None:
        assert event["content_index"] == 0
        if kind == "content_part.added":
            assert item["content"] == []
            self._part = event["part"]
            item["content"].append(self._part)
            return
        assert self._part is not None
        match kind:
            case "output_text.delta":
                assert event["delta"]
                self._part["text"] += event["delta"]
                self._part["logprobs"] += event["logprobs"]
            case "output_text.done":
                assert event["text"] == self._part["text"]
                assert event["logprobs"] == self._part["logprobs"]
            case _:
                assert kind == "content_part.done"
                assert event["part"] == self._part
                self._part = None

    def _take_thought(self, kind: str, event: Json, item: Json) -> None:
        assert event["summary_index"] == 0
        if kind == "reasoning_summary_part.added":
            assert item["summary"] == []
            self._part = event["part"]
            item["summary"].append(self._part)
            return
        assert self._part is not None
        if kind == "reasoning_summary_text.delta":
            assert event["delta"]
            self._part["text"] += event["delta"]
        elif kind == "reasoning_summary_text.done":
            assert event["text"] == self._part["text"]
        else:
            assert kind == "reasoning_summary_part.done"
            assert event["part"] == self._part
            self._part = None

    def _end_item(self, event: Json) -> None:
        assert self._part is None
        assert self._open is not None
        assert event["output_index"] == len(self.output) - 1
        status = event["item"]["status"]
        assert status in {"completed", "incomplete"}
        assert event["item"] == {**self._open, "status": status}
        self.output[-1] = event["item"]
        self._open = None


def response_of(events: list[Json]) -> Json:
    """The response that a stream ends with, which is what its events add up to."""
    created, in_progress, *rest, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    first = created["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    told = Told()
    for event in rest:
        told.take(event)
    response: Json = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert response["output"] == told.output
    assert response["id"] == first["id"]
    same = first.keys() - {"status", "output", "usage", "completed_at", "incomplete_details"}
    assert {key: response[key] for key in same} == {key: first[key] for key in same}
    return response


def without_ids(response: Json) -> Json:
    """The response but for what differs from call to call, whose form is checked; names of calls are counted."""
    ids = [response["id"], *(item["id"] for item in response["output"])]
    assert len(set(ids)) == len(ids)
    assert response["id"].startswith("resp_")
    rest = {key: value for key, value in response.items() if key not in {"id", "created_at"}}
    rest["completed_at"] = rest["completed_at"] is not None
    rest["output"] = []
    for item in response["output"]:
        prefix = PREFIXES[item["type"]]
        assert item["id"].startswith(prefix)
        rest["output"].append({k: v for k, v in item.items() if k not in {"id", "call_id"}})
    return rest
