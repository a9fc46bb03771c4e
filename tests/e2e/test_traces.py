"""Traces of a whole server, also of a request whose shard was killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from millrace_testing.launcher.e2e import END_SECONDS, launch
from millrace_testing.router.collector import attributes_of, grpc_collector, http_collector

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
STORY: dict[str, Any] = {
    "inputs": "What is a block?",
    "parameters": {
        "max_new_tokens": 100,
        "grammar": {"type": "regex", "value": "[a-z ]{2000}"},
    },
}


@pytest.mark.long
@pytest.mark.parametrize(
    "collector_of", [grpc_collector, pytest.param(http_collector, marks=pytest.mark.long)]
)
async def test_the_trace_of_a_request_shows_the_recovery_from_a_killed_shard(
    collector_of: Callable[[], Any],
) -> None:
    with collector_of() as collector:
        protocol = "grpc" if collector_of is grpc_collector else "http/protobuf"
        flags = (f"--otlp-endpoint={collector.url}", f"--otlp-protocol={protocol}")
        with launch(*flags) as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as client:

                async def send() -> httpx.Response:
                    return await client.post("/generate", json=STORY, headers=HEADERS)

                answering, shard = await server.caught(
                    send,
                    is_time=lambda: server.metrics()["millrace_requests_running"] >= 1,
                    num_running=1,
                )
                shard.kill()
                assert (await asyncio.wait_for(answering, END_SECONDS)).status_code == 200
                # The spans of a shard that is killed go with it.
                assert (await client.post("/generate", json=STORY)).status_code == 200
            assert server.end() == 0
        spans = [span for span in collector.spans if span.trace_id.hex() == TRACE]
        # Of a request that was sent again on a busy machine, the last one counts.
        request = [span for span in spans if span.parent_span_id.hex() == PARENT][-1]
        below = [span for span in spans if span.parent_span_id == request.span_id]
        names = [span.name for span in below]
        assert request.name == "POST /generate"
        assert attributes_of(request)["gen_ai.usage.output_tokens"] == 100
        assert {"queue", "prefill", "decode", "recovery"} <= set(names)
        for span in below:
            assert request.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= request.end_time_unix_nano
        (recovery,) = [span for span in below if span.name == "recovery"]
        assert attributes_of(recovery)["millrace.recovery.reason"]
        (compiled,) = [span for span in collector.spans if span.name == "CompileGrammar"]
        (parent,) = [span for span in collector.spans if span.span_id == compiled.parent_span_id]
        assert (parent.name, parent.trace_id) == ("POST /generate", compiled.trace_id)
        assert collector.services == {
            "text-generation-inference.router",
            "text-generation-inference.server",
        }
