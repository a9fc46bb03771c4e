"""What is rendered by hand for speed equals the JSON writer's rendering of the same answer."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from millrace_router.api.completion_answers import completion_choice
from millrace_router.api.native import plain_event, stream_json
from millrace_router.api.openai_answers import AnswerHead, ChunkTemplate, Piece, chat_chunk
from millrace_router.events import Token, TokenEvent

TEXTS = st.text() | st.sampled_from(
    ['"', "\\", "%b%d{}", "\0\x1f\x7f", "\u2028é好😀", "\r\n\t", ""]
)
FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-45, -1.3242188])


@given(st.integers(1, 2**40), st.integers(0, 2**32 - 1), TEXTS, FLOATS, st.booleans())
@example(1, 5, "x", float("nan"), True)
def test_a_token(index: int, id_: int, text: str, logprob: float, special: bool) -> None:
    event = TokenEvent(index, Token(id_, text, logprob, special))
    assert plain_event(event) == orjson.dumps(stream_json(event))


@given(TEXTS, TEXTS)
def test_a_chunk_of_a_chat(text: str, model: str) -> None:
    head = AnswerHead("chat.completion", "chatcmpl", model=model, fingerprint="1-native")

    def render(text: str) -> Mapping[str, object]:
        return chat_chunk(head, Piece(text, None, 1, None))

    assert ChunkTemplate(render).fill(text) == orjson.dumps(render(text))


@given(TEXTS, TEXTS, st.integers(0, 3))
def test_a_chunk_of_a_completion(text: str, model: str, index: int) -> None:
    head = AnswerHead("text_completion", "cmpl", model=model, fingerprint="1-native")

    def render(text: str) -> Mapping[str, object]:
        return {**head.json(), "choices": [completion_choice(index, text, "")]}

    assert ChunkTemplate(render).fill(text) == orjson.dumps(render(text))
