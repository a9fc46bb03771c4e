"""A message of Anthropic's as a client reads its stream: what the events add up to, by the rules of its clients."""

from __future__ import annotations

import json
from typing import Any


def events_in(body: str) -> list[tuple[str, Any]]:
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
