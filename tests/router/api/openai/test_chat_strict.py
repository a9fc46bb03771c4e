"""Chat under `--strict-tgi`: each of TGI's oddities, compared with the behaviour without the flag."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace_testing.router.chat import URL, chunks_of
from millrace_testing.router.edge import Edge, fail, limits_with, serving
from millrace_testing.text.texts import Generations, tokenizer

TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}"
    "{% for turn in messages %}{{ turn.role }} {{ turn.content }} {% endfor %}bot"
)
LIMITS = limits_with(max_input_tokens=100, max_total_tokens=300)
BYTES = tokenizer("byte_level")
END = 0
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def served(*texts: str, strict_tgi: bool, script: Any = None) -> Any:
    plans = [[*BYTES.encode(text), END] for text in texts]
    script = script or Generations(*plans, tokenizer=BYTES)
    return serving(script, limits=LIMITS, template=TEMPLATE, strict_tgi=strict_tgi)


async def choice_of(edge: Edge, **body: Any) -> dict[str, Any]:
    status, answer, _ = await edge.post(URL, {**ASKED, **body})
    assert status == 200, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice


@pytest.mark.parametrize(
    ("strict_tgi", "text", "reason"), [(False, "a b", "stop"), (True, "a b c.", "stop_sequence")]
)
async def test_stop_strings(text: str, reason: str, *, strict_tgi: bool) -> None:
    async with served("a b c. d", "a b c. d", strict_tgi=strict_tgi) as edge:
        choice = await choice_of(edge, stop=[" c."])
        chunks = await chunks_of(edge, {**ASKED, "stop": [" c."]})
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"]["content"] for choice in streamed) == text
    assert streamed[-1]["finish_reason"] == reason


@pytest.mark.parametrize(("strict_tgi", "reason"), [(False, "tool_calls"), (True, "stop")])
async def test_calls_have_tgis_ids_and_reasons_only_in_strict_tgi(
    reason: str, *, strict_tgi: bool
) -> None:
    async with served(CALL, CALL, strict_tgi=strict_tgi) as edge:
        choice = await choice_of(edge, tools=TOOLS)
        chunks = await chunks_of(edge, {**ASKED, "tools": TOOLS})
    (call,) = choice["message"]["tool_calls"]
    streamed = [chunk["choices"][0] for chunk in chunks]
    (first,) = next(one["delta"]["tool_calls"] for one in streamed if "tool_calls" in one["delta"])
    assert [call["id"] == "0", first["id"] == "0"] == [strict_tgi] * 2
    assert [choice["finish_reason"], streamed[-1]["finish_reason"]] == [reason] * 2


@pytest.mark.parametrize("strict_tgi", [False, True])
async def test_ids_are_empty_and_roles_repeated_only_in_strict_tgi(*, strict_tgi: bool) -> None:
    async with served("ab", "ab", strict_tgi=strict_tgi) as edge:
        _, answer, _ = await edge.post(URL, ASKED)
        chunks = await chunks_of(edge, ASKED)
    ids = {answer["id"], *(chunk["id"] for chunk in chunks)}
    assert (ids == {""}) == strict_tgi
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert len(deltas) == len(BYTES.encode("ab")) + 1 + (not strict_tgi)
    assert ["role" in delta for delta in deltas] == [True, *([strict_tgi] * (len(deltas) - 1))]


@pytest.mark.parametrize(
    ("fields", "ours", "theirs"),
    [
        (
            {"presence_penalty": 0.5, "frequency_penalty": 1.5},
            {"presence_penalty": 0.5, "openai_frequency_penalty": 1.5},
            {"repetition_penalty": 2.5, "frequency_penalty": 1.5},
        ),
        ({"presence_penalty": 0}, {}, {"repetition_penalty": 2.0}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ],
)
@pytest.mark.parametrize("strict_tgi", [False, True])
async def test_penalties_follow_the_dialect(
    fields: dict[str, Any], ours: dict[str, float], theirs: dict[str, float], *, strict_tgi: bool
) -> None:
    neutral = {
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "openai_frequency_penalty": 0.0,
    }
    async with served("a", strict_tgi=strict_tgi) as edge:
        await choice_of(edge, **fields)
        (request,) = edge.batcher.requests
    expected = neutral | (theirs if strict_tgi else ours)
    assert {name: getattr(request.sampling, name) for name in neutral} == expected


@pytest.mark.parametrize("strict_tgi", [False, True])
async def test_a_top_p_of_one_is_refused_only_by_strict_tgi(*, strict_tgi: bool) -> None:
    async with served("a", strict_tgi=strict_tgi) as edge:
        status, answer, _ = await edge.post(URL, {**ASKED, "top_p": 1.0})
    assert status == (422 if strict_tgi else 200)
    if strict_tgi:
        message = "Input validation error: `top_p` must be > 0.0 and < 1.0"
        assert answer["error"] == message


@pytest.mark.parametrize("strict_tgi", [False, True])
async def test_tools_with_a_response_format_are_refused_only_by_strict_tgi(
    *, strict_tgi: bool
) -> None:
    async with served("{}", strict_tgi=strict_tgi) as edge:
        grammar = {"type": "json_object", "value": {"type": "object", "properties": {}}}
        body = {**ASKED, "tools": [], "response_format": grammar}
        status, answer, _ = await edge.post(URL, body)
    assert status == (422 if strict_tgi else 200)
    if strict_tgi:
        assert answer["error_type"] == "tool_error"
        assert answer["error"] == "Tool error: Grammar and tools are mutually exclusive"


@pytest.mark.parametrize("strict_tgi", [False, True])
async def test_images_become_markdown_only_in_strict_tgi(*, strict_tgi: bool) -> None:
    part = {"type": "image_url", "image_url": {"url": "https://h/i.png"}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "see "}, part]}]}
    async with served(strict_tgi=strict_tgi) as edge:
        status, answer, _ = await edge.post("/chat_tokenize", body)
    assert status == (200 if strict_tgi else 422)
    if strict_tgi:
        assert answer["templated_text"] == "user see ![](https://h/i.png) bot"


@pytest.mark.parametrize("strict_tgi", [False, True])
async def test_a_stream_that_fails_early_has_a_status_unless_strict_tgi(
    *, strict_tgi: bool
) -> None:
    async with served(strict_tgi=strict_tgi, script=fail) as edge:
        status, answer, _ = await edge.post(URL, {**ASKED, "stream": True})
    if not strict_tgi:
        assert (status, answer["error_type"]) == (424, "generation")
        return
    assert status == 200
    error, done, end = answer.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert json.loads(error.removeprefix("data: ")) == {
        "error": {
            "message": "Request failed during generation: Server error: out of luck",
            "http_status_code": 422,
        }
    }


@pytest.mark.parametrize(("strict_tgi", "count"), [(False, 1), (True, 2)])
async def test_a_chat_counts_as_tgi_counts_it(count: int, *, strict_tgi: bool) -> None:
    async with served("a", strict_tgi=strict_tgi) as edge:
        await choice_of(edge)
        lines = await edge.exposition()
    assert f"tgi_request_count {count}" in lines
    assert "tgi_request_success 1" in lines
