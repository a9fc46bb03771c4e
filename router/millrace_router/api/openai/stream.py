"""A chat as a stream of chunks."""

from __future__ import annotations

import orjson

from millrace_router.api.chat.choice import ChoiceText, reader
from millrace_router.api.chat.start import ChatRun
from millrace_router.api.chat.stream import ChoiceStream, ChunkTemplate, OpenChoices
from millrace_router.api.openai.protocol import ChatCompletionChunkJson
from millrace_router.api.openai.render import ChatRenderer, chat_renderer
from millrace_router.api.openai.request import ChatCompletionRequest
from millrace_router.engine.generation import Generation
from millrace_router.request.token_stream import TokenEvent
from millrace_router.server.sse import DONE
from millrace_router.server.sse import event as framed


class ChatStream(ChoiceStream):
    """Frames the chunks of one choice."""

    def __init__(
        self,
        index: int,
        generation: Generation,
        text: ChoiceText,
        renderer: ChatRenderer,
        choices: OpenChoices,
        *,
        is_plain: bool,
        continuous_usage: bool,
    ) -> None:
        """With `is_plain`, a token that does not end its choice adds nothing but thought, text and calls.

        With `continuous_usage` every token's chunk has the usage of its choice so far, in which the prompt is
        counted only with the first choice.
        """
        super().__init__(generation, choices)
        self._index = index
        self._text = text
        self._renderer = renderer
        self._continuous_usage = continuous_usage
        self._frame_thought = ChunkTemplate(
            lambda text: renderer.thought_chunk(index, text), frame=framed
        ).fill
        self._frame = ChunkTemplate(
            lambda text: renderer.text_chunk(index, text), frame=framed
        ).fill
        self._is_plain = is_plain and not continuous_usage
        self._has_begun = False
        self._is_verbatim = False

    def token(self, event: TokenEvent) -> None:
        """Frame what the token adds, after the role if it is the first."""
        token = event.token
        if self._is_verbatim and event.finished is None and not token.special:
            # Nearly every token comes this way.
            self._sink.token(self._frame(token.text))
            return
        delta = self._text.push(event)
        if not self._has_begun:
            self._has_begun = True
            self._is_verbatim = self._is_plain and self._text.is_verbatim
            ids = self._generation.valid.input_ids if self._text.has_token_ids else None
            opening = self._renderer.opening(self._index, ids)
            if opening is not None:
                self._send(opening)
        if self._is_plain and delta.finish_reason is None and not delta.calls:
            if delta.thought:
                self._sink.token(self._frame_thought(delta.thought))
            if delta.text or not (delta.thought or self._text.may_call):
                self._sink.token(self._frame(delta.text))
            return
        usage = self._generation.usage(delta.num_tokens, self._text.reasoning_tokens)
        continuous = usage if self._continuous_usage else None
        for chunk in self._renderer.chunks(self._index, delta, continuous):
            self._send(chunk)
        if delta.finish_reason is not None:
            self._finish_choice(usage)

    def _send(self, chunk: ChatCompletionChunkJson) -> None:
        self._sink.token(framed(orjson.dumps(chunk)))


def chat_streams(run: ChatRun, body: ChatCompletionRequest) -> list[ChatStream]:
    renderer = chat_renderer(run.services, body, run.chat.names)
    choices = OpenChoices(
        len(run.generations),
        renderer.usage_chunk if body.includes_usage else None,
        # TGI's old clients read the end of a stream as JSON.
        end=() if body.is_of_old_client else (DONE,),
    )
    return [
        ChatStream(
            index,
            generation,
            reader(run.chat, index),
            renderer,
            choices,
            is_plain=run.chat.is_plain,
            continuous_usage=body.continuous_usage,
        )
        for index, generation in enumerate(run.generations)
    ]
