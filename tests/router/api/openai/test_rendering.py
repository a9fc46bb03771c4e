"""Chunks rendered from templates equal the JSON writer's rendering of the same answer."""

from __future__ import annotations

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from millrace_router.api.chat.choice import ChatDelta
from millrace_router.api.chat.stream import ChunkTemplate
from millrace_router.api.openai.completion_stream import CompletionChunks
from millrace_router.api.openai.completion_text import CompletionDelta
from millrace_router.api.openai.render import ChatRenderer, ResponseMeta
from millrace_router.api.tgi.answers import plain_frame, stream_json
from millrace_router.engine.generation import Usage
from millrace_router.request.dialect import dialect_of
from millrace_router.request.events import Token, TokenEvent
from millrace_router.server.sse import event

TEXTS = st.text() | st.sampled_from(
    ['"', "\\", "%b%d{}", "\0\x1f\x7f", "\u2028é好😀", "\r\n\t", ""]
)
FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-45, -1.3242188])


@given(st.integers(1, 2**40), st.integers(0, 2**32 - 1), TEXTS, FLOATS, st.booleans())
@example(1, 5, "x", float("nan"), True)
def test_a_plain_token_frame_equals_the_rendered_one(
    index: int, id_: int, text: str, logprob: float, special: bool
) -> None:
    token = TokenEvent(index, Token(id_, text, logprob, special))
    assert plain_frame(token) == event(orjson.dumps(stream_json(token)))


@given(TEXTS.filter(bool), TEXTS, st.integers(0, 3), st.booleans())
def test_a_templated_chat_chunk_equals_the_rendered_one(
    text: str, model: str, index: int, strict_tgi: bool
) -> None:
    head = ResponseMeta("chat.completion", "chatcmpl", model=model, fingerprint="1-native")
    answers = ChatRenderer(head, dialect_of(strict_tgi=strict_tgi))
    template = ChunkTemplate(lambda text: answers.text_chunk(index, text))
    (chunk,) = answers.chunks(index, ChatDelta(text, None, 1, None))
    assert template.fill(text) == orjson.dumps(chunk)
    framed = ChunkTemplate(lambda text: answers.text_chunk(index, text), frame=event)
    assert framed.fill(text) == event(orjson.dumps(chunk))


@given(TEXTS, TEXTS, st.integers(0, 3), st.booleans())
def test_a_templated_completion_chunk_equals_the_rendered_one(
    text: str, model: str, index: int, strict_tgi: bool
) -> None:
    head = ResponseMeta("text_completion", "cmpl", model=model, fingerprint="1-native")
    chunks = CompletionChunks(
        head,
        includes_usage=False,
        continuous_usage=False,
        dialect=dialect_of(strict_tgi=strict_tgi),
    )
    chunk = chunks.chunk(index, CompletionDelta(text, None, 1, None), Usage(1, 1))
    template = ChunkTemplate(lambda text: chunks.text_chunk(index, text))
    assert template.fill(text) == orjson.dumps(chunk)
