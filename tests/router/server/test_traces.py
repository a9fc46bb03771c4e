"""The spans of requests over the HTTP edge, and the headers that join them to a trace."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from millrace_router.request.request import Grammar, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.telemetry.trace_context import new_context, trace_id_of, trace_metadata
from millrace_testing.router.edge import (
    Edge,
    FakeCompiler,
    break_off,
    echo,
    fail,
    logging_to,
    play,
    serving,
)

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
ASKED = {"inputs": "hello world", "parameters": {"max_new_tokens": 3, "seed": 7, "top_k": 2}}
MESSAGES = [{"role": "user", "content": "hello"}]


@dataclass
class Sink:
    """Keeps what is sent."""

    spans: list[dict[str, Any]] = field(default_factory=list)

    def send(self, span: Mapping[str, Any]) -> None:
        self.spans.append(orjson.loads(orjson.dumps(span)))

    async def close(self) -> None: ...


async def span_of(
    path: str, body: object, *, script: Any = echo, headers: Any = None, **options: Any
) -> dict[str, Any]:
    """The only span of a request."""
    sink = Sink()
    async with serving(script, sink=sink, template="hello", **options) as edge:
        await edge.post(path, body, headers=headers or {})
    (span,) = sink.spans
    return span


def parts(span: dict[str, Any]) -> list[str]:
    return [part["name"] for part in span["parts"]]


async def test_a_request_has_its_moments_one_after_the_other() -> None:
    span = await span_of("/generate", ASKED)
    assert span["name"] == "POST /generate"
    assert parts(span) == ["queue", "prefill", "decode"]
    queue, prefill, decode = span["parts"]
    ends = [queue["end"], prefill["end"], decode["end"]]
    moments = [span["start"], queue["start"], *ends, span["end"]]
    assert moments == sorted(moments)
    assert (queue["end"], prefill["end"]) == (prefill["start"], decode["start"])
    assert prefill["attributes"]["gen_ai.usage.input_tokens"] == 2
    assert decode["attributes"] == {"gen_ai.usage.output_tokens": 3}


async def test_a_log_that_is_slow_moves_no_moment() -> None:
    class SlowFile(io.BytesIO):
        def write(self, text: Any) -> int:
            time.sleep(0.05)
            return super().write(text)

    with logging_to(SlowFile(), level="info"):
        span = await span_of("/generate", ASKED)
    seconds = (span["end"] - span["start"]) / 1e9
    assert seconds == pytest.approx(span["attributes"]["total_time"], abs=1e-5)
    assert span["start"] <= span["parts"][0]["start"]
    assert span["parts"][-1]["end"] <= span["end"]


async def test_attributes_have_tgis_names_and_those_of_the_conventions() -> None:
    attributes = (await span_of("/generate", ASKED, served_model_name=("chat",)))["attributes"]
    tgi = {"total_time", "validation_time", "queue_time", "inference_time", "time_per_token"}
    assert all(attributes[name] >= 0 for name in tgi)
    latencies = {"e2e", "time_in_queue", "time_to_first_token"}
    assert all(attributes[f"gen_ai.latency.{name}"] >= 0 for name in latencies)
    expected = {
        "seed": "7",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/generate",
        "url.scheme": "http",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "millrace",
        "gen_ai.request.model": "chat",
        "gen_ai.response.model": "chat",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_k": 2,
        "gen_ai.request.seed": 7,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    others = tgi | {f"gen_ai.latency.{name}" for name in latencies}
    assert {name: attributes[name] for name in attributes if name not in others} == expected


async def test_a_large_seed_is_a_text_attribute() -> None:
    asked = {"inputs": "a", "parameters": {"max_new_tokens": 1, "seed": 2**64 - 1, "top_k": 2}}
    attributes = (await span_of("/generate", asked))["attributes"]
    assert attributes["seed"] == str(2**64 - 1)
    assert "gen_ai.request.seed" not in attributes


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}, "chat"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2, "model": "m"}, "chat"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}, "text_completion"),
        ("/generate_stream", ASKED, "text_completion"),
    ],
)
async def test_the_operation_belongs_to_the_route(path: str, body: Any, operation: str) -> None:
    span = await span_of(path, body)
    assert span["attributes"]["gen_ai.operation.name"] == operation
    assert span["attributes"]["http.route"] == path


async def test_each_choice_has_its_own_parts() -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "n": 2, "temperature": 1}
    span = await span_of("/v1/chat/completions", body)
    assert parts(span) == ["queue", "prefill", "decode"] * 2
    assert [part["attributes"]["millrace.choice"] for part in span["parts"]] == [0] * 3 + [1] * 3
    assert span["attributes"]["gen_ai.request.choice.count"] == 2


async def test_a_client_s_trace_goes_on() -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "a=b,c=d"}
    span = await span_of("/generate", ASKED, headers=headers)
    assert span["trace_id"] == TRACE
    assert span["parent"] == {"traceparent": TRACEPARENT, "tracestate": "a=b,c=d"}
    assert span["span_id"] != PARENT
    other = await span_of("/generate", ASKED, headers={"traceparent": "no"})
    assert other["parent"] == {}
    assert other["trace_id"] != TRACE


async def test_a_refusal_is_a_span_without_parts() -> None:
    span = await span_of("/generate", {"inputs": "a " * 99})
    assert (span["attributes"]["error.type"], span["failed"], span["parts"]) == (
        "validation",
        False,
        [],
    )
    span = await span_of("/generate", ASKED, api_key="k")
    assert (span["attributes"]["error.type"], span["failed"]) == ("401", False)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_failures_are_failures_before_and_after_the_first_token(path: str) -> None:
    span = await span_of(path, ASKED, script=fail)
    assert (span["attributes"]["error.type"], span["failed"]) == ("generation", True)
    span = await span_of("/generate_stream", ASKED, script=break_off)
    assert (span["attributes"]["error.type"], span["failed"]) == ("generation", True)
    assert parts(span) == ["queue", "prefill", "decode"]


async def test_no_span_has_text_or_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("team:secret-1")
    secrets = ("secret-1", "secret-2", "secret-3", "secret-4", "secret-5", "secret-6")

    def answer(_: ValidRequest, stream: TokenStream) -> None:
        play(stream, "secret-2", "secret-2")

    sink = Sink()
    async with serving(answer, sink=sink, template="hello", api_key_file=keys) as edge:
        headers = {"authorization": "Bearer secret-1", "x-tenant": "secret-4", "cookie": "secret-4"}
        for path, body in (
            ("/generate", {"inputs": "secret-3", "parameters": {"stop": ["secret-3"]}}),
            (
                "/v1/chat/completions",
                {"model": "secret-5", "messages": MESSAGES, "user": "secret-5"},
            ),
            ("/generate?q=secret-6", {"inputs": "secret-3"}),
            ("/secret-6", {"inputs": "secret-3"}),
        ):
            await edge.post(path, body, headers=headers)
            await edge.post(path, body, headers={"authorization": "Bearer secret-9"})
    assert len(sink.spans) == 8
    assert [span["attributes"].get("enduser.id") for span in sink.spans[:2]] == ["team", None]
    assert not [word for word in secrets if word in str(sink.spans)]


async def test_probes_have_no_spans_unless_they_fail() -> None:
    sink = Sink()
    async with serving(sink=sink) as edge:
        for path in ("/health", "/metrics", "/"):
            await edge.get(path)
        assert sink.spans == []
        edge.batcher.status.give_up("gone")
        await edge.get("/health")
    assert [span["name"] for span in sink.spans] == ["GET /health"]


async def recovered(edge: Edge, *, during: bool) -> None:
    """A request, and an outage while it runs or before it."""
    status = edge.batcher.status

    async def outage() -> None:
        status.begin_outage("shard-0: killed by signal SIGKILL")
        assert status.end_outage() is not None

    if not during:
        await outage()
    asking = asyncio.create_task(edge.post("/generate", ASKED))
    await edge.batcher.arrived.wait()
    if during:
        await outage()
    play(edge.batcher.streams[0], " x")
    await asking


@pytest.mark.parametrize("during", [True, False])
async def test_a_request_that_lived_through_a_recovery_shows_it(during: bool) -> None:
    sink = Sink()
    async with serving(None, sink=sink) as edge:
        await recovered(edge, during=during)
    (span,) = sink.spans
    found = [part for part in span["parts"] if part["name"] == "recovery"]
    assert len(found) == during
    for part in found:
        assert span["start"] <= part["start"] <= part["end"] <= span["end"]
        reason = "shard-0: killed by signal SIGKILL"
        assert part["attributes"] == {"millrace.recovery.reason": reason}


async def test_the_log_names_the_trace_of_every_request() -> None:
    sink, output = Sink(), io.BytesIO()
    with logging_to(output):
        async with serving(sink=sink) as edge:
            await edge.post("/generate", ASKED)
    (line,) = map(orjson.loads, output.getvalue().splitlines())
    assert line["fields"]["trace_id"] == sink.spans[0]["trace_id"]


async def test_calls_of_shards_for_a_request_have_its_context() -> None:
    sink, seen = Sink(), []

    class Watching(FakeCompiler):
        async def compile_grammar(self, grammar: Grammar) -> str | None:
            seen.append(dict(trace_metadata()))
            return await super().compile_grammar(grammar)

    async with serving(sink=sink) as edge:
        edge.services.validator._grammars._compiler = Watching()
        grammar = {"type": "regex", "value": "x"}
        asked = {"inputs": "a", "parameters": {"max_new_tokens": 1, "grammar": grammar}}
        headers = {"traceparent": TRACEPARENT, "tracestate": "a=b"}
        assert (await edge.post("/generate", asked, headers=headers))[0] == 200
    span = sink.spans[0]
    traceparent = f"00-{TRACE}-{span['span_id']}-01"
    assert seen == [{"traceparent": traceparent, "tracestate": "a=b"}]
    assert trace_metadata() == ()


SAMPLE_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLE_PARENT = "00f067aa0ba902b7"

VALID = {
    "sampled": f"00-{SAMPLE_TRACE}-{SAMPLE_PARENT}-01",
    "not sampled": f"00-{SAMPLE_TRACE}-{SAMPLE_PARENT}-00",
    "unknown flags": f"00-{SAMPLE_TRACE}-{SAMPLE_PARENT}-ff",
    "a later version": f"01-{SAMPLE_TRACE}-{SAMPLE_PARENT}-00",
    "a later version that says more": f"cc-{SAMPLE_TRACE}-{SAMPLE_PARENT}-01-what-the-future-brings",
}
INVALID = {
    "empty": "",
    "no trace": f"00-{'0' * 32}-{SAMPLE_PARENT}-01",
    "no parent": f"00-{SAMPLE_TRACE}-{'0' * 16}-01",
    "the forbidden version": f"ff-{SAMPLE_TRACE}-{SAMPLE_PARENT}-01",
    "capitals": f"00-{SAMPLE_TRACE.upper()}-{SAMPLE_PARENT}-01",
    "a short trace": f"00-{SAMPLE_TRACE[1:]}-{SAMPLE_PARENT}-01",
    "a long trace": f"00-{SAMPLE_TRACE}0-{SAMPLE_PARENT}-01",
    "a short parent": f"00-{SAMPLE_TRACE}-{SAMPLE_PARENT[1:]}-01",
    "a short version": f"0-{SAMPLE_TRACE}-{SAMPLE_PARENT}-01",
    "no flags": f"00-{SAMPLE_TRACE}-{SAMPLE_PARENT}",
    "short flags": f"00-{SAMPLE_TRACE}-{SAMPLE_PARENT}-1",
    "more than version 00 has": f"00-{SAMPLE_TRACE}-{SAMPLE_PARENT}-01-more",
    "more without a dash": f"cc-{SAMPLE_TRACE}-{SAMPLE_PARENT}-01.more",
    "a line end": f"00-{SAMPLE_TRACE}-{SAMPLE_PARENT}-01\n",
    "other digits": f"00-{SAMPLE_TRACE[:-1]}٣-{SAMPLE_PARENT}-01",
}


@pytest.mark.parametrize("given", VALID.values(), ids=VALID)
def test_a_valid_trace_header_names_its_trace(given: str) -> None:
    assert trace_id_of([given]) == SAMPLE_TRACE


@pytest.mark.parametrize("given", INVALID.values(), ids=INVALID)
def test_an_invalid_trace_header_names_no_trace(given: str) -> None:
    assert trace_id_of([given]) is None


def test_no_trace_header_or_several_name_no_trace() -> None:
    assert trace_id_of([]) is None
    assert trace_id_of([VALID["sampled"]] * 2) is None


def test_bytes_of_a_later_version_go_nowhere() -> None:
    header = f"01-{SAMPLE_TRACE}-{SAMPLE_PARENT}-01-" + b"\xff".decode(errors="surrogateescape")
    assert new_context([header], []).parent == f"01-{SAMPLE_TRACE}-{SAMPLE_PARENT}-01"
