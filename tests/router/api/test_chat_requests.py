"""A chat request becomes a prompt and parameters, or a clear refusal."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_router.api.chat.start import joined
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import Edge, limits_with, play, serving
from millrace_testing.router.streams import CHAT
from millrace_testing.text.texts import Generations, tokenizer

TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}:{{ turn.content }}"
    "{% if turn.name %}({{ turn.name }}){% endif %}"
    "{% if turn.reasoning_content %}<{{ turn.reasoning_content }}>{% endif %}"
    "{% for call in turn.tool_calls or [] %}"
    "[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "{% if turn.tool_call_id %}#{{ turn.tool_call_id }}{% endif %}; {% endfor %}"
    "{% if add_generation_prompt %}bot{% endif %}{{ mood }}"
)
BYTES = tokenizer("byte_level")
END = 0
LIMITS = limits_with(max_input_tokens=100, max_total_tokens=200)
USER = {"role": "user", "content": "hello"}
ASKED = {"messages": [USER]}


def served(script: Any = None, **options: Any) -> Any:
    return serving(script or say, **{"limits": LIMITS, "template": TEMPLATE, **options})


def say(_: ValidRequest, stream: TokenStream) -> None:
    play(stream, " x", " y")


async def prompt_of(edge: Edge, **body: Any) -> str:
    answer = await edge.answer("/chat_tokenize", {**ASKED, **body})
    return str(answer["templated_text"])


def text(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": one} for one in texts]


def call(arguments: object, key: str = "arguments") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", key: arguments}}


@pytest.mark.parametrize(
    ("message", "prompt"),
    [
        pytest.param({"role": "user", "content": "a"}, "user:a; bot", id="text"),
        pytest.param({"role": "user", "content": text("a", "b")}, "user:ab; bot", id="parts"),
        pytest.param(
            {"role": "user", "content": text("a", kind="input_text")}, "user:a; bot", id="input"
        ),
        pytest.param(
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            "assistant:no",
            id="refusal",
        ),
        pytest.param({"role": "user", "content": []}, "user:; bot", id="no parts"),
        pytest.param({"role": "system", "content": "a"}, "system:a; bot", id="system"),
        pytest.param({"role": "developer", "content": "a"}, "system:a; bot", id="developer"),
        pytest.param(
            {"role": "user", "content": "a", "name": "Ann"}, "user:a(Ann); bot", id="name"
        ),
        pytest.param(
            {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]},
            'assistant:[c1 f {"a": 1}]; bot',
            id="call",
        ),
        pytest.param(
            {"role": "assistant", "content": "so", "tool_calls": [call({"a": 1}, "parameters")]},
            'assistant:so[c1 f {"a": 1}]; bot',
            id="text and call in TGI's words",
        ),
        pytest.param(
            {"role": "tool", "tool_call_id": "c1", "content": text("4", "2")},
            "tool:42#c1; bot",
            id="result",
        ),
        pytest.param(
            {
                "role": "assistant",
                "content": "a",
                "reasoning_content": "b",
                "tool_calls": [call({})],
            },
            "assistant:a<b>[c1 f {}]; bot",
            id="thoughts",
        ),
    ],
)
async def test_a_turn_reaches_the_template_with_its_structure(
    message: dict[str, Any], prompt: str
) -> None:
    async with served() as edge:
        assert await prompt_of(edge, messages=[message]) == prompt


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "assistant:So far"),
        ({"continue_final_message": True}, "assistant:So far"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "assistant:So far"),
        ({"continue_final_message": False}, "assistant:So far; bot"),
        ({"add_generation_prompt": True}, "assistant:So far; bot"),
        ({"add_generation_prompt": False}, "assistant:So far; "),
        (
            {"continue_final_message": False, "chat_template_kwargs": {"mood": "!"}},
            "assistant:So far; bot!",
        ),
    ],
)
async def test_the_last_turn_is_continued_or_followed(fields: dict[str, Any], prompt: str) -> None:
    async with served() as edge:
        messages = [{"role": "assistant", "content": "So far"}]
        assert await prompt_of(edge, messages=messages, **fields) == prompt


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "`continue_final_message` and `add_generation_prompt` are mutually exclusive",
        ),
        (
            {"min_tokens": 5, "max_tokens": 4},
            "`min_tokens` must be <= `max_tokens`. Given: 5 and 4",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "https://h/i.png"}}],
                    }
                ]
            },
            "content of type `image_url` is not supported: this model reads only text",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
                ]
            },
            "content of type `input_audio` is not supported: this model reads only text",
        ),
    ],
)
async def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    async with served() as edge:
        status, answer, _ = await edge.post(CHAT, {**ASKED, **fields})
        lines = await edge.exposition()
    assert (status, answer["error_type"]) == (422, "validation")
    assert answer["error"]["message"] == f"Input validation error: {message}"
    assert 'tgi_request_failure{err="validation"} 1' in lines


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (5, "`messages[0].content` must be a string"),
        ([{"type": "text"}], "`messages[0].content[0].text` is required"),
        ([{"type": "video"}], "`messages[0].content[0]` has the 'type' 'video'"),
    ],
)
async def test_an_error_in_content_names_the_path(content: object, place: str) -> None:
    async with served() as edge:
        status, answer, _ = await edge.post(
            CHAT, {"messages": [{"role": "user", "content": content}]}
        )
    assert (status, answer["error_type"]) == (422, "validation")
    assert place in answer["error"]["message"]


async def test_least_and_most_tokens_reach_the_shards() -> None:
    async with served() as edge:
        body = {**ASKED, "min_tokens": 2, "max_completion_tokens": 3, "max_tokens": 9}
        await edge.answer(CHAT, body)
        (request,) = edge.batcher.requests
    assert (request.min_new_tokens, request.max_new_tokens) == (2, 3)


@pytest.mark.parametrize("include_usage", [None, True])
async def test_usage_comes_with_every_chunk_if_requested(include_usage: bool | None) -> None:
    async with served() as edge:
        options = {"continuous_usage_stats": True, "include_usage": include_usage}
        chunks = await edge.chunks(CHAT, {**ASKED, "n": 2, "stream_options": options})
        plain = await edge.chunks(CHAT, {**ASKED, "n": 2})
    total = [chunk for chunk in chunks if not chunk["choices"]]
    assert len(total) == bool(include_usage)
    told = {
        index: [
            (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"])
            for chunk in chunks
            if chunk["choices"]
            and chunk["choices"][0]["index"] == index
            and "role" not in chunk["choices"][0]["delta"]
        ]
        for index in (0, 1)
    }
    # The prompt is counted with its first choice, so that the usage of all choices adds up.
    assert told == {0: [(2, 1), (2, 2)], 1: [(0, 1), (0, 2)]}
    for number, chunk in enumerate(plain):
        assert chunk == {
            **chunks[number],
            "id": chunk["id"],
            "created": chunk["created"],
            "usage": None,
        }


async def test_bytes_of_all_tokens_make_the_text() -> None:
    """A token may be a part of a character: OpenAI gives its bytes, so that a client can put them together."""
    shown = "Grüße 好!"
    whole = {BYTES.token_bytes(id_): id_ for id_ in range(BYTES.vocab_size)}
    ids = [whole[bytes([byte])] for byte in shown.encode()]
    script = Generations([*ids, END], tokenizer=BYTES)
    script.candidates = [(ids[3], -0.25), (END, float("-inf"))]
    limits = limits_with(max_input_tokens=100, max_total_tokens=200, vocab_size=BYTES.vocab_size)
    async with served(script, limits=limits, tokenizer=BYTES) as edge:
        _, answer, _ = await edge.post(CHAT, {**ASKED, "logprobs": True, "top_logprobs": 2})
    *content, end = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[byte] for byte in shown.encode()]
    assert answer["choices"][0]["message"]["content"] == shown
    assert bytes(end["bytes"]).decode() == end["token"]
    likely, impossible = content[0]["top_logprobs"]
    assert likely["bytes"] == [shown.encode()[3]]
    # OpenAI's types have a number there.
    assert impossible["logprob"] == -9999.0


def test_runs_of_plain_turns_become_one() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    results = [{"role": "tool", "content": "1", "tool_call_id": "c"}] * 2
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}],
    }
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c"},
        parts,
        called,
        *results,
        {"role": "user", "content": "f"},
    ]
    assert joined(messages) == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c\n\nde"},
        called,
        *results,
        {"role": "user", "content": "f"},
    ]
