"""Grammars and calls on the demo model, over HTTP, while other requests run and shards die."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from millrace_testing.launcher.e2e import Server, launch, sse_events
from millrace_testing.router.streams import added_up

SCHEMA = {
    "type": "object",
    "properties": {
        "part": {"enum": ["router", "shard", "launcher"]},
        "runs": {"type": "boolean"},
        "ports": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["part", "runs", "ports"],
    "additionalProperties": False,
}
SMALL = {
    "type": "object",
    "properties": {"part": {"enum": ["router", "shard"]}, "runs": {"type": "boolean"}},
    "required": ["part", "runs"],
    "additionalProperties": False,
}
LARK = 'start: item ("; " item){2}\nitem: "[" item "]" | DIGIT\nDIGIT: /[0-9]/\n'
PATTERN = r"(one|two|three)( [0-9]{2}){3}\."
QUESTION = "What is a shard?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with launch("--deterministic=on") as running:
        yield running


def is_small(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["part", "runs"]
        and value["part"] in {"router", "shard"}
        and isinstance(value["runs"], bool)
    )


def is_lark(text: str) -> bool:
    items = text.split("; ")
    return len(items) == 3 and all(
        re.fullmatch(r"\[*[0-9]\]*", item) and item.count("[") == item.count("]") for item in items
    )


GRAMMARS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "schema": ({"type": "json", "value": SMALL}, is_small),
    "text of a schema": ({"type": "json", "value": json.dumps(SMALL)}, is_small),
    "regex": ({"type": "regex", "value": PATTERN}, re.compile(PATTERN).fullmatch),
    "lark": ({"type": "lark", "value": LARK}, is_lark),
}


def body_with(grammar: dict[str, Any] | None, **parameters: Any) -> dict[str, Any]:
    asked = {"max_new_tokens": 80, "details": True, "grammar": grammar, **parameters}
    return {"inputs": QUESTION, "parameters": asked}


def ask(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(server.url + path, json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refusal(server: Server, body: dict[str, Any]) -> str:
    response = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert response.status_code == 422, response.text
    assert response.json()["error_type"] == "validation"
    return str(response.json()["error"])


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", [None, 1])
def test_generated_text_matches_its_grammar(server: Server, name: str, seed: int | None) -> None:
    grammar, matches = GRAMMARS[name]
    sampling = {} if seed is None else {"do_sample": True, "seed": seed, "temperature": 1.5}
    answer = ask(server, "/generate", body_with(grammar, **sampling))
    details = answer["details"]
    if details["finish_reason"] == "eos_token":
        assert matches(answer["generated_text"]), answer["generated_text"]
    else:
        # Nested brackets may go on for as long as there is room.
        assert (name, details["finish_reason"]) == ("lark", "length")


def test_a_guided_stream_has_the_same_text_and_tokens(server: Server) -> None:
    for grammar, _ in GRAMMARS.values():
        body = body_with(grammar, do_sample=True, seed=3)
        whole = ask(server, "/generate", body)
        with httpx.stream(
            "POST", f"{server.url}/generate_stream", json=body, timeout=120
        ) as stream:
            events = list(sse_events(stream.iter_lines()))
        assert events[-1]["generated_text"] == whole["generated_text"]
        assert [e["token"] for e in events] == whole["details"]["tokens"]


@pytest.mark.parametrize("strict", [True, False, None])
def test_an_answer_follows_the_schema_of_response_format(
    server: Server, *, strict: bool | None
) -> None:
    schema = {"name": "part", "schema": SMALL, "strict": strict}
    body = {
        "messages": MESSAGES,
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    (choice,) = ask(server, "/v1/chat/completions", body)["choices"]
    assert is_small(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


TOOL = {"type": "function", "function": {"name": "describe", "parameters": SMALL, "strict": True}}
CALLING = {
    "messages": MESSAGES,
    "tools": [TOOL, {"type": "function", "function": {"name": "give_up"}}],
    "parallel_tool_calls": False,
    "max_tokens": 80,
    "temperature": 1.5,
    "seed": 4,
}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_forced_call_is_valid_for_any_output_of_the_model(server: Server, seed: int) -> None:
    body = {**CALLING, "tool_choice": "describe", "seed": seed}
    whole = ask(server, "/v1/chat/completions", body)["choices"]
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}, timeout=120
    ) as stream:
        streamed = added_up(list(sse_events(stream.iter_lines())))
    for (choice,) in (whole, streamed):
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "describe"
        assert is_small(call["function"]["arguments"])
    said = [
        one["message"]["tool_calls"][0]["function"]["arguments"] for (one,) in (whole, streamed)
    ]
    assert said[0] == said[1]


def test_with_a_response_format_the_model_calls_or_answers(server: Server) -> None:
    config = {"name": "weather", "schema": {**SMALL, "required": ["runs"]}}
    body = {**CALLING, "response_format": {"type": "json_schema", "json_schema": config}}
    for seed in range(4):
        (choice,) = ask(server, "/v1/chat/completions", {**body, "seed": seed})["choices"]
        message = choice["message"]
        if choice["finish_reason"] == "tool_calls":
            assert message["content"] is None
        else:
            assert isinstance(json.loads(message["content"])["runs"], bool)


async def test_guided_and_plain_requests_do_not_affect_each_other(server: Server) -> None:
    bodies = [
        body_with(grammar, do_sample=True, seed=seed, max_new_tokens=40)
        for seed in range(3)
        for grammar in (*(grammar for grammar, _ in GRAMMARS.values()), None)
    ]
    bodies.append(body_with({"type": "json", "value": SCHEMA}, do_sample=True, seed=5))
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        together = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
        alone = [await client.post("/generate", json=body) for body in bodies]
    for one, other in zip(together, alone, strict=True):
        assert one.status_code == 200, one.text
        assert one.json()["generated_text"] == other.json()["generated_text"]
        assert one.json()["details"]["tokens"] == other.json()["details"]["tokens"]


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "regex", "value": "(("},
        {"type": "regex", "value": "(?<=a)b"},
        {"type": "lark", "value": "begin: x"},
        {"type": "json", "value": {"type": "no such type"}},
        {"type": "json", "value": {"$ref": "#/$defs/none"}},
        {"type": "json", "value": {"$ref": "https://example.com/schema.json"}},
        {"type": "json", "value": "{"},
    ],
)
def test_a_malformed_grammar_is_refused_with_its_reason(
    server: Server, grammar: dict[str, Any]
) -> None:
    message = refusal(server, body_with(grammar))
    assert message.startswith("Input validation error: grammar is not valid: ")
    assert len(message) > 60


HOSTILE: dict[str, dict[str, Any]] = {
    "counted repetitions": {"type": "regex", "value": "((((a{99}){99}){99}){99}){99}"},
    "a large alternation": {
        "type": "regex",
        "value": "|".join(f"(a?){{{i}}}a{{{i}}}" for i in range(2000)),
    },
    "many optional properties": {
        "type": "json",
        "value": {"type": "object", "properties": {f"p{i}": {"$ref": "#"} for i in range(4000)}},
    },
    "recursion without end": {"type": "json", "value": {"$ref": "#"}},
    "deep nesting": {"type": "lark", "value": "start: " + "(" * 120 + '"a"' + ")" * 120},
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_grammar_ends_no_other_stream(server: Server, name: str) -> None:
    """It is taken or refused, in bounded time; a stream beside it goes on as if it were alone."""
    plain = {"inputs": QUESTION, "parameters": {"max_new_tokens": 100, "ignore_eos": True}}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        undisturbed = (await client.post("/generate", json=plain)).json()
        beside = asyncio.create_task(client.post("/generate", json=plain))
        answer = await client.post("/generate", json=body_with(HOSTILE[name], max_new_tokens=5))
        assert answer.status_code in {200, 422}, answer.text
        assert (await beside).json() == undisturbed
        assert (await client.get("/health")).status_code == 200


def test_a_guided_stream_goes_on_after_its_shard_was_killed(server: Server) -> None:
    grammar = {"type": "regex", "value": "([a-z]{3} ){40}end"}
    body = body_with(grammar, do_sample=True, seed=9, max_new_tokens=300)
    undisturbed = ask(server, "/generate", body)["details"]["tokens"]
    tokens: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{server.url}/generate_stream", json=body, timeout=180) as stream:
        for event in sse_events(stream.iter_lines()):
            tokens.append(event["token"])
            if len(tokens) == 10:
                server.shard.kill()
                # A new grammar is waited for as long as the shards are.
                other = {"type": "regex", "value": "[a-z]{4}"}
                answer = ask(server, "/generate", body_with(other))
                assert re.fullmatch("[a-z]{4}", answer["generated_text"])
    assert tokens == undisturbed


def test_json_is_complete_within_its_limit_and_reports_the_limit(server: Server) -> None:
    endless = {"type": "array", "items": {"type": "string"}, "minItems": 3}
    for seed in range(4):
        asked = {"max_new_tokens": 40, "do_sample": True, "temperature": 3.0, "seed": seed}
        answers = [
            ask(server, "/generate", body_with({"type": "json", "value": endless}, **asked))
            for _ in range(2)
        ]
        (text,) = {answer["generated_text"] for answer in answers}
        assert len(json.loads(text)) >= 3
        details = answers[0]["details"]
        assert details["generated_tokens"] <= 40
        assert details["finish_reason"] in {"length", "eos_token"}
    answer = ask(
        server,
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 40,
            "temperature": 2.0,
            "seed": 1,
            "response_format": {"type": "json_schema", "json_schema": {"schema": endless}},
        },
    )
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert len(json.loads(choice["message"]["content"])) >= 3
