"""Spans of a shard's calls, below the router's spans."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_shard.commands.composition import TracingError, open_tracing
from millrace_shard.config import ShardConfig
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.warmup import MemoryLimits
from millrace_shard.server.service import ShardService, new_server
from millrace_testing.router.collector import attributes_of, grpc_collector, http_collector

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENTS = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "a=b"))


class Service(ShardService):
    """Answers without an engine."""

    def CompileGrammar(
        self, request: pb.CompileGrammarRequest, context: grpc.ServicerContext
    ) -> pb.CompileGrammarResponse:
        if request.grammar.source == "busy":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "secret")
        if request.grammar.source == "broken":
            raise RuntimeError("secret")
        return pb.CompileGrammarResponse()

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:
        return pb.InfoResponse()


def config_of(**given: Any) -> ShardConfig:
    return ShardConfig(model_folder=Path("m"), rank=0, world_size=1, **given)


@pytest.mark.parametrize("collector_of", [grpc_collector, http_collector])
def test_calls_for_a_request_are_spans_below_its_own(
    tmp_path: Path, collector_of: Callable[[], Any]
) -> None:
    address = f"unix:{tmp_path}/shard"
    engine = Engine(limits=MemoryLimits(), device=torch.device("cpu"))
    service = Service(engine, deterministic=False, prefill_logprobs=False, end=lambda: None)
    protocol = "grpc" if collector_of is grpc_collector else "http/protobuf"
    with collector_of() as collector:
        tracing = open_tracing(config_of(otlp_endpoint=collector.url, otlp_protocol=protocol))
        assert tracing is not None
        server = new_server(service, address, None, (tracing,))
        server.start()
        with grpc.insecure_channel(address) as channel:
            stub = pb_grpc.ShardServiceStub(channel)
            request = pb.CompileGrammarRequest(grammar=pb.Grammar(source="secret"))
            stub.CompileGrammar(request, metadata=PARENTS)
            stub.Info(pb.InfoRequest(), metadata=PARENTS)
            request.grammar.source = "busy"
            with pytest.raises(grpc.RpcError):
                stub.CompileGrammar(request)
            request.grammar.source = "broken"
            with pytest.raises(grpc.RpcError):
                stub.CompileGrammar(request)
        server.stop(None).wait()
        tracing.close()
        first, second, third = collector.wait_for(lambda spans: len(spans) == 3)
    assert collector.services == {"text-generation-inference.server"}
    assert (first.name, first.kind) == ("CompileGrammar", Span.SPAN_KIND_SERVER)
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert first.trace_state == "a=b"
    assert attributes_of(first)["rpc.method"] == "CompileGrammar"
    assert (second.parent_span_id, second.status.code) == (b"", Status.STATUS_CODE_ERROR)
    assert third.status.code == Status.STATUS_CODE_ERROR
    assert "secret" not in str(collector.requests)


def test_without_the_flag_nothing_is_imported() -> None:
    assert open_tracing(config_of()) is None


def test_without_the_package_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "millrace_shard.server.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingError, match="pip install opentelemetry-sdk opentelemetry-exp"):
        open_tracing(config_of(otlp_endpoint="http://c"))
