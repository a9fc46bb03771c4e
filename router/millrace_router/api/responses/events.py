"""Builds OpenAI's responses from their requests and their tokens: in one piece, and as events in OpenAI's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import orjson

from millrace_router.api.chat.choice import (
    ChatCompletionLogprobJson,
    ChatDelta,
    ChoiceText,
    ReadChoice,
    Thought,
    parts_of,
)
from millrace_router.api.chat.stream import EventStream
from millrace_router.api.responses.items import (
    GrowingCall,
    GrowingCustomCall,
    GrowingMessage,
    GrowingThought,
    named_id,
)
from millrace_router.api.responses.protocol import (
    ResponseErrorJson,
    ResponseItemJson,
    ResponseJson,
    ResponseReasoningJson,
    ResponseUsageJson,
)
from millrace_router.api.responses.request import ResponsesReasoning, ResponsesRequest
from millrace_router.api.responses.tools import LeftOutTool
from millrace_router.engine.generation import Generation, Usage
from millrace_router.errors import Overloaded, RouterError
from millrace_router.request.float32 import shortest
from millrace_router.request.names import Names
from millrace_router.server.sse import named_event
from millrace_router.tool_calls.tool import CallDelta
from millrace_router.validation.sampling_defaults import NO_DEFAULTS, SamplingDefaults

ResponseEvent = dict[str, Any]
"""A `ResponseEventJson`."""


class ResponseHead:
    """The parts of a response that are known before its first token: its id, and the request with its defaults."""

    def __init__(
        self,
        body: ResponsesRequest,
        *,
        model: str,
        names: Names,
        defaults: SamplingDefaults = NO_DEFAULTS,
        is_stored: bool = False,
    ) -> None:
        """`model` is the name to answer with, and `defaults` are the model's."""
        self.called_as = {tool.name: tool.called_as for tool in body.offered}
        """How tools are named in the answer, by the names that the model knows."""
        self.names = names
        self._json: ResponseJson = {
            "id": named_id(names, "resp"),
            "object": "response",
            "created_at": names.created,
            "status": "in_progress",
            "completed_at": None,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": _reasoning(body),
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": is_stored,
            "temperature": _number(body.temperature, defaults.temperature),
            "text": {"format": _format(body)},
            "tool_choice": _choice(body),
            "tools": [
                tool.repeated() for tool in body.tools or () if not isinstance(tool, LeftOutTool)
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": _number(body.top_p, defaults.top_p),
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def begun(self) -> ResponseJson:
        """Render the response while it is generated."""
        return self._json

    def ended(
        self, output: list[ResponseItemJson], usage: Usage, finish_reason: str
    ) -> ResponseJson:
        """Render the whole response, which is incomplete if it was cut off."""
        incomplete = is_cut(finish_reason)
        return {
            **self._json,
            "status": "incomplete" if incomplete else "completed",
            "completed_at": None if incomplete else self.names.end(),
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "output": output,
            "usage": usage_json(usage),
        }

    def failed(self, output: list[ResponseItemJson], error: RouterError) -> ResponseJson:
        """Render a response that failed, with its items so far."""
        return {**self._json, "status": "failed", "output": output, "error": _error(error)}


def is_cut(finish_reason: str) -> bool:
    """Whether a limit of tokens ended the answer."""
    return finish_reason == "length"


def usage_json(usage: Usage) -> ResponseUsageJson:
    """Render token counts; writes to the prefix cache are not counted."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error(error: RouterError) -> ResponseErrorJson:
    is_load = isinstance(error, Overloaded)
    return {
        "code": "rate_limit_exceeded" if is_load else "server_error",
        "message": str(error),
    }


def _number(value: float | None, default: float | None) -> float:
    """Render a number as the client wrote it, or the default; 1 restricts nothing."""
    value = default if value is None else value
    return 1.0 if value is None else shortest(value) or 0.0


def _format(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True)


def _reasoning(body: ResponsesRequest) -> ResponseReasoningJson:
    reasoning = body.reasoning or ResponsesReasoning()
    return {"effort": reasoning.effort, "summary": reasoning.summary}


def _choice(body: ResponsesRequest) -> str | dict[str, Any]:
    if body.tool_choice is None:
        return "auto"
    choice = body.tool_choice
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


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
        return self._num_events > 0

    def begin(self) -> Iterator[ResponseEvent]:
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
        if not self.has_begun:
            yield from self.begin()
        yield self._event("error", code=error.error_type, message=str(error), param=None)
        output = self._output if self._open is None else [*self._output, self._item("incomplete")]
        yield self._event("response.failed", response=self._head.failed(output, error))

    def _push_thought(self, thought: str) -> Iterator[ResponseEvent]:
        self._logprobs.clear()
        if not isinstance(self._open, GrowingThought):
            yield from self._close("completed")
            self._open = GrowingThought(self._new_id("rs"))
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
            if called_as.is_custom:
                self._open = GrowingCustomCall(delta.id, called_as, self._new_id("ctc"))
            else:
                self._open = GrowingCall(delta.id, called_as, self._new_id("fc"))
            yield self._of_item("response.output_item.added", self._item("in_progress"))
        if isinstance(self._open, GrowingCustomCall):
            if text := self._open.push(delta.arguments):
                yield self._in_item("response.custom_tool_call_input.delta", delta=text)
        elif delta.arguments:
            assert isinstance(self._open, GrowingCall)
            self._open.arguments.append(delta.arguments)
            yield self._in_item("response.function_call_arguments.delta", delta=delta.arguments)
        assert isinstance(self._open, GrowingCall | GrowingCustomCall)
        self._open.is_whole |= delta.is_last

    def _open_message(self) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        message = self._open = GrowingMessage(self._new_id("msg"))
        yield self._of_item("response.output_item.added", message.json("in_progress", ()))
        yield self._of_text("response.content_part.added", part=message.part())

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[ResponseEvent]:
        """End the open item, if there is one; a call that is not whole is never completed."""
        if self._open is None:
            return
        is_broken = False
        if isinstance(self._open, GrowingCall | GrowingCustomCall):
            is_broken = not self._open.is_whole
            status = "incomplete" if is_broken else "completed"
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
        elif is_broken:
            pass
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
        assert self._open is not None
        if isinstance(self._open, GrowingCall | GrowingCustomCall):
            return self._open.json(status)
        if isinstance(self._open, GrowingThought):
            return self._open.json(status, (self._open.part(),))
        return self._open.json(status, (self._open.part(),))

    def _new_id(self, prefix: Literal["msg", "fc", "ctc", "rs"]) -> str:
        return named_id(self._head.names, prefix, len(self._output))

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


class ResponseStream(EventStream):
    """Frames a response."""

    def __init__(self, generation: Generation, text: ChoiceText, events: ResponseEvents) -> None:
        super().__init__(generation, text)
        self._events = events
        self._failure: bytes | None = None

    def failure(self, error: RouterError) -> bytes:
        """Frame a failure in mid-stream; the frame is the same for all connections that read the stream."""
        if self._failure is None:
            self._failure = b"".join(_framed(self._events.fail(error)))
        return self._failure

    def _begin(self) -> Iterator[bytes]:
        return _framed(self._events.begin())

    def _push(self, delta: ChatDelta) -> Iterator[bytes]:
        return _framed(self._events.push(delta))

    def _end(self, delta: ChatDelta, finish_reason: str) -> Iterator[bytes]:
        self._send(self._push(delta))
        usage = self._generation.usage(delta.num_tokens, self._text.reasoning_tokens)
        yield from _framed(self._events.end(usage, finish_reason))


def _framed(events: Iterable[ResponseEvent]) -> Iterator[bytes]:
    return (named_event(event["type"], orjson.dumps(event)) for event in events)


def response_json(events: ResponseEvents, choice: ReadChoice) -> ResponseJson:
    """Render a whole response in one piece; `events` are new."""
    for delta in choice.deltas:
        for _ in events.push(delta):
            pass
    *_, end = events.end(choice.usage, choice.finish_reason)
    response: ResponseJson = end["response"]
    return response
