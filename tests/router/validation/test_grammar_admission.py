"""Compilations of grammars on the shards: how often, how many at once, and after a loss of the shards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import grpc
import pytest
from prometheus_client import generate_latest

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_router.errors import Overloaded, QueueExpired, ShardsGone, ValidationError
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.shards.errors import ShardBusy, ShardError, ShardHung, ShardLost
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.telemetry.metrics import Metrics
from millrace_router.validation import grammar_admission as module
from millrace_router.validation.grammar_admission import (
    BREAKS,
    MAX_REASON_CHARS,
    MAX_REMEMBERED,
    MAX_WAITING,
    NUM_AT_ONCE,
    REFUSED_SECONDS,
    Compiler,
    GrammarAdmission,
)
from millrace_testing.router.edge import FakeCompiler
from millrace_testing.shards.fake_shard import FakeShard, FakeShardService


def regex(source: str = "a") -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


@dataclass
class Clock:
    """Stands still unless it is set."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Parts:
    """Grammars, and what they look at."""

    compiler: Compiler
    clock: Clock = field(default_factory=Clock)
    check_seconds: float = 60.0
    metrics: Metrics = field(
        default_factory=lambda: Metrics(max_input_tokens=8, max_total_tokens=16)
    )

    def __post_init__(self) -> None:
        self.status = ShardStatus(300.0, self.clock)
        self.grammars = GrammarAdmission(
            self.compiler, self.status, self.metrics, check_seconds=self.check_seconds
        )

    async def reason(self, grammar: Grammar) -> str | None:
        """Why it is refused, if it is."""
        try:
            await self.grammars.check(grammar)
        except ValidationError as error:
            return str(error).removeprefix("Input validation error: grammar is not valid: ")
        return None


class GatedCompiler:
    """Answers when the test allows it, and counts how many it works on."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked: list[Grammar] = []
        self.num_running = 0
        self.most_running = 0

    async def compile_grammar(self, grammar: Grammar) -> str | None:
        self.asked.append(grammar)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.gate.wait()
        finally:
            self.num_running -= 1
        return None


class DyingCompiler:
    """Is lost with all that it works on when a poisonous grammar is among them; serves again at once."""

    def __init__(
        self, is_poison: Callable[[str], bool], error: Callable[[], BaseException]
    ) -> None:
        self.asked: Counter[str] = Counter()
        self._is_poison = is_poison
        self._error = error
        self._under_way: list[asyncio.Future[None]] = []

    async def compile_grammar(self, grammar: Grammar) -> str | None:
        self.asked[grammar.source] += 1
        done = asyncio.get_running_loop().create_future()
        self._under_way.append(done)
        await asyncio.sleep(0)
        if self._is_poison(grammar.source):
            for other in self._under_way:
                if not other.done():
                    other.set_exception(self._error())
            self._under_way.clear()
        elif not done.done():
            await asyncio.sleep(0)
            if not done.done():
                done.set_result(None)
        await done
        return None


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry after a loss comes in the next turn of the loop."""
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)


async def test_acceptances_and_refusals_are_remembered() -> None:
    compiler = FakeCompiler(refusal=lambda grammar: "no" if grammar.source == "b" else None)
    parts = Parts(compiler)
    for _ in range(3):
        assert await parts.reason(regex("a")) is None
        assert await parts.reason(regex("b")) == "no"
    assert compiler.asked.count(regex("b")) == 1
    compiler.refusal = lambda _: "no more"
    assert await parts.reason(regex("a")) is None
    assert await parts.reason(regex("b")) == "no"


async def test_the_same_text_of_another_kind_is_another_grammar() -> None:
    compiler = FakeCompiler()
    parts = Parts(compiler)
    for kind in GrammarKind:
        assert await parts.reason(Grammar(kind, "{}")) is None
    assert [grammar.kind for grammar in compiler.asked] == list(GrammarKind)


async def test_a_refusal_is_forgotten_after_ten_minutes_and_an_acceptance_is_not() -> None:
    compiler = FakeCompiler(refusal=lambda grammar: "no" if grammar.source == "b" else None)
    parts = Parts(compiler)
    for grammar in (regex("a"), regex("b")):
        await parts.reason(grammar)
    parts.clock.now += REFUSED_SECONDS - 1
    assert await parts.reason(regex("b")) == "no"
    assert len(compiler.asked) == 2
    parts.clock.now += 1
    compiler.refusal = lambda grammar: "no" if grammar.source == "a" else None
    assert await parts.reason(regex("b")) is None
    assert await parts.reason(regex("a")) is None


async def test_the_answer_used_longest_ago_is_forgotten() -> None:
    compiler = FakeCompiler(refusal=lambda _: "no")
    parts = Parts(compiler)
    for number in range(MAX_REMEMBERED):
        await parts.reason(regex(f"{number}"))
    await parts.reason(regex("0"))
    await parts.reason(regex("new"))
    asked = len(compiler.asked)
    assert asked == MAX_REMEMBERED + 1
    await parts.reason(regex("0"))
    assert len(compiler.asked) == asked
    await parts.reason(regex("1"))
    assert len(compiler.asked) == asked + 1


async def test_a_reason_has_a_greatest_length() -> None:
    parts = Parts(FakeCompiler(refusal=lambda _: "x" * 10_000))
    assert await parts.reason(regex()) == "x" * MAX_REASON_CHARS


async def test_checks_of_the_same_grammar_at_once_compile_it_once() -> None:
    parts = Parts(compiler := GatedCompiler())
    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(parts.grammars.check(regex()))
        await until(lambda: compiler.num_running == 1)
        compiler.gate.set()
    assert compiler.asked == [regex()]
    assert not parts.grammars._locks


async def test_a_check_passes_to_the_next_request_when_its_client_leaves() -> None:
    parts = Parts(compiler := GatedCompiler())
    first = asyncio.create_task(parts.grammars.check(regex()))
    await until(lambda: compiler.num_running == 1)
    second = asyncio.create_task(parts.grammars.check(regex()))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first}, timeout=5)
    compiler.gate.set()
    await second
    assert first.cancelled()
    assert compiler.asked == [regex()] * 2


async def test_few_grammars_compile_at_once_and_known_ones_do_not_wait() -> None:
    compiler = GatedCompiler()
    parts = Parts(compiler)
    compiler.gate.set()
    await parts.grammars.check(regex("known"))
    compiler.gate.clear()
    checks = [asyncio.create_task(parts.grammars.check(regex(f"{i}"))) for i in range(20)]
    await until(lambda: compiler.num_running == NUM_AT_ONCE)
    known = asyncio.create_task(parts.grammars.check(regex("known")))
    await until(lambda: compiler.num_running == NUM_AT_ONCE + 1)
    compiler.gate.set()
    await asyncio.gather(known, *checks)
    assert compiler.most_running == NUM_AT_ONCE + 1
    assert len(compiler.asked) == 22


async def test_the_number_of_waiting_grammar_checks_is_bounded() -> None:
    parts = Parts(compiler := GatedCompiler())
    checks = [asyncio.create_task(parts.grammars.check(regex(f"{i}"))) for i in range(MAX_WAITING)]
    await until(lambda: parts.grammars._num_waiting == MAX_WAITING)
    with pytest.raises(Overloaded, match="too many grammars"):
        await parts.grammars.check(regex("one more"))
    compiler.gate.set()
    await asyncio.gather(*checks)
    await parts.grammars.check(regex("one more"))


async def test_requests_that_may_not_wait_end_their_check() -> None:
    parts = Parts(compiler := GatedCompiler())
    with pytest.raises(QueueExpired):
        await parts.grammars.check(regex(), wait_seconds=0.01)
    assert compiler.num_running == 0
    compiler.gate.set()
    await parts.grammars.check(regex(), wait_seconds=10.0)


async def test_known_grammars_are_accepted_at_once() -> None:
    parts = Parts(FakeCompiler())
    await parts.grammars.check(regex())
    await parts.grammars.check(regex(), wait_seconds=0.0)


async def test_shards_that_recover_are_waited_for() -> None:
    parts = Parts(compiler := FakeCompiler())
    parts.status.begin_outage("killed")
    checking = asyncio.create_task(parts.grammars.check(regex()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert compiler.asked == []
    parts.status.end_outage()
    await checking
    assert compiler.asked == [regex()]


@pytest.mark.parametrize("has_given_up", [False, True])
async def test_shards_that_do_not_come_back_are_not_waited_for(*, has_given_up: bool) -> None:
    parts = Parts(FakeCompiler())
    parts.status.begin_outage("killed")
    checking = asyncio.create_task(parts.grammars.check(regex()))
    await asyncio.sleep(0)
    if has_given_up:
        parts.status.give_up("five crashes")
    else:
        parts.clock.now += 301.0
    with pytest.raises(ShardsGone, match="five crashes" if has_given_up else "killed"):
        await checking


@pytest.mark.parametrize(
    "error",
    [lambda: ShardLost("gone"), lambda: ShardHung("gone"), asyncio.CancelledError],
    ids=["lost", "hung", "channel closed"],
)
async def test_a_grammar_that_breaks_the_shards_is_refused_without_its_neighbours(
    error: Callable[[], BaseException],
) -> None:
    compiler = DyingCompiler(lambda source: source == "poison", error)
    parts = Parts(compiler)
    sources = ["a", "b", "poison", "c", "d", "e"]
    reasons = await asyncio.gather(*(parts.reason(regex(source)) for source in sources))
    assert dict(zip(sources, reasons, strict=True)) == dict.fromkeys(sources) | {"poison": BREAKS}
    # In a batch, and twice alone.
    assert compiler.asked["poison"] == 3
    assert await parts.reason(regex("poison")) == BREAKS
    assert compiler.asked["poison"] == 3


async def test_a_grammar_that_was_present_at_a_crash_by_chance_is_accepted() -> None:
    losses = iter([True])
    compiler = DyingCompiler(lambda _: next(losses, False), lambda: ShardLost("killed"))
    parts = Parts(compiler)
    assert await parts.reason(regex()) is None
    assert compiler.asked["a"] == 2


async def test_after_a_loss_the_recovery_is_waited_for() -> None:
    class Killed:
        """Shards that are killed with the first grammar, and come back when the test starts them."""

        num_asked = 0

        async def compile_grammar(self, _: Grammar) -> str | None:
            self.num_asked += 1
            if self.num_asked == 1:
                parts.status.begin_outage("killed")
                raise ShardLost("killed")
            assert parts.status.since is None
            return None

    parts = Parts(compiler := Killed())
    checking = asyncio.create_task(parts.grammars.check(regex()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert compiler.num_asked == 1
    parts.status.end_outage()
    await checking
    assert compiler.num_asked == 2


async def test_a_defect_of_the_shards_is_a_refusal() -> None:
    class Defective:
        num_asked = 0

        async def compile_grammar(self, _: Grammar) -> str | None:
            self.num_asked += 1
            raise ShardError("Exception calling application: panicked")

    parts = Parts(compiler := Defective())
    for _ in range(2):
        assert await parts.reason(regex()) == "Exception calling application: panicked"
    assert compiler.num_asked == 1


async def test_busy_shards_do_not_judge_the_grammar() -> None:
    class Busy:
        is_busy = True

        async def compile_grammar(self, _: Grammar) -> str | None:
            if self.is_busy:
                raise ShardBusy("8 grammars are being compiled")
            return None

    parts = Parts(compiler := Busy())
    with pytest.raises(Overloaded, match="cannot be compiled now"):
        await parts.grammars.check(regex())
    compiler.is_busy = False
    assert await parts.reason(regex()) is None


async def test_late_shards_do_not_judge_the_grammar() -> None:
    parts = Parts(compiler := GatedCompiler(), check_seconds=0.01)
    with pytest.raises(Overloaded, match="cannot be compiled now"):
        await parts.grammars.check(regex())
    parts.grammars._check_seconds = 60.0
    compiler.gate.set()
    assert await parts.reason(regex()) is None


async def test_a_known_grammar_is_compiled_again_before_a_step_would_have_to() -> None:
    """The shards may have dropped it; whether they can compile it now is not asked of a known one."""
    parts = Parts(compiler := GatedCompiler())
    compiler.gate.set()
    known, refused = regex("a"), regex("b")
    for _ in range(3):
        await parts.grammars.check(known)
    assert compiler.asked == [known] * 3
    parts.grammars._compiler = FakeCompiler(refusal=lambda _: "no")
    await parts.grammars.check(known)
    for _ in range(2):
        assert await parts.reason(refused) == "no"
    assert parts.grammars._compiler.asked == [known, refused]


@pytest.mark.parametrize("error", [ShardBusy("8"), ShardLost("gone"), ShardError("panicked")])
async def test_known_grammars_are_accepted_despite_errors_of_the_shards(error: ShardError) -> None:
    class Failing:
        fails = False

        async def compile_grammar(self, _: Grammar) -> str | None:
            if self.fails:
                raise error
            return None

    parts = Parts(compiler := Failing())
    await parts.grammars.check(regex())
    compiler.fails = True
    await parts.grammars.check(regex())


async def test_a_known_grammar_is_accepted_without_a_long_wait() -> None:
    parts = Parts(compiler := GatedCompiler())
    compiler.gate.set()
    await parts.grammars.check(regex())
    compiler.gate.clear()
    await parts.grammars.check(regex(), wait_seconds=0.0)
    parts.status.begin_outage("killed")
    await parts.grammars.check(regex())


async def test_answers_of_the_shards_are_counted() -> None:
    refusal = {"b": "no", "c": "no"}.get
    parts = Parts(FakeCompiler(refusal=lambda grammar: refusal(grammar.source)))
    for source in "aabbc":
        await parts.reason(regex(source))
    busy = Parts(GatedCompiler(), check_seconds=0.0, metrics=parts.metrics)
    with pytest.raises(Overloaded):
        await busy.reason(regex())
    text = generate_latest(parts.metrics.registry).decode()
    for outcome, count in {"accepted": 1, "refused": 2, "unavailable": 1}.items():
        assert f'millrace_grammars_total{{outcome="{outcome}"}} {count}.0' in text
    assert "millrace_grammar_duration_seconds_count 4.0" in text


async def test_a_client_that_leaves_is_not_taken_for_a_channel_that_closed() -> None:
    parts = Parts(compiler := GatedCompiler())
    checking = asyncio.create_task(parts.grammars.check(regex()))
    await until(lambda: compiler.num_running == 1)
    checking.cancel()
    await asyncio.wait({checking}, timeout=5)
    compiler.gate.set()
    assert checking.cancelled()
    assert len(compiler.asked) == 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


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


async def test_kind_and_text_reach_the_shards_and_the_reason_comes_back(address: str) -> None:
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


async def test_a_restarted_shard_gets_the_grammar_again(address: str) -> None:
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
