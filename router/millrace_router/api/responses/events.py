"""The events of a streamed response, in OpenAI's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from millrace_router.api.openai.choice import ChatDelta, Thought, parts_of
from millrace_router.api.openai.protocol import ChatCompletionLogprobJson
from millrace_router.api.responses.answers import ResponseHead, is_cut
from millrace_router.api.responses.items import (
    GrowingCall,
    GrowingCustomCall,
    GrowingMessage,
    GrowingThought,
)
from millrace_router.api.responses.protocol import ResponseItemJson
from millrace_router.engine.generation import Usage
from millrace_router.errors import RouterError
from millrace_router.tool_calls.tool import CallDelta

ResponseEvent = dict[str, Any]
"""A `ResponseEventJson`."""


class ResponseEvents:
    """Builds a response, one item after the other; callers must exhaust the iterator of each call."""

    def __init__(
        self, head: ResponseHead, keep: Callable[[ResponseEvent], None] = lambda _: None
    ) -> None:
        """`keep` gets the response at its end, unless it failed."""
        self._head = head
        self._keep = keep
        self._num_events = 0
        self._output: list[ResponseItemJson] = []
        """Items that have ended."""
        self._open: GrowingThought | GrowingMessage | GrowingCall | GrowingCustomCall | None = None
        self._logprobs: list[ChatCompletionLogprobJson] = []
        """Log probabilities of tokens whose text has not come yet."""

    @property
    def has_begun(self) -> bool:
        """Whether there have been events."""
        return self._num_events > 0

    def begin(self) -> Iterator[ResponseEvent]:
        """Yield the first events."""
        response = self._head.begun()
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def push(self, delta: ChatDelta) -> Iterator[ResponseEvent]:
        """Yield what one token adds."""
        if delta.logprobs is not None:
            self._logprobs.append(delta.logprobs)
        for part in parts_of(delta):
            if isinstance(part, Thought):
                yield from self._push_thought(part)
            elif isinstance(part, CallDelta):
                yield from self._push_call(part)
            else:
                yield from self._push_text(part)

    def end(self, usage: Usage, finish_reason: str) -> Iterator[ResponseEvent]:
        """Yield the last events; a response without items gets an empty message."""
        if self._open is None:
            yield from self._open_message()
        incomplete = is_cut(finish_reason)
        yield from self._close("incomplete" if incomplete else "completed")
        name = "response.incomplete" if incomplete else "response.completed"
        response = self._head.ended(self._output, usage, finish_reason)
        self._keep(dict(response))
        yield self._event(name, response=response)

    def fail(self, error: RouterError) -> Iterator[ResponseEvent]:
        """Yield the events of a failure."""
        if not self.has_begun:
            yield from self.begin()
        yield self._event("error", code=error.error_type, message=str(error), param=None)
        output = self._output if self._open is None else [*self._output, self._item("incomplete")]
        yield self._event("response.failed", response=self._head.failed(output, error))

    def _push_thought(self, thought: str) -> Iterator[ResponseEvent]:
        self._logprobs.clear()
        if not isinstance(self._open, GrowingThought):
            yield from self._close("completed")
            self._open = GrowingThought()
            yield self._of_item("response.output_item.added", self._open.json("in_progress", ()))
            yield self._of_thought("response.reasoning_summary_part.added", part=self._open.part())
        self._open.texts.append(thought)
        yield self._of_thought("response.reasoning_summary_text.delta", delta=thought)

    def _push_text(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, GrowingMessage):
            yield from self._open_message()
        assert isinstance(self._open, GrowingMessage)
        self._open.texts.append(text)
        logprobs, self._logprobs = self._logprobs, []
        self._open.logprobs.extend(logprobs)
        yield self._of_text("response.output_text.delta", delta=text, logprobs=logprobs)

    def _push_call(self, delta: CallDelta) -> Iterator[ResponseEvent]:
        self._logprobs.clear()
        if delta.id is not None:
            yield from self._close("completed")
            called_as = self._head.called_as[delta.name or ""]
            kind = GrowingCustomCall if called_as.is_custom else GrowingCall
            self._open = kind(delta.id, called_as)
            yield self._of_item("response.output_item.added", self._item("in_progress"))
        if isinstance(self._open, GrowingCustomCall):
            if text := self._open.push(delta.arguments):
                yield self._in_item("response.custom_tool_call_input.delta", delta=text)
        elif delta.arguments:
            assert isinstance(self._open, GrowingCall)
            self._open.arguments.append(delta.arguments)
            yield self._in_item("response.function_call_arguments.delta", delta=delta.arguments)

    def _open_message(self) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        message = self._open = GrowingMessage()
        yield self._of_item("response.output_item.added", message.json("in_progress", ()))
        yield self._of_text("response.content_part.added", part=message.part())

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[ResponseEvent]:
        """End the open item, if there is one."""
        if self._open is None:
            return
        item = self._item(status)
        if item["type"] == "reasoning":
            (thought,) = item["summary"]
            yield self._of_thought("response.reasoning_summary_text.done", text=thought["text"])
            yield self._of_thought("response.reasoning_summary_part.done", part=thought)
        elif item["type"] == "message":
            (part,) = item["content"]
            text, logprobs = part["text"], part["logprobs"]
            yield self._of_text("response.output_text.done", text=text, logprobs=logprobs)
            yield self._of_text("response.content_part.done", part=part)
        elif item["type"] == "custom_tool_call":
            yield self._in_item("response.custom_tool_call_input.done", input=item["input"])
        else:
            name, arguments = item["name"], item["arguments"]
            yield self._in_item(
                "response.function_call_arguments.done", name=name, arguments=arguments
            )
        yield self._of_item("response.output_item.done", item)
        self._output.append(item)
        self._open = None

    def _item(self, status: Literal["in_progress", "completed", "incomplete"]) -> ResponseItemJson:
        """Render the open item."""
        assert self._open is not None
        if isinstance(self._open, GrowingCall | GrowingCustomCall):
            return self._open.json(status)
        if isinstance(self._open, GrowingThought):
            return self._open.json(status, (self._open.part(),))
        return self._open.json(status, (self._open.part(),))

    def _of_item(self, type_: str, item: ResponseItemJson) -> ResponseEvent:
        return self._event(type_, output_index=len(self._output), item=item)

    def _in_item(self, type_: str, **fields: object) -> ResponseEvent:
        assert self._open is not None
        return self._event(type_, item_id=self._open.id, output_index=len(self._output), **fields)

    def _of_text(self, type_: str, **fields: object) -> ResponseEvent:
        return self._in_item(type_, content_index=0, **fields)

    def _of_thought(self, type_: str, **fields: object) -> ResponseEvent:
        return self._in_item(type_, summary_index=0, **fields)

    def _event(self, type_: str, **fields: object) -> ResponseEvent:
        number = self._num_events
        self._num_events += 1
        return {"type": type_, "sequence_number": number, **fields}
