"""Grammars are tried out in a separate process, compiled once, and cannot harm other requests."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from threading import Barrier, Event, Semaphore, Thread
from types import SimpleNamespace

import grpc
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from millrace_proto import generate_pb2 as pb
from millrace_proto.sequence import Grammar
from millrace_shard.engine.engine import Progress
from millrace_shard.server.service import ShardService
from millrace_shard.structured_output import grammar_compiler, grammar_process, matcher
from millrace_shard.structured_output.grammar_compiler import GrammarCompiler
from millrace_shard.structured_output.grammar_process import CompilerBusy, GrammarProcess
from millrace_shard.structured_output.grammar_source import GrammarInvalid
from millrace_shard.structured_output.manager import NO_GRAMMARS, GrammarManager
from millrace_shard.structured_output.mask_computer import Bitmasks, MaskRequest
from millrace_shard.structured_output.vocabulary import load_vocabulary
from millrace_testing.engines.grammars import Words, allowed, lark, mask_of, regex, schema
from millrace_testing.text.texts import byte_level

PATIENT = 60.0
OPTIONAL = json.dumps(
    {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(900)}}
)
ASCII = Words([bytes([byte]) for byte in range(32, 127)] + [b"ab", b"bc", b"00", b"a1"], size=160)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer alone; other files are not read."""
    path = tmp_path_factory.mktemp("model")
    byte_level().save(str(path / "tokenizer.json"))
    return path


def new_compiler(folder: Path, *, timeout: float = PATIENT) -> GrammarCompiler:
    vocabulary = load_vocabulary(folder, vocab_size=430, eos_token_ids=(0,))
    assert vocabulary is not None
    return GrammarCompiler(vocabulary, folder, timeout=timeout)


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    made = new_compiler(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def hasty(folder: Path) -> Iterator[GrammarCompiler]:
    """A compiler with the default limit."""
    made = new_compiler(folder, timeout=grammar_compiler.TIMEOUT)
    yield made
    made.close()


def process_of(compiler: GrammarCompiler) -> psutil.Process:
    """The one that was started."""
    pid = compiler._process.pid
    assert pid is not None
    return psutil.Process(pid)


@pytest.mark.parametrize(
    "grammar",
    [regex("[0-9]{4}"), schema('{"type": "object"}'), lark('start: "a" b\nb: /x+/')],
    ids=["regex", "json schema", "lark"],
)
def test_a_valid_grammar_is_accepted(compiler: GrammarCompiler, grammar: Grammar) -> None:
    compiler.check(grammar)
    assert mask_of(compiler.matcher(grammar))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (regex("(a"), "unclosed group"),
        (regex("a(?=b)"), "look-around"),
        (regex(r"(a)\1"), "backreferences"),
        (regex(r"a[^\s\S]"), "no text matches"),
        (lark("start: nowhere"), "nowhere"),
        (lark('{"grammars": []}'), "expecting"),
        (schema('{"contains": {}}'), "contains"),
        (schema("[1"), "JSON"),
        (regex("(" * 2000 + "a" + ")" * 2000), "nested"),
        (lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000), "nested"),
        (schema('{"items":' * 5_000 + "{}" + "}" * 5_000), "nested"),
        (schema('{"enum":[' + "[" * 60_000 + "]" * 60_000 + "]}"), "nested"),
        (schema(OPTIONAL), "items"),
        (regex("a" * (grammar_compiler.MAX_SOURCE_BYTES + 1)), "bytes"),
        (regex("\ud800"), "surrogate"),
    ],
    ids=[
        *("group", "look-around", "back-reference", "empty", "unknown rule", "own format"),
        *("keyword", "json", "deep regex", "deep lark", "deep schema", "deep values"),
        *("optional properties", "size", "surrogate"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_reason(
    compiler: GrammarCompiler, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(GrammarInvalid, match=reason) as refusal:
        compiler.check(grammar)
    assert 0 < len(str(refusal.value)) < 600
    compiler.check(regex("still alive"))


def _choices(count: int) -> str:
    return json.dumps({"enum": [f"value number {number}" for number in range(count)]})


PATHOLOGICAL = {
    "nested quantifiers": regex("(((a*)*)*)*b"),
    "overlapping quantifiers": regex("(x+x+)+y"),
    "counts of counts": regex("((a{1,1000}){1,1000}){1,1000}"),
    "a far alternative": regex("(a|b)*a(a|b){400}c"),
    "an intersection that blows up": lark(
        "start: T\nT: " + " & ".join(f"/(.*{char}){{7}}.*/" for char in "abcdefgh")
    ),
    "a long alternation": regex("|".join(f"{number:07}" for number in range(16_000))),
    "many values": schema(_choices(4_000)),
    "many optional properties": schema(
        json.dumps(
            {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(4_000)}}
        )
    ),
    "a product of choices": schema(
        json.dumps(
            {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for m in range(12)]} for n in range(8)]}
        )
    ),
    "a huge count": lark('start: "a"{1000000000}'),
    "a huge array": schema('{"type": "array", "minItems": 1000000000}'),
    "a chain of references": schema(
        json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(3000)}
                | {"d3000": {}},
            }
        )
    ),
    "two recursions at once": schema(
        json.dumps(
            {
                "allOf": [{"$ref": "#/$defs/s"}, {"$ref": "#/$defs/t"}],
                "$defs": {
                    name: {"type": "object", "properties": {"c": {"$ref": f"#/$defs/{name}"}}}
                    for name in "st"
                },
            }
        )
    ),
    "disjoint patterns": schema(
        json.dumps(
            {"type": "object", "patternProperties": {f"^.*{n}{{9}}.*$": {} for n in range(40)}}
        )
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.long] * (name not in ("counts of counts", "many values"))
        )
        for name in PATHOLOGICAL
    ],
)
def test_a_pathological_grammar_is_refused_or_compiled_while_others_go_on(
    name: str, hasty: GrammarCompiler
) -> None:
    """A compilation in another process cannot hold this interpreter, and its time is bounded."""
    grammars = GrammarManager(hasty, 430)
    grammars.admit(0, regex("a*"), np.array([], dtype=np.int64))
    token = byte_level().get_vocab()["a"]
    finished = Event()
    outcomes: list[str] = []

    def check() -> None:
        try:
            hasty.check(PATHOLOGICAL[name])
            outcomes.append("taken")
        except (GrammarInvalid, CompilerBusy) as error:
            outcomes.append(str(error))
        finally:
            finished.set()

    thread = Thread(target=check)
    thread.start()
    while not finished.is_set():
        masks = grammars.start([MaskRequest(slot=0, new_tokens=lambda: (token,))]).result()
        assert not len(masks.failed)
    thread.join()
    assert outcomes[0]
    if outcomes == ["taken"]:
        # Compiled here too, its masks are bounded by llguidance's own limits.
        grammars.admit(1, PATHOLOGICAL[name], np.array([], dtype=np.int64))
        grammars.start([MaskRequest(slot=1, new_tokens=lambda: ())]).result()
    grammars.close()


LONG = schema(
    json.dumps(
        {
            "type": "object",
            "patternProperties": {f"^{n}_(.*x){{20}}$": {} for n in range(1000)},
        }
    )
)
"""Seconds pass before llguidance would be done with it."""


class Held:
    """Holds requests for grammars of `held`, whose forks have begun, until they may go on."""

    def __init__(self, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = Event()
        self._compiler = compiler
        self._begun = Semaphore(0)
        self._pool = ThreadPoolExecutor(8)
        answer = grammar_process._answer

        def held_answer(connection: socket.socket, request: bytes) -> bytes:
            if b"held" in request:
                self._begun.release()
                assert self.may_go_on.wait(PATIENT)
            return answer(connection, request)

        monkeypatch.setattr(grammar_process, "_answer", held_answer)

    def check(self, grammar: Grammar = regex("held")) -> Future[None]:  # noqa: B008
        """Begin to check `grammar`."""
        check = self._pool.submit(self._compiler.check, grammar)
        assert self._begun.acquire(timeout=PATIENT)
        return check

    def fork(self) -> tuple[psutil.Process, psutil.Process, Future[None]]:
        """The process, its only fork, and the check that waits for it."""
        check = self.check()
        process = process_of(self._compiler)
        (fork,) = process.children()
        return process, fork, check


def test_grammars_that_take_long_hold_up_none_that_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = new_compiler(folder, timeout=0.5)
    held = Held(compiler, monkeypatch)
    checks = [
        held.check(schema(LONG.source.replace("_", f"_held_{number}")))
        for number in range(grammar_compiler.NUM_COMPILES - 1)
    ]
    compiler.check(regex("quick"))
    held.may_go_on.set()
    compiler.check(regex("quick too"))
    for check in checks:
        error = check.exception(PATIENT)
        # Beside other work it may not have begun in time.
        assert isinstance(error, CompilerBusy) or "over 0.5 s" in str(error)
    compiler.close()


def test_a_step_does_not_wait_for_a_grammar_that_takes_its_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache may have dropped a known grammar, which is then tried out again for another request."""
    compiler = new_compiler(folder)
    held = Held(compiler, monkeypatch)
    check = held.check()
    assert mask_of(compiler.matcher(regex("held")))
    assert not check.done()
    held.may_go_on.set()
    assert check.exception(PATIENT) is None
    compiler.close()


def test_a_fork_that_dies_refuses_only_its_grammar(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = new_compiler(folder)
    held = Held(compiler, monkeypatch)
    process, fork, check = held.fork()
    fork.kill()
    held.may_go_on.set()
    with pytest.raises(GrammarInvalid, match="memory"):
        check.result(PATIENT)
    compiler.check(regex("after"))
    assert process_of(compiler) == process
    compiler.close()


def test_a_process_that_dies_refuses_no_grammar_and_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = new_compiler(folder)
    held = Held(compiler, monkeypatch)
    process, fork, check = held.fork()
    process.kill()
    assert psutil.wait_procs([fork], PATIENT)[0] == [fork]
    held.may_go_on.set()
    with pytest.raises(CompilerBusy, match="has ended"):
        check.result(PATIENT)
    compiler.check(regex("after"))
    assert process_of(compiler) != process
    compiler.close()


def test_a_process_that_hangs_is_killed_and_refuses_no_grammar(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = new_compiler(folder)
    compiler.check(regex("warm"))
    process = process_of(compiler)
    process.suspend()
    with monkeypatch.context() as patched:
        patched.setattr(grammar_process, "START_SECONDS", 0.2)
        with pytest.raises(CompilerBusy, match="no process"):
            compiler.check(regex("hang"))
    assert not process.is_running()
    compiler.check(regex("after"))
    compiler.close()


def test_a_fork_without_cpu_time_refuses_no_grammar(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "ANSWER_SECONDS", 0.2)
    compiler = new_compiler(folder)
    held = Held(compiler, monkeypatch)
    _, fork, check = held.fork()
    fork.suspend()
    held.may_go_on.set()
    with pytest.raises(CompilerBusy, match="machine"):
        check.result(PATIENT)
    fork.resume()
    assert psutil.wait_procs([fork], PATIENT)[0] == [fork]
    compiler.close()


def test_grammars_compile_on_half_of_the_cpus_while_these_are_idle(
    compiler: GrammarCompiler,
) -> None:
    scheduler = compiler._pool.submit(os.sched_getscheduler, 0)
    assert scheduler.result(PATIENT) == os.SCHED_IDLE != os.sched_getscheduler(0)
    compiler.check(regex("warm"))
    pid = process_of(compiler).pid
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE
    num_cpus = len(os.sched_getaffinity(0))
    assert len(os.sched_getaffinity(pid)) == num_cpus - num_cpus // 2


def test_a_grammar_that_takes_too_long_is_refused(folder: Path) -> None:
    compiler = new_compiler(folder, timeout=0.1)
    with pytest.raises(GrammarInvalid, match=r"over 0\.1 s"):
        compiler.check(LONG)
    compiler.close()


def test_without_a_process_no_grammar_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    process = GrammarProcess(folder, vocab_size=430, eos_token_ids=(0,))
    with pytest.raises(CompilerBusy, match="no process"):
        process.try_out(regex("(a"), timeout=PATIENT)


def test_the_process_ends_with_the_shard(folder: Path) -> None:
    process = GrammarProcess(folder, vocab_size=430, eos_token_ids=(0,))
    process.try_out(regex("a"), timeout=PATIENT)
    assert process._process is not None
    assert process._control is not None
    process._control.close()
    assert process._process.wait(PATIENT) == 0
    process.close()


class Counting:
    """Stands in for trying out: counts, and holds on until it is let."""

    def __init__(self) -> None:
        self.calls: list[Grammar] = []
        self.error: Exception | None = None
        self.entered = Semaphore(0)
        self.may_go_on = Event()

    def try_out(self, grammar: Grammar) -> str:
        self.calls.append(grammar)
        self.entered.release()
        assert self.may_go_on.wait(PATIENT)
        if self.error is not None:
            raise self.error
        return json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]})


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    made = Counting()
    monkeypatch.setattr(
        GrammarProcess,
        "try_out",
        lambda process, grammar, *, timeout: made.try_out(grammar),
    )
    return made


def test_requests_for_one_grammar_at_a_time_compile_it_once(
    folder: Path, counting: Counting
) -> None:
    compiler = new_compiler(folder)
    barrier = Barrier(9)

    def check() -> None:
        barrier.wait(PATIENT)
        compiler.check(regex("same"))

    with ThreadPoolExecutor(8) as pool:
        checks = [pool.submit(check) for _ in range(8)]
        barrier.wait(PATIENT)
        counting.may_go_on.set()
        assert [each.result(PATIENT) for each in checks] == [None] * 8
    compiler.check(regex("same"))
    assert counting.calls == [regex("same")]


def test_the_same_source_of_another_kind_is_another_grammar(
    folder: Path, counting: Counting
) -> None:
    compiler = new_compiler(folder)
    counting.may_go_on.set()
    for grammar in (regex("start: /a/"), lark("start: /a/")):
        compiler.check(grammar)
    assert len(counting.calls) == 2


def test_more_grammars_than_are_compiled_at_a_time_are_refused_for_now(
    folder: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "NUM_COMPILES", 2)
    compiler = new_compiler(folder)
    with ThreadPoolExecutor(2) as pool:
        checks = [pool.submit(compiler.check, regex(f"number {number}")) for number in range(2)]
        for _ in checks:
            assert counting.entered.acquire(timeout=PATIENT)
        with pytest.raises(CompilerBusy):
            compiler.check(regex("one more"), wait_seconds=0.1)
        counting.may_go_on.set()
        for check in checks:
            check.result(PATIENT)
    assert len(counting.calls) == 2
    compiler.check(regex("one more"))


LARGE = regex("a" * (grammar_compiler.MAX_RENEWED_CHARS + 1))


def test_a_running_sequence_has_its_grammar_without_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    compiler = new_compiler(folder)
    with pytest.raises(CompilerBusy):
        compiler.check(LARGE)
    assert mask_of(compiler.matcher(LARGE))


def test_a_running_sequence_does_not_fail_with_the_check_of_another(
    folder: Path, counting: Counting
) -> None:
    compiler = new_compiler(folder)
    counting.error = CompilerBusy("no")
    with ThreadPoolExecutor(2) as pool:
        check = pool.submit(compiler.check, LARGE)
        assert counting.entered.acquire(timeout=PATIENT)
        matcher = pool.submit(compiler.matcher, LARGE)
        counting.may_go_on.set()
        assert isinstance(check.exception(PATIENT), CompilerBusy)
        assert mask_of(matcher.result(PATIENT))


def test_the_least_recently_used_grammar_is_compiled_again(
    folder: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED", 2)
    counting.may_go_on.set()
    compiler = new_compiler(folder)
    for source in ("a", "b", "a", "c", "a", "b"):
        compiler.check(regex(source))
    assert [grammar.source for grammar in counting.calls] == ["a", "b", "c", "b"]


def test_long_sources_evict_several_short_ones(
    folder: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED_BYTES", 10)
    counting.may_go_on.set()
    compiler = new_compiler(folder)
    for source in ("aaaa", "bbbb", "c" * 9, "aaaa"):
        compiler.check(regex(source))
    assert len(counting.calls) == 4


def test_states_that_texts_reached_evict_other_grammars(
    folder: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_STATE_BYTES", 100)
    counting.may_go_on.set()
    compiler = new_compiler(folder)
    for source in ("a", "b"):
        compiler.check(regex(source))
    compiler.matcher(regex("a")).lexer.state_bytes = 101
    for source in ("c", "b", "a"):
        compiler.check(regex(source))
    assert [grammar.source for grammar in counting.calls] == ["a", "b", "c", "b", "a"]


def test_a_refusal_is_not_kept(folder: Path) -> None:
    compiler = new_compiler(folder)
    for _ in range(2):
        with pytest.raises(GrammarInvalid):
            compiler.check(regex("(a"))
    assert not compiler._cache
    compiler.close()


def test_matchers_of_one_grammar_do_not_share_their_position(compiler: GrammarCompiler) -> None:
    first, second = (compiler.matcher(regex("abc")) for _ in range(2))
    assert first.consume(byte_level().get_vocab()["a"])
    assert mask_of(first) != mask_of(second)
    assert mask_of(second) == mask_of(compiler.matcher(regex("abc")))


REGEXES = st.recursive(
    st.sampled_from(["a", "b", "1", "[a-c]", "[^b]", r"\d", r"\w", ".", "x"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join).map("(?:{})".format),
        inner.map("(?:{})*".format),
        inner.map("(?:{})?".format),
        inner.map("(?:{}){{1,3}}".format),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(pattern=REGEXES, text=st.text("ab1cx_ ", max_size=7))
def test_a_regex_matches_the_texts_that_it_matches_elsewhere(pattern: str, text: str) -> None:
    matcher = ASCII.matcher(regex(pattern))
    accepted = matcher.consume_all([*ASCII.split(text.encode()), ASCII.eos[0]])
    assert accepted == (re.fullmatch(pattern, text, re.ASCII) is not None)


@settings(max_examples=80, deadline=None)
@given(pattern=REGEXES, seed=st.integers(0, 10_000))
def test_texts_that_a_regex_generates_match_it(pattern: str, seed: int) -> None:
    rng, matcher = Random(seed), ASCII.matcher(regex(pattern))
    ids: list[int] = []
    for _ in range(60):
        choices = mask_of(matcher)
        ends = [id_ for id_ in choices if id_ in ASCII.eos]
        id_ = rng.choice(ends if ends and rng.random() < 0.3 else choices)
        assert matcher.consume(id_)
        if matcher.has_ended:
            assert re.fullmatch(pattern, ASCII.text(ids).decode(), re.ASCII), pattern
            return
        ids.append(id_)


class Call:
    """The part of gRPC that a method of the service uses."""

    code: grpc.StatusCode | None = None

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call."""
        self.code = code
        raise RuntimeError(details)


class IdleEngine:
    """Has a model and does nothing."""

    def __init__(self, grammars: GrammarManager | None) -> None:
        self.loaded = SimpleNamespace(grammars=grammars, device=torch.device("cpu"))

    def progress(self) -> Progress:
        return Progress(last_step=0, pending_steps=0, idle_ns=10**9, warmed_up=True, pulse=0)


def ask(
    grammars: GrammarManager | None, grammar: pb.Grammar, call: Call
) -> pb.CompileGrammarResponse:
    engine = IdleEngine(grammars)
    service = ShardService(engine, deterministic=True, prefill_logprobs=False, end=lambda: None)  # type: ignore[arg-type]
    return service.CompileGrammar(pb.CompileGrammarRequest(grammar=grammar), call)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (pb.Grammar(kind=pb.Grammar.KIND_REGEX, source="a+"), None),
        (pb.Grammar(kind=pb.Grammar.KIND_JSON_SCHEMA, source='{"contains": {}}'), "contains"),
        (pb.Grammar(kind=pb.Grammar.KIND_LARK, source="start: x"), "x"),
        (pb.Grammar(source="a("), "unclosed group"),
    ],
    ids=["regex", "json schema", "lark", "no kind"],
)
def test_the_service_answers_without_the_engine(
    compiler: GrammarCompiler, grammar: pb.Grammar, reason: str | None
) -> None:
    answer = ask(GrammarManager(compiler, 430), grammar, Call())
    assert answer.HasField("error") == (reason is not None)
    assert (reason or "") in answer.error


@pytest.mark.parametrize(
    "grammars", [None, GrammarManager(None, 430)], ids=["none", "no tokenizer"]
)
def test_a_model_without_grammars_reports_it(grammars: GrammarManager | None) -> None:
    answer = ask(grammars, pb.Grammar(kind=pb.Grammar.KIND_REGEX, source="a"), Call())
    assert answer.error == NO_GRAMMARS


def test_a_service_that_is_busy_compiling_asks_for_a_retry(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CALLS", 0)
    call = Call()
    with pytest.raises(RuntimeError, match="try again"):
        ask(GrammarManager(new_compiler(folder), 430), pb.Grammar(source="a"), call)
    assert call.code is grpc.StatusCode.RESOURCE_EXHAUSTED


VOCAB_SIZE = 430
STATES = 600
"""A text takes some hundreds of them; several share them."""
NUM_TEXTS = 5
NUM_TOKENS = 40
GRAMMAR = regex(r"[a-z ]*[aeiou][a-z ]{9}[xyz][a-z ]*")


@pytest.fixture
def small_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarCompiler]:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    vocabulary = load_vocabulary(tmp_path, vocab_size=VOCAB_SIZE, eos_token_ids=(0,))
    assert vocabulary is not None
    made = GrammarCompiler(vocabulary, tmp_path)
    limits = LLParserLimits(max_lexer_states=STATES, verbose_errors=False)
    monkeypatch.setattr(matcher, "LIMITS", limits)
    monkeypatch.setattr(grammar_compiler, "RENEW_SECONDS", 60.0)
    yield made
    made.close()


class Texts:
    """Follows texts of one grammar, each by its own generator."""

    def __init__(self, small_compiler: GrammarCompiler, numbers: range) -> None:
        self.grammars = GrammarManager(small_compiler, VOCAB_SIZE, overlap=False)
        self.masks: dict[int, list[set[int]]] = {number: [] for number in numbers}
        self._last: dict[int, tuple[int, ...]] = dict.fromkeys(numbers, ())
        self._random = {number: Random(number) for number in numbers}
        # A grammar that is admitted while it is being compiled is compiled once more, and shares nothing.
        small_compiler.matcher(GRAMMAR)
        for number in numbers:
            self.grammars.admit(number, GRAMMAR, np.zeros(0, dtype=np.int64))

    def step(self) -> Bitmasks:
        """A token of each."""
        rows = [
            MaskRequest(slot=slot, new_tokens=partial(self._last.__getitem__, slot))
            for slot in self._last
        ]
        masks = self.grammars.start(rows).result()
        for slot, mask in zip(self._last, masks.bits, strict=True):
            result = allowed(mask)
            self.masks[slot].append(result)
            self._last[slot] = (self._random[slot].choice(sorted(result - {0})),)
        return masks


def test_a_text_continues_after_others_have_used_up_their_states(
    small_compiler: GrammarCompiler,
) -> None:
    together = Texts(small_compiler, range(NUM_TEXTS))
    for _ in range(NUM_TOKENS):
        assert not len(together.step().failed)
    for number in range(NUM_TEXTS):
        alone = Texts(small_compiler, range(number, number + 1))
        for _ in range(NUM_TOKENS):
            assert not len(alone.step().failed)
        assert alone.masks[number] == together.masks[number]


def test_texts_of_one_compiler_do_run_out_of_states(
    small_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above would show nothing. So it is where compiling takes too long for a step to wait."""
    monkeypatch.setattr(grammar_compiler, "RENEW_SECONDS", 0.0)
    texts = Texts(small_compiler, range(NUM_TEXTS))
    failed = {slot for _ in range(NUM_TOKENS) for slot in texts.step().failed}
    assert failed
    # Later texts have their own states.
    later = Texts(small_compiler, range(1))
    assert not len(later.step().failed)


def test_a_text_with_too_many_states_of_its_own_fails(
    small_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(max_lexer_states=40, verbose_errors=False)
    monkeypatch.setattr(matcher, "LIMITS", limits)
    texts = Texts(small_compiler, range(1))
    assert any(len(texts.step().failed) for _ in range(NUM_TOKENS))
