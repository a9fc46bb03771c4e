"""Keyed requests on every route that streams, and what their clients have read."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 60}, "number": {"type": "integer"}},
    "required": ["text", "number"],
}
TURN = [{"role": "user", "content": "What is a shard?"}]
FUNCTION = {"name": "explain", "parameters": SCHEMA}
LONG = {"max_tokens": 120, "stream": True, "ignore_eos": True}
SAMPLED = {"max_new_tokens": 120, "do_sample": True, "ignore_eos": True, "details": True}
NUM_EVENTS = 8
"""Events that each client has read before `has_read`."""
SECONDS = 120


@dataclass
class Client:
    """One keyed request, and what its client has read."""

    path: str
    body: Mapping[str, Any]
    number: int
    text: bytes = b""
    status: int = 0
    is_keyed: bool = True
    has_read: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_events(self) -> int:
        """Events that have been read as a whole; of a keyed request, those with an id."""
        begin = b"id: " if self.is_keyed else b""
        return sum(event.startswith(begin) for event in self.text.split(b"\n\n")[:-1])

    def headers(self, key: str) -> dict[str, str]:
        name = f"1764336814-{self.number:032x}"
        keys = {"idempotency-key": f"{key}-{self.number}"} if self.is_keyed else {}
        return keys | {"x-millrace-stream": name}

    async def read(self, http: httpx.AsyncClient, key: str, last: int = 0) -> None:
        """Read from behind the event `last` on; a connection that breaks is no error."""
        headers = self.headers(key) | ({"last-event-id": str(last)} if last else {})
        try:
            async with http.stream("POST", self.path, json=self.body, headers=headers) as answer:
                self.status = answer.status_code
                async for data in answer.aiter_raw():
                    self.text += data
                    if self.num_events >= NUM_EVENTS:
                        self.has_read.set()
        except httpx.TransportError:
            pass
        self.has_read.set()

    async def read_rest(self, http: httpx.AsyncClient, key: str) -> None:
        """Drop what follows the last event with an id, which comes again, and read on."""
        frames = [frame + b"\n\n" for frame in self.text.split(b"\n\n")[:-1]]
        events = [place for place, frame in enumerate(frames) if frame.startswith(b"id: ")]
        self.text = b"".join(frames[: events[-1] + 1]) if events else b""
        await self.read(http, key, len(events))


def bodies() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("/generate_stream", {"inputs": "What is a block?", "parameters": SAMPLED}),
        ("/generate_stream", {"inputs": "A", "parameters": {**SAMPLED, "top_n_tokens": 2}}),
        ("/v1/completions", {"prompt": ["A", "The"], "n": 2, "temperature": 1.0, **LONG}),
        ("/v1/chat/completions", {"messages": TURN, "logprobs": True, "temperature": 1.0, **LONG}),
        (
            "/v1/chat/completions",
            {
                "messages": TURN,
                "tools": [{"type": "function", "function": FUNCTION}],
                "tool_choice": "required",
                "max_tokens": 120,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        (
            "/v1/responses",
            {
                "input": "What is a shard?",
                "max_output_tokens": 120,
                "stream": True,
                "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
            },
        ),
        ("/v1/messages", {"messages": TURN, "max_tokens": 120, "stream": True}),
        ("/generate", {"inputs": "What is a block?", "parameters": SAMPLED}),
    ]


def clients(*, are_keyed: bool = True) -> list[Client]:
    return [
        Client(path, body, number, is_keyed=are_keyed)
        for number, (path, body) in enumerate(bodies())
    ]


NOT_THE_SAME = re.compile(
    '"(completed_at|cached_tokens|cache_read_input_tokens|input_tokens)":[0-9]+'
)
"""The time of the end; and counts of tokens in the prefix cache, which depend on the requests before."""


def choices_of(text: bytes) -> dict[int, list[str]]:
    """The data of the events of each choice; whole bodies under 0."""
    same = NOT_THE_SAME.sub("", text.decode())
    if "text_completion" not in same:
        return {0: [same]}
    made: dict[int, list[str]] = {}
    for data in re.findall("data: ({.*)", same):
        for choice in json.loads(data)["choices"]:
            made.setdefault(choice["index"], []).append(data)
    return made


def ids_of(text: bytes) -> list[int]:
    return [int(id_) for id_ in re.findall(rb"^id: (\d+)$", text, re.MULTILINE)]


async def read_all(url: str, key: str, *, are_keyed: bool = True) -> list[Client]:
    readers = clients(are_keyed=are_keyed)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as http:
        await asyncio.gather(*(client.read(http, key) for client in readers))
    assert {client.status for client in readers} == {200}, [client.text for client in readers]
    return readers
