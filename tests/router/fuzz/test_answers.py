"""Answers of every format and the events that carry them: no cut changes them, and no character is lost."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace_router.api.chat.choice import ChoiceText
from millrace_router.reasoning.channels import EARLY_RECIPIENT, MARKERS, ChannelSplitter
from millrace_router.reasoning.formats import CHANNELS, TAGS
from millrace_router.reasoning.reasoning_format import Splitter, Start
from millrace_router.reasoning.tags import TagSplitter
from millrace_router.request.request import FinishReason, ValidRequest
from millrace_router.request.token_stream import Finished, Token, TokenEvent, TokenStream
from millrace_router.text.detokenizer import IncrementalDetokenizer
from millrace_router.tool_calls.formats.registry import ALIASES, FORMATS, format_of
from millrace_router.tool_calls.parsing.call_format import CallFormat
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_testing.router.edge import Edge, limits_with, play, serving
from millrace_testing.text.texts import tokenizer
from millrace_testing.text.written_calls import TEMPLATES, WRITERS

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {}},
}
TOOLS = [Tool(name, None, PARAMETERS, strict=False) for name in ("weather", "get-now_2")]
CHOICES = [ToolChoice("auto"), ToolChoice("auto", parallel=False)]
TOKENS = sorted({token for made in FORMATS.values() for token in made.tokens} | set(MARKERS))
IDS = {text: index for index, text in enumerate(TOKENS, start=1)}
TAG_TEXTS = sorted({text for tags in TAGS.values() for text in tags.texts})
LETTERS = "αβγδεζηθικλμνξοπρστυφχψω"
"""Letters of words; no marker has any."""
WORDS = st.text(LETTERS, min_size=1, max_size=4)
SHARDS = [
    *('{"name": "weather", "arguments": {', '{"name": "', '"city": "', '{"city": "', '"}', "{}", "{", "}", "[", "]"),
    *('"', ",", ":", ";", "=", "(", ")", "'", "\\", "\\u12", "\\ud83d", "None", "null", "tru", "-1.5e", "12", "\n"),
    *("\n\n", " ", "\t", " " * 300, "é日", "😀", "\u2028", "\ufffd", "\0", "weather", "json", "```json\n", "```"),
    *("assistant", "analysis", "final", "commentary", EARLY_RECIPIENT, " to=functions.weather", "functions.weather:0"),
]  # fmt: skip
CALL = ("weather", {"city": "Rome", "days": 3})


def cut_marks(marks: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts, their beginnings and their ends."""
    mark = st.sampled_from(marks)
    begun = st.tuples(mark, st.integers(1, 12)).map(lambda cut: cut[0][: cut[1]])
    ended = st.tuples(mark, st.integers(1, 12)).map(lambda cut: cut[0][-cut[1] :])
    return st.one_of(mark, mark, begun, ended)


def texts(name: str) -> st.SearchStrategy[str]:
    """Texts of the format's own marks, and of all pieces that might confuse a parser."""
    made = FORMATS[ALIASES.get(name, name)]
    whole = WRITERS[name]([CALL])
    marks = sorted({*made.tokens, *made.syntax.openers})
    own = sorted({*marks, *re.findall(r"[\w ]+|[^\w\s]+|\s+", whole)})
    few = st.one_of(
        st.sampled_from(marks or own), st.sampled_from([" ", "\n", "{", "[", "weather"]), WORDS
    )
    many = st.one_of(
        cut_marks(own),
        st.sampled_from(own),
        st.integers(1, len(whole)).map(lambda length: whole[:length]),
        cut_marks(sorted({*TOKENS, *TAG_TEXTS})),
        cut_marks(TAG_TEXTS),
        st.sampled_from(SHARDS),
        WORDS,
    )
    return st.one_of(
        st.lists(few, max_size=8).map("".join), st.lists(many, max_size=10).map("".join)
    )


@dataclass(frozen=True)
class Form:
    """A form of thoughts, a format of calls, and the reader of their answers."""

    calls: CallFormat
    thoughts: str
    start: Start
    is_special: bool
    choice: ToolChoice

    @property
    def special(self) -> frozenset[str]:
        """The special tokens that an answer is read with."""
        if not self.is_special:
            return frozenset()
        of_tags = TAGS[self.thoughts].texts if self.thoughts in TAGS else ()
        tags = MARKERS if self.thoughts == CHANNELS else of_tags
        return self.calls.markers | {text for text in tags if text in IDS}

    def splitter(self) -> Splitter | None:
        if self.thoughts == CHANNELS:
            return ChannelSplitter(self.start, keeps_calls=True)
        return TagSplitter(TAGS[self.thoughts], self.start) if self.thoughts else None

    def reader(self, stops: Sequence[str]) -> ChoiceText:
        return ChoiceText(
            stops,
            parser=self.calls.parser(TOOLS, self.choice),
            markers=sorted(self.special),
            splitter=self.splitter(),
        )


THOUGHTS = ["", CHANNELS, *TAGS]


def forms(name: str, thoughts: Sequence[str] = THOUGHTS) -> st.SearchStrategy[Form]:
    return st.builds(
        lambda thoughts, start, is_special, choice: Form(
            format_of(
                TEMPLATES.get(name), ALIASES.get(name, name), special_ids=IDS if is_special else {}
            ),
            thoughts,
            start,
            is_special,
            choice,
        ),
        st.sampled_from(thoughts),
        st.sampled_from(Start),
        st.booleans(),
        st.sampled_from(CHOICES),
    )


def tokens(form: Form, text: str, sizes: Iterator[int]) -> Iterator[Token]:
    """Cut a text to tokens of these sizes; special tokens stay whole."""
    special = sorted(form.special, key=len, reverse=True)
    pattern = "|".join(map(re.escape, special)) or r"(?!)"
    for part in re.split(f"({pattern})", text):
        if part in form.special:
            yield Token(IDS[part], part, -1.0, special=True)
            continue
        place = 0
        while place < len(part):
            size = next(sizes)
            yield Token(0, part[place : place + size], -1.0, special=False)
            place += size


@dataclass
class Answer:
    """All parts of an answer."""

    thought: str
    text: str
    calls: list[tuple[str, str]]
    reason: str | None
    num_whole: int = 0
    """Calls that have ended."""
    source: str = ""
    """What the last call was written as, which is text if it never ends; empty once it has."""


def read(form: Form, text: str, sizes: Iterator[int], stops: Sequence[str] = ()) -> Answer:
    """Read an answer in tokens, and check what holds for every delta."""
    reader, answer = form.reader(stops), Answer("", "", [], None)
    last = Finished(FinishReason.EOS_TOKEN, "", 0, None)
    all_tokens = [*tokens(form, text, sizes), Token(0, "", -1.0, special=True)]
    for index, token in enumerate(all_tokens, start=1):
        finished = last if index == len(all_tokens) else None
        delta = reader.push(TokenEvent(index, token, (), finished))
        answer.thought += delta.thought
        answer.text += delta.text
        for call in delta.calls:
            if call.id is not None:
                assert call.name is not None
                assert call.index == len(answer.calls)
                answer.calls.append((call.name, ""))
                answer.source = ""
            assert call.index == len(answer.calls) - 1
            called, arguments = answer.calls[-1]
            answer.calls[-1] = called, arguments + call.arguments
            answer.source = "" if call.is_last else answer.source + call.source
            answer.num_whole += call.is_last
        if delta.finish_reason is not None:
            answer.reason = delta.finish_reason
            break
    return answer


def each(size: int) -> Iterator[int]:
    while True:
        yield size


def letters(*texts: str) -> Counter[str]:
    return Counter(char for text in texts for char in text if char in LETTERS)


each_format = pytest.mark.parametrize("name", WRITERS)


@each_format
@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    stops=st.lists(WORDS | st.sampled_from(TAG_TEXTS + SHARDS), max_size=1),
)
def test_no_cut_between_tokens_changes_an_answer(
    name: str, data: st.DataObject, sizes: list[int], stops: list[str]
) -> None:
    form, text = data.draw(forms(name)), data.draw(texts(name))
    if form.is_special:
        stops = []  # A marker is hidden from stop strings that it is not part of.
    whole = read(form, text, each(len(text) + 1), stops)
    assert read(form, text, each(1), stops) == whole
    endless = (size for _ in each(1) for size in sizes)
    assert read(form, text, endless, stops) == whole
    is_whole = len(whole.calls) == whole.num_whole > 0
    assert whole.reason == ("tool_calls" if is_whole else "stop")
    assert not is_whole or all(isinstance(json.loads(text), dict) for _, text in whole.calls)


@each_format
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_word_is_lost(name: str, data: st.DataObject) -> None:
    """Every letter is thought, text or an argument, but in headers of channels and in calls that are one too many.

    In a call that is cut, it may be part of a value whose type is not clear yet, which only the call's source has.
    """
    form, text = data.draw(forms(name)), data.draw(texts(name))
    answer = read(form, text, each(3))
    kept = letters(answer.thought, answer.text, *(arguments for _, arguments in answer.calls))
    assert not kept - letters(text)
    lost = letters(text) - kept
    if answer.num_whole < len(answer.calls):
        lost -= letters(answer.source)
    if not answer.calls:
        left = iter(text)
        assert all(char in left for char in answer.text), "text is a part of the answer"
    if form.thoughts != CHANNELS and not (answer.calls and form.choice.is_single):
        assert not lost


@each_format
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_text_without_calls_and_thoughts_stays_as_it_is(name: str, data: st.DataObject) -> None:
    form = data.draw(forms(name, thoughts=[""]))
    text = data.draw(texts(name))
    answer = read(form, text, each(2))
    if not answer.calls:
        hidden = "|".join(sorted(map(re.escape, form.special), key=len, reverse=True)) or r"(?!)"
        assert answer.text == re.sub(hidden, "", text)


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
