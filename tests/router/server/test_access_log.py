"""The log line of a request."""

from __future__ import annotations

import io
import json
from typing import Any

import orjson
import pytest

from millrace_router.request.request import FinishReason, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import break_off, fail, finished, logging_to, serving, token_event

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
MESSAGES = [{"role": "user", "content": "hello world"}]
TEMPLATE = "{{ messages[0].content }}"


async def line_of(path: str, body: Any, *, script: Any = None, **options: Any) -> dict[str, Any]:
    """Fields of the line of one request."""
    headers = options.pop("headers", {})
    output = io.BytesIO()
    edge_options = {"template": TEMPLATE, **options}
    with logging_to(output):
        async with serving(*[script] if script else [], **edge_options) as edge:
            await edge.post(path, body, headers=headers)
    lines: list[dict[str, Any]] = [
        orjson.loads(line)["fields"] for line in output.getvalue().splitlines()
    ]
    (line,) = [line for line in lines if line["message"] == "request"]
    return line


def two_tokens(_: ValidRequest, stream: TokenStream) -> None:
    """End with the model's own end, 3 tokens of the prompt being known."""
    stream.cached_tokens = 3
    stream.batched_at = stream.queued_at
    stream.token(token_event(1, "a"))
    end = finished("ab", 2, reason=FinishReason.EOS_TOKEN)
    stream.token(token_event(2, "b", finished=end))


GREEDY: dict[str, tuple[str, Any]] = {
    "an answer in one piece": ("/generate", {"inputs": "hello world", "parameters": {}}),
    "a stream": ("/generate_stream", {"inputs": "hello world", "parameters": {}}),
    "a chat": ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0}),
    "a stream of chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "temperature": 0, "stream": True},
    ),
}


@pytest.mark.parametrize(("path", "body"), GREEDY.values(), ids=GREEDY)
async def test_the_line_describes_the_generation(path: str, body: Any) -> None:
    line = await line_of(path, body, script=two_tokens)
    times = {name: line.pop(name) for name in tuple(line) if "time" in name}
    assert times.keys() == {
        "total_time",
        "validation_time",
        "queue_time",
        "inference_time",
        "time_per_token",
        "time_to_first_token",
    }
    assert line.pop("request_id")
    assert line.pop("request_bytes") == len(json.dumps(body))
    assert line == {
        "message": "request",
        "method": "POST",
        "route": path,
        "status": 200,
        "model": "org/tiny",
        "stream": body.get("stream", path == "/generate_stream"),
        "prompt_tokens": 2,
        "cached_tokens": 3,
        "generated_tokens": 2,
        "finish_reason": "eos_token",
    }


async def test_an_unknown_path_has_a_line_too() -> None:
    line = await line_of("/nothing", {"inputs": "hello world"}, headers={"x-request-id": "r3"})
    assert (line["request_id"], line["status"]) == ("r3", 404)


async def test_reasons_of_several_choices_are_listed() -> None:
    reasons = iter([FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.LENGTH])

    def script(_: ValidRequest, stream: TokenStream) -> None:
        stream.batched_at = stream.queued_at
        stream.token(token_event(1, "a", finished=finished("a", 1, reason=next(reasons))))

    body = {"messages": MESSAGES, "n": 3}
    line = await line_of("/v1/chat/completions", body, script=script)
    assert line["finish_reason"] == "length,eos_token"


async def test_the_line_has_the_seed_of_a_request_that_samples() -> None:
    line = await line_of("/generate", {"inputs": "a", "parameters": {"seed": 7, "top_k": 2}})
    assert line["seed"] == 7
    greedy = {"inputs": "a", "parameters": {"seed": 7}}
    assert "seed" not in await line_of("/generate", greedy)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_a_failure_before_the_answer_has_its_type(path: str) -> None:
    line = await line_of(path, {"inputs": "a", "prompt": "a"}, script=fail)
    assert (line["status"], line["error_type"]) == (424, "generation")
    assert "finish_reason" not in line


@pytest.mark.parametrize(
    ("path", "error_type"),
    [("/generate", "validation"), ("/v1/chat/completions", "template_error")],
)
async def test_a_refusal_has_its_type(path: str, error_type: str) -> None:
    body = {"inputs": "a " * 99, "messages": MESSAGES}
    line = await line_of(path, body, template="{{ raise_exception('no') }}")
    assert (line["status"], line["error_type"]) == (422, error_type)


async def test_a_failure_in_mid_stream_has_its_type() -> None:
    line = await line_of("/generate_stream", {"inputs": "a"}, script=break_off)
    assert (line["status"], line["error_type"]) == (200, "generation")
    assert line["generated_tokens"] == 1


async def test_a_trace_is_named() -> None:
    line = await line_of("/generate", {"inputs": "a"}, headers={"traceparent": TRACEPARENT})
    assert line["trace_id"] == TRACE


@pytest.mark.parametrize("given", [{}, {"traceparent": TRACEPARENT.upper()}], ids=["no", "bad"])
async def test_a_trace_is_not_made_up(given: dict[str, str]) -> None:
    line = await line_of("/generate", {"inputs": "a"}, headers=given)
    assert line["status"] == 200
    assert "trace_id" not in line


async def test_the_line_has_the_tenant_if_tenants_count() -> None:
    async def tenant(headers: dict[str, str], fairness: str = "tenant") -> Any:
        asked = {"inputs": "a"}
        line = await line_of("/generate", asked, headers=headers, fairness=fairness)
        return line.get("tenant")

    assert await tenant({"x-tenant": "acme"}) == "acme"
    assert await tenant({"x-tenant": "acme"}, fairness="none") is None
    assert await tenant({}) is None
    first, again, other = [
        await tenant({"authorization": f"Bearer {key}"}) for key in ("key-1", "key-1", "key-2")
    ]
    assert first == again != other
    assert "key-1" not in first


async def test_a_tenant_of_any_bytes_can_be_logged() -> None:
    body = b'{"inputs":"a"}'
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    sent = head.encode() + b"content-type: application/json\r\nx-tenant: a\xffb\r\n\r\n" + body
    output = io.BytesIO()
    with logging_to(output):
        async with serving(fairness="tenant") as edge:
            reader, writer = await edge.send(sent)
            assert b" 200 " in await reader.readline()
            await reader.read()
            writer.close()
    (line,) = map(orjson.loads, output.getvalue().splitlines())
    assert line["fields"]["tenant"] == "a\\udcffb"
