"""The events of a streamed message, in Anthropic's order."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from millrace_router.api.anthropic.answers import (
    MessageHead,
    end_json,
    signature,
    tool_use_block,
    usage_json,
)
from millrace_router.api.anthropic.protocol import (
    BlockJson,
    InputJsonDeltaJson,
    MessageEventJson,
    SignatureDeltaJson,
    ThinkingDeltaJson,
)
from millrace_router.api.openai.answers import ChunkTemplate
from millrace_router.api.openai.choice import ChatDelta, Thought, parts_of
from millrace_router.engine.generation import Usage
from millrace_router.tool_calls.tool import CallDelta

NamedJson = tuple[str, bytes]
"""Name of an event, and its data."""
TEXT = -1
"""Stands for the text block, where calls have their index."""
THOUGHT = -2
"""Stands for the block of a thought."""


class MessageEvents:
    """Renders a message delta by delta; one block is open at a time."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._num_blocks = 0
        self._open: int | None = None
        self._text: ChunkTemplate
        self._thoughts: list[str] = []
        """Parts of the open thought."""

    def start(self, usage: Usage) -> Iterator[NamedJson]:
        """Yield the first events; `usage` has the prompt's tokens."""
        yield _named({"type": "message_start", "message": self._head.json(usage)})
        yield _named({"type": "ping"})

    def push(self, delta: ChatDelta) -> Iterator[NamedJson]:
        """Yield what one token adds, if anything."""
        for part in parts_of(delta):
            if isinstance(part, Thought):
                yield from self._push_thought(part)
            elif isinstance(part, CallDelta):
                yield from self._push_call(part)
            else:
                yield from self._push_text(part)

    def finish(self, finish_reason: str, stop: str | None, usage: Usage) -> Iterator[NamedJson]:
        """Yield the last events, after the last delta was pushed."""
        yield from self._close()
        end = end_json(finish_reason, stop)
        yield _named({"type": "message_delta", "delta": end, "usage": usage_json(usage)})
        yield _named({"type": "message_stop"})

    def _push_thought(self, thought: str) -> Iterator[NamedJson]:
        if self._open != THOUGHT:
            yield from self._begin(THOUGHT, {"type": "thinking", "thinking": "", "signature": ""})
            self._thoughts = []
        self._thoughts.append(thought)
        yield self._delta({"type": "thinking_delta", "thinking": thought})

    def _push_text(self, text: str) -> Iterator[NamedJson]:
        if self._open != TEXT:
            yield from self._begin(TEXT, {"type": "text", "text": ""})
            index = self._num_blocks - 1
            self._text = ChunkTemplate(lambda text: _text_delta(index, text))
        yield "content_block_delta", self._text.fill(text)

    def _push_call(self, delta: CallDelta) -> Iterator[NamedJson]:
        if self._open != delta.index:
            yield from self._begin(delta.index, tool_use_block(delta))
        if delta.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})

    def _delta(
        self, json: ThinkingDeltaJson | SignatureDeltaJson | InputJsonDeltaJson
    ) -> NamedJson:
        return _named({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": json})

    def _begin(self, kind: int, block: BlockJson) -> Iterator[NamedJson]:
        yield from self._close()
        yield _named(
            {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        )
        self._open = kind
        self._num_blocks += 1

    def _close(self) -> Iterator[NamedJson]:
        if self._open == THOUGHT:
            signed = signature("".join(self._thoughts))
            yield self._delta({"type": "signature_delta", "signature": signed})
        if self._open is not None:
            yield _named({"type": "content_block_stop", "index": self._num_blocks - 1})
            self._open = None


def _text_delta(index: int, text: str) -> MessageEventJson:
    return {
        "type": "content_block_delta",
        "index": index,
        "delta": {"type": "text_delta", "text": text},
    }


def _named(json: MessageEventJson) -> NamedJson:
    return json["type"], orjson.dumps(json)
