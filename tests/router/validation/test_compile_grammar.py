"""Grammars asked for over a real socket: the answer, and shards that are lost while they compile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import grpc
import pytest

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_router.errors import Overloaded, ValidationError
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.telemetry.metrics import Metrics
from millrace_router.validation.grammar_admission import GrammarAdmission
from millrace_testing.shards.fake_shard import FakeShard, FakeShardService

GRAMMAR = Grammar(GrammarKind.LARK, 'start: "a"')


class CompilingShard(FakeShardService):
    """Compiles what it is given when its gate is open, and refuses empty texts."""

    def __init__(self) -> None:
        super().__init__(FakeShard())
        self.gate = Event()
        self.is_full = False
        self.asked: list[tuple[int, str]] = []

    def CompileGrammar(
        self, request: pb.CompileGrammarRequest, context: grpc.ServicerContext
    ) -> pb.CompileGrammarResponse:
        self.asked.append((request.grammar.kind, request.grammar.source))
        assert self.gate.wait(10)
        if self.is_full:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "8 grammars are being compiled")
        return pb.CompileGrammarResponse(error=None if request.grammar.source else "it is empty")


@contextmanager
def listening(address: str, service: CompilingShard) -> Iterator[grpc.Server]:
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_ShardServiceServicer_to_server(service, server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield server
    finally:
        service.gate.set()
        server.stop(grace=None).wait()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/shard"


def grammars_over(shards: StepChannel) -> GrammarAdmission:
    metrics = Metrics(max_input_tokens=8, max_total_tokens=16)
    return GrammarAdmission(shards.group, ShardStatus(), metrics)


async def asked(service: CompilingShard, count: int) -> None:
    async with asyncio.timeout(10):
        while len(service.asked) < count:
            await asyncio.sleep(0.001)


async def test_kind_and_text_go_there_and_the_reason_comes_back(address: str) -> None:
    service = CompilingShard()
    service.gate.set()
    with listening(address, service):
        shards = StepChannel(ShardGroup([address]))
        grammars = grammars_over(shards)
        for kind in GrammarKind:
            await grammars.check(Grammar(kind, "x"))
        with pytest.raises(ValidationError, match="grammar is not valid: it is empty"):
            await grammars.check(Grammar(GrammarKind.REGEX, ""))
        await shards.close()
    assert service.asked == [
        (pb.Grammar.KIND_JSON_SCHEMA, "x"),
        (pb.Grammar.KIND_REGEX, "x"),
        (pb.Grammar.KIND_LARK, "x"),
        (pb.Grammar.KIND_REGEX, ""),
    ]


async def test_a_shard_that_is_full_refuses_for_now(address: str) -> None:
    service = CompilingShard()
    service.gate.set()
    service.is_full = True
    with listening(address, service):
        shards = StepChannel(ShardGroup([address]))
        grammars = grammars_over(shards)
        with pytest.raises(Overloaded):
            await grammars.check(GRAMMAR)
        service.is_full = False
        await grammars.check(GRAMMAR)
        await shards.close()


async def test_replaced_channels_cancel_no_compilation(address: str) -> None:
    """The router begins a new epoch on new channels after a failed step."""
    service = CompilingShard()
    with listening(address, service):
        shards = StepChannel(ShardGroup([address]))
        checking = asyncio.create_task(grammars_over(shards).check(GRAMMAR))
        await asked(service, 1)
        await shards.reset()
        await asked(service, 2)
        service.gate.set()
        await checking
        await shards.close()


async def test_a_shard_that_is_started_anew_is_asked_again(address: str) -> None:
    first, second = CompilingShard(), CompilingShard()
    shards = StepChannel(ShardGroup([address]))
    with listening(address, first) as server:
        checking = asyncio.create_task(grammars_over(shards).check(GRAMMAR))
        await asked(first, 1)
        server.stop(grace=None).wait()
    second.gate.set()
    with listening(address, second):
        await checking
        await shards.close()
    assert len(second.asked) == 1


async def test_a_client_that_leaves_ends_its_call(address: str) -> None:
    service = CompilingShard()
    with listening(address, service):
        shards = StepChannel(ShardGroup([address]))
        grammars = grammars_over(shards)
        checking = asyncio.create_task(grammars.check(GRAMMAR))
        await asked(service, 1)
        checking.cancel()
        await asyncio.wait({checking}, timeout=5)
        service.gate.set()
        assert checking.cancelled()
        await grammars.check(GRAMMAR)
        await shards.close()
    assert len(service.asked) == 2
