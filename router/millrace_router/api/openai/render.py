"""Answers and chunks of OpenAI's routes, as plain dictionaries for the JSON writer, in TGI's key order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from millrace_router.api.chat.choice import (
    LEAST_LOGPROB,
    STOP,
    TOOL_CALLS,
    ChatCompletionLogprobJson,
    ChatDelta,
    token_ids,
)
from millrace_router.api.chat.route import fingerprint, model_name
from millrace_router.api.chat.start import ChatRun
from millrace_router.api.openai.protocol import (
    ChatCompletionChoiceJson,
    ChatCompletionChunkJson,
    ChatCompletionCompleteJson,
    ChatCompletionDeltaJson,
    ChatCompletionJson,
    DeltaToolCallJson,
    FunctionJson,
    HeadJson,
    OutputMessageJson,
    PromptLogprobJson,
    TextDeltaJson,
    ThoughtDeltaJson,
    ThoughtsJson,
    ToolCallDeltaJson,
    UsageJson,
)
from millrace_router.api.openai.request import ChatCompletionRequest
from millrace_router.engine.generation import Usage
from millrace_router.request.float32 import shortest
from millrace_router.request.limits import MILLRACE, Dialect
from millrace_router.request.names import Names
from millrace_router.request.token_stream import PromptLogprobs
from millrace_router.server.services import Services
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.tool_calls.tool import CallDelta

CHUNK = "chat.completion.chunk"
ROLE = "assistant"


def usage_json(usage: Usage) -> UsageJson:
    counts: UsageJson = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return counts


class ResponseMeta:
    """The first keys of every answer and chunk of one request."""

    def __init__(
        self,
        object_name: str,
        id_prefix: str,
        *,
        model: str,
        fingerprint: str,
        names: Names,
        anonymous: bool = False,
    ) -> None:
        """With `anonymous` the id is "", as TGI's is."""
        self._json: HeadJson = {
            "object": object_name,
            "id": "" if anonymous else f"{id_prefix}-{names.digits('answer', 16)}",
            "created": names.created,
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def json(self, object_name: str | None = None) -> HeadJson:
        """Render; `object_name` replaces the usual `object`."""
        return {**self._json, "object": object_name or self._json["object"]}


def response_meta(
    services: Services, object_name: str, id_prefix: str, model: str | None, names: Names
) -> ResponseMeta:
    """Return the first keys of an answer to a request that names `model`."""
    return ResponseMeta(
        object_name,
        id_prefix,
        model=model_name(services, model),
        fingerprint=fingerprint(services),
        names=names,
        anonymous=services.dialect.hides_ids,
    )


def prompt_logprobs_json(
    prompt: PromptLogprobs, num_candidates: int, tokenizer: Tokenizer
) -> list[dict[str, PromptLogprobJson] | None]:
    """Render a map from ids to log probabilities for each token, null for the first; the token's own comes first."""
    rendered: list[dict[str, PromptLogprobJson] | None] = [None]
    for index, id_ in enumerate(prompt.ids[1:], start=1):
        likeliest = list(prompt.candidates(index))[:num_candidates]
        ranks = {candidate: rank for rank, (candidate, _) in enumerate(likeliest, start=1)}
        pairs = {id_: prompt.logprobs[index], **dict(likeliest)}
        rendered.append(
            {
                str(one): {
                    "logprob": _number(logprob),
                    "rank": ranks.get(one),
                    "decoded_token": tokenizer.token_text(one),
                }
                for one, logprob in pairs.items()
            }
        )
    return rendered


def _number(logprob: float) -> float:
    number = shortest(logprob)
    return LEAST_LOGPROB if number is None else number


class ChatRenderer:
    """Renders the answer to one request in its dialect."""

    def __init__(self, meta: ResponseMeta, dialect: Dialect = MILLRACE) -> None:
        self._meta = meta
        self._dialect = dialect

    def opening(
        self, index: int, prompt_ids: Sequence[int] | None = None
    ) -> ChatCompletionChunkJson | None:
        """Render what precedes the first chunk of the choice `index`, with `prompt_ids` also the prompt's tokens."""
        if self._dialect.repeats_role and prompt_ids is None:
            return None
        chunk = self._chunk(index, {"role": ROLE, "content": ""})
        if prompt_ids is not None:
            chunk["prompt_token_ids"] = list(prompt_ids)
        return chunk

    def text_chunk(self, index: int, text: str) -> ChatCompletionChunkJson:
        """Render a chunk with nothing but text."""
        return self._chunk(index, self._text_delta(text))

    def thought_chunk(self, index: int, thought: str) -> ChatCompletionChunkJson:
        """Render a chunk with nothing but thought."""
        return self._chunk(index, self._thought(thought))

    def chunks(
        self, index: int, delta: ChatDelta, usage: Usage | None = None
    ) -> list[ChatCompletionChunkJson]:
        """Render the chunks of any delta: none if it has nothing to send, and one for each call in it.

        A finish reason comes in a chunk after all calls, because clients end a call when they read it.
        """
        parts = self._parts(delta)
        if delta.finish_reason is not None and (delta.calls or not parts):
            is_call = delta.finish_reason == TOOL_CALLS and not self._dialect.stops_after_calls
            parts.append({} if is_call else self._text_delta(""))
        if not parts and (
            delta.logprobs is not None or usage is not None or delta.token_id is not None
        ):
            parts.append(self._text_delta(""))
        last = len(parts) - 1
        return [
            self._chunk(
                index,
                part,
                logprobs=None if number else delta.logprobs,
                finish_reason=self._reason(delta.finish_reason) if number == last else None,
                usage=usage,
                token_id=None if number else delta.token_id,
            )
            for number, part in enumerate(parts)
        ]

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunkJson:
        """Render the chunk after the last token."""
        return {**self._meta.json(CHUNK), "choices": [], "usage": usage_json(usage)}

    def choice(self, index: int, deltas: Sequence[ChatDelta]) -> ChatCompletionCompleteJson:
        """Render a choice in one piece."""
        logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
        choice: ChatCompletionCompleteJson = {
            "index": index,
            "message": self._message(deltas),
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": self._reason(deltas[-1].finish_reason),
        }
        if deltas[0].token_id is not None:
            choice["token_ids"] = token_ids(deltas)
        return choice

    def answer(
        self,
        choices: list[ChatCompletionCompleteJson],
        usage: Usage,
        prompt_ids: Sequence[int] | None = None,
    ) -> ChatCompletionJson:
        """Render all choices; with `prompt_ids` also the prompt's tokens."""
        answer: ChatCompletionJson = {
            **self._meta.json(),
            "choices": choices,
            "usage": usage_json(usage),
        }
        if prompt_ids is not None:
            answer["prompt_token_ids"] = list(prompt_ids)
        return answer

    def _chunk(
        self,
        index: int,
        delta: ChatCompletionDeltaJson,
        *,
        logprobs: ChatCompletionLogprobJson | None = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
        token_id: int | None = None,
    ) -> ChatCompletionChunkJson:
        choice: ChatCompletionChoiceJson = {
            "index": index,
            "delta": self._delta(delta),
            "logprobs": None if logprobs is None else {"content": [logprobs]},
            "finish_reason": finish_reason,
        }
        if token_id is not None:
            choice["token_ids"] = [token_id]
        return {
            **self._meta.json(CHUNK),
            "choices": [choice],
            "usage": None if usage is None else usage_json(usage),
        }

    def _delta(self, delta: ChatCompletionDeltaJson) -> ChatCompletionDeltaJson:
        return delta

    def _reason(self, reason: str | None) -> str | None:
        return STOP if reason == TOOL_CALLS and self._dialect.stops_after_calls else reason

    def _text_delta(self, text: str) -> TextDeltaJson:
        return {"role": ROLE, "content": text} if self._dialect.repeats_role else {"content": text}

    def _thought(self, text: str) -> ThoughtDeltaJson:
        thought: ThoughtDeltaJson = {"reasoning_content": text, "reasoning": text}
        return {"role": ROLE, **thought} if self._dialect.repeats_role else thought

    def _parts(self, delta: ChatDelta) -> list[ChatCompletionDeltaJson]:
        parts: list[ChatCompletionDeltaJson] = []
        if delta.thought:
            parts.append(self._thought(delta.thought))
        if delta.text:
            parts.append(self._text_delta(delta.text))
        for call in self._pieces(delta.calls):
            called: ToolCallDeltaJson = {"tool_calls": [self._called(call)]}
            parts.append({"role": ROLE, **called} if self._dialect.repeats_role else called)
        return parts

    def _pieces(self, calls: Sequence[CallDelta]) -> Iterator[CallDelta]:
        """Yield a piece of each call; as with OpenAI, the arguments follow the piece with the name."""
        for call in _joined(calls):
            if call.name is None or self._dialect.repeats_role:
                yield call
            else:
                yield replace(call, arguments="")
                if call.arguments:
                    yield replace(call, id=None, name=None)

    def _called(self, call: CallDelta) -> DeltaToolCallJson:
        if call.name is None:
            return {"index": call.index, "function": _function(call)}
        return {
            "index": call.index,
            "id": self._id(call),
            "type": "function",
            "function": _function(call),
        }

    def _id(self, call: CallDelta) -> str:
        return str(call.index) if self._dialect.numbers_calls else call.id or ""

    def _message(self, deltas: Sequence[ChatDelta]) -> OutputMessageJson:
        text = "".join(delta.text for delta in deltas)
        calls = _joined([call for delta in deltas for call in delta.calls])
        thought = "".join(delta.thought for delta in deltas)
        thoughts: ThoughtsJson = (
            {"reasoning_content": thought, "reasoning": thought} if thought else {}
        )
        if not calls:
            return {"role": ROLE, "content": text, **thoughts}
        return {
            "role": ROLE,
            "content": text or None,
            **thoughts,
            "tool_calls": [
                {
                    "id": self._id(call),
                    "type": "function",
                    "function": {
                        "description": None,
                        "name": call.name or "",
                        "arguments": call.arguments,
                    },
                }
                for call in calls
            ],
        }


class OldChatRenderer(ChatRenderer):
    """Chunks for TGI's old clients, which want a role, and a call or null, in each of them."""

    def _delta(self, delta: ChatCompletionDeltaJson) -> ChatCompletionDeltaJson:
        old: dict[str, Any] = {"content": None, "tool_calls": None, **delta, "role": ROLE}
        # Each chunk has one call at most.
        for call in old["tool_calls"] or ():
            function = {"name": None, **call["function"]}
            old["tool_calls"] = {"id": "", "type": "function", **call, "function": function}
        return cast("ChatCompletionDeltaJson", old)


def _joined(parts: Sequence[CallDelta]) -> list[CallDelta]:
    """Join the deltas of each call; calls are in the order in which they begin."""
    calls: dict[int, CallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in parts:
        calls.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [replace(call, arguments="".join(arguments[index])) for index, call in calls.items()]


def _function(call: CallDelta) -> FunctionJson:
    if call.name is None:
        return {"arguments": call.arguments}
    return {"name": call.name, "arguments": call.arguments}


def chat_renderer(services: Services, body: ChatCompletionRequest, names: Names) -> ChatRenderer:
    """Return the renderer of the answer to `body`."""
    meta = response_meta(services, "chat.completion", "chatcmpl", body.model, names)
    renderer = OldChatRenderer if body.is_of_old_client else ChatRenderer
    return renderer(meta, services.dialect)


async def chat_answer(
    run: ChatRun, body: ChatCompletionRequest
) -> tuple[ChatCompletionJson, Usage]:
    """Read a chat to its end, and render it in one piece; raises RouterError."""
    renderer = chat_renderer(run.services, body, run.chat.names)
    choices = await run.read()
    usage = sum((choice.usage for choice in choices), Usage())
    first = run.generations[0]
    answer = renderer.answer(
        [renderer.choice(index, choice.deltas) for index, choice in enumerate(choices)],
        usage,
        first.valid.input_ids if body.has_token_ids else None,
    )
    if body.logprobs:
        for choice in answer["choices"]:
            # The token that ends the answer may be its only one.
            choice["logprobs"] = choice["logprobs"] or {"content": []}
    if body.prompt_logprobs is not None and first.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs_json(
            first.prompt_logprobs, body.prompt_logprobs, run.services.tokenizer
        )
    return answer, usage
