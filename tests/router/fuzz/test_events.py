"""Whatever a model says arrives as it was said, for a reader that knows only the standard of server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.text.detokenizer import IncrementalDetokenizer
from millrace_testing.router.edge import Edge, limits_with, play, serving
from millrace_testing.text.texts import tokenizer

SECONDS = 30.0
GRACE = 60.0
TEMPLATE = "{{ messages[0].content }}"
NASTY = st.sampled_from(
    [
        "\n", "\r", "\r\n", "\n\n", "\n\ndata: {}\n\n", "data: [DONE]\n\n", "event: x\n", "id: 1\n", ":", "\0",
        "\u0085", "\u2028", "\u2029", "\ufeff", "\ufffd", "\x7f", '"', "\\u0041", "😀", "👩‍💻", "",
    ]
)  # fmt: skip
TEXTS = st.lists(st.text(max_size=8) | NASTY, min_size=1, max_size=8)


def events_of(body: bytes) -> Iterator[tuple[str, str]]:
    """The last id and the data of each event, by the standard's own rules of interpretation."""
    data: list[str] = []
    last_id = ""
    text = body.decode().removeprefix("\ufeff")
    lines = re.split("\r\n|\n|\r", text)
    assert lines[-1] == "", "the last line is not ended"
    for line in lines[:-1]:
        field, _, value = line.partition(":")
        if line == "":
            if data:
                yield last_id, "\n".join(data)
            data.clear()
        elif field == "data":
            data.append(value.removeprefix(" "))
        elif field == "id":
            last_id = value.removeprefix(" ")
        else:
            assert field == "", f"an unexpected field: {line}"
    assert not data, "the last event is not ended"


class Wire:
    """One server for all examples; each example sets its answer."""

    def __init__(self, runner: asyncio.Runner, edge: Edge) -> None:
        self._runner = runner
        self._edge = edge

    def say(
        self, texts: list[str], path: str, body: dict[str, Any], **headers: str
    ) -> tuple[list[str], list[Any]]:
        """Last id at each event, and the events as JSON, after checking the end."""

        async def post() -> bytes:
            edge = self._edge

            def script(_: ValidRequest, stream: TokenStream) -> None:
                play(stream, *texts)

            edge.batcher.script = script
            asked = body | {"stream": True}
            async with (
                asyncio.timeout(SECONDS),
                edge.client.post(edge.url + path, json=asked, headers=headers) as answer,
            ):
                assert answer.status == 200, await answer.text()
                assert answer.content_type == "text/event-stream"
                return await answer.read()

        events = list(events_of(self._runner.run(post())))
        if path.startswith("/v1/"):
            assert events.pop()[1] == "[DONE]"
        return [last_id for last_id, _ in events], [json.loads(data) for _, data in events]


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        serve = serving(
            template=TEMPLATE, limits=limits_with(max_total_tokens=100), resume_grace=GRACE
        )
        yield Wire(runner, runner.run(stack.enter_async_context(serve)))
        runner.run(stack.aclose())


CHAT = {"messages": [{"role": "user", "content": "hello"}]}
STREAMS: dict[str, dict[str, Any]] = {
    "/generate_stream": {"inputs": "hello", "parameters": {"return_full_text": False}},
    "/": {"inputs": "hello", "parameters": {"return_full_text": False}},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hello"},
}


def text_of(path: str, event: Any) -> str:
    """The text that one event adds."""
    if path == "/v1/chat/completions":
        text = event["choices"][0]["delta"]["content"]
    elif path == "/v1/completions":
        text = event["choices"][0]["text"]
    else:
        text = event["token"]["text"]
    assert isinstance(text, str)
    return text


def opening(path: str) -> list[str]:
    """Texts of the events before the first token's: a chat begins with the role."""
    return [""] if path == "/v1/chat/completions" else []


def without_ends(texts: list[str]) -> list[str]:
    """The fake's own end of sequence is hidden by OpenAI's routes."""
    return ["" if text == "</s>" else text for text in texts]


def check(wire: Wire, texts: list[str]) -> None:
    """On every stream there is."""
    texts = without_ends(texts)
    for path, body in STREAMS.items():
        ids, events = wire.say(texts, path, body)
        assert [text_of(path, event) for event in events] == opening(path) + texts
        assert not any(ids)
        if not path.startswith("/v1/"):
            whole = [None] * (len(texts) - 1) + ["".join(texts)]
            assert [event["generated_text"] for event in events] == whole


@settings(deadline=None, max_examples=100)
@given(texts=TEXTS)
@example(texts=["\u2028\n\ndata: [DONE]\n\n\0", "", "\r", "\n"])
def test_any_text_arrives_unchanged(wire: Wire, texts: list[str]) -> None:
    check(wire, texts)


@settings(deadline=None, max_examples=100)
@given(texts=TEXTS, cut=st.integers(0, 8))
def test_any_stream_is_resumed_after_any_token(wire: Wire, texts: list[str], cut: int) -> None:
    texts = without_ends(texts)
    cut = min(cut, len(texts))
    known = {"last-event-id": str(cut)} if cut else {}
    # Not drawn: examples are repeated, and share nothing.
    named = {"idempotency-key": str(uuid4())}
    for path, body in STREAMS.items():
        ids, events = wire.say(texts, path, body, **named)
        assert [text_of(path, event) for event in events] == opening(path) + texts
        assert ids == [str(index) for index in range(1, len(events) + 1)]
        assert wire.say(["another"], path, body, **named, **known) == (ids[cut:], events[cut:])


BYTES = st.lists(
    st.binary(max_size=6)
    | st.text(max_size=4).map(str.encode)
    | st.sampled_from([b"\xed\xa0\x80", b"\xff", b"\xf0\x9f", b"\n\ndata: x\n\n", "👩‍💻".encode()]),
    max_size=6,
).map(b"".join)


@settings(deadline=None, max_examples=100)
@given(raw=BYTES.filter(len))
@example(raw="😀".encode())
def test_any_bytes_of_tokens_arrive_as_the_text_they_are(wire: Wire, raw: bytes) -> None:
    one = tokenizer("byte_level")
    ids = {one.token_bytes(id_): id_ for id_ in range(one.vocab_size)}
    text = IncrementalDetokenizer(one, ())
    texts = [text.step(ids[bytes([byte])]) for byte in raw]
    texts[-1] += text.flush()
    assert "".join(texts) == raw.decode(errors="replace")
    check(wire, texts)
