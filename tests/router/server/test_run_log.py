"""The log of keyed requests as bytes: kills at every byte, copies when it is full, and what is left out."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.request.continuation import Beginning, KnownToken
from millrace_router.request.names import Names
from millrace_router.server.run_log import LoggedRun, RunLog, RunRecorder, Start

PRINT = bytes(range(32))
MEMORY = 1 << 14
STREAM = "1700000000-00112233445566778899aabbccddeeff"


def start(number: int = 0, body: bytes = b"{}") -> Start:
    return Start(
        scope=bytes([number]) * 64,
        body_digest=bytes(32),
        target="/generate",
        headers={"content-type": "application/json"},
        body=body,
        names=Names.of_caller(STREAM, bytes([number])),
        key_name="team",
        address="::1",
    )


def begun(log: RunLog, number: int = 0, body: bytes = b"{}") -> RunRecorder:
    recorder = log.begin(start(number, body))
    assert recorder is not None
    return recorder


def add(recorder: RunRecorder, *ids: int, choice: int = 0) -> None:
    """One step for each token."""
    for id_ in ids:
        recorder.writer(choice)(id_, -id_ / 8, id_ % 2 == 1)
        recorder.flush()


def runs_in(memory: bytes | bytearray, fingerprint: bytes = PRINT) -> list[LoggedRun]:
    return [run for _, run in RunLog(bytearray(memory), fingerprint).restored()]


def ids_of(run: LoggedRun) -> list[int]:
    return [token.id for token in run.tokens]


def test_what_is_written_is_read() -> None:
    memory = bytearray(MEMORY)
    log = RunLog(memory, PRINT)
    recorder, other = begun(log), begun(log, 1)
    recorder.begin(0, Beginning(5, 2**63))
    recorder.writer(0)(7, -0.25, False)
    other.writer(1)(9, float("-inf"), True)
    recorder.flush()
    run, second = runs_in(memory)
    assert run.beginnings == {0: Beginning(5, 2**63)}
    assert run.tokens == [KnownToken(0, 7, -0.25, closed=False)]
    assert second.tokens == [KnownToken(1, 9, float("-inf"), closed=True)]
    read, written = run.start, start()
    assert replace(read, names=written.names) == written
    assert (read.names.stream, read.names.key) == (STREAM, written.names.key)
    assert read.names.ended_at is None


def test_a_token_is_kept_with_its_step() -> None:
    memory = bytearray(MEMORY)
    recorder = begun(RunLog(memory, PRINT))
    recorder.writer(0)(1, 0.0, False)
    assert ids_of(runs_in(memory)[0]) == []
    recorder.flush()
    assert ids_of(runs_in(memory)[0]) == [1]


def test_the_end_of_an_answer_is_kept() -> None:
    memory = bytearray(MEMORY)
    recorder = begun(RunLog(memory, PRINT))
    assert not runs_in(memory)[0].has_ended
    ((recorder, run),) = RunLog(memory, PRINT).restored()
    run.start.names.ended_at = 1_700_000_007
    recorder.end()
    (run,) = runs_in(memory)
    assert run.has_ended
    assert run.start.names.ended_at == 1_700_000_007


def test_a_forgotten_run_is_gone() -> None:
    memory = bytearray(MEMORY)
    log = RunLog(memory, PRINT)
    one, two = begun(log), begun(log, 1)
    one.forget()
    one.forget()
    add(one, 1)
    add(two, 2)
    (left,) = runs_in(memory)
    assert ids_of(left) == [2]


def test_runs_of_another_model_are_not_read() -> None:
    memory = bytearray(MEMORY)
    begun(RunLog(memory, PRINT))
    assert len(runs_in(memory)) == 1
    assert runs_in(memory, bytes(32)) == []


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2000), st.binary(max_size=40))
def test_a_log_that_ends_or_is_torn_anywhere_has_a_beginning_of_what_was_written(
    place: int, rest: bytes
) -> None:
    memory = bytearray(MEMORY)
    recorder = begun(log := RunLog(memory, PRINT))
    add(recorder, *range(12))
    del log
    whole = bytes(memory)
    half = MEMORY // 2
    begin = next(begin for begin in (0, half) if any(whole[begin : begin + half]))
    torn = bytearray(whole)
    torn[begin + place : begin + half] = rest + bytes(half - place - len(rest))
    runs = runs_in(torn)
    assert len(runs) <= 1
    for run in runs:
        assert ids_of(run) == list(range(len(run.tokens)))
        assert run.start.body == b"{}"


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_history_of_writes_and_kills_is_read_as_it_was(data: st.DataObject) -> None:
    memory = bytearray(1 << 16)
    live: dict[int, tuple[RunRecorder, list[int]]] = {}
    log = RunLog(memory, PRINT)
    for number in range(data.draw(st.integers(1, 80))):
        action = data.draw(st.sampled_from(["begin", "token", "token", "forget", "kill"]))
        if action == "begin" and len(live) < 6:
            live[number] = begun(log, number % 256, bytes(number)), []
        elif action == "kill":
            log = RunLog(memory, PRINT)
            restored = log.restored()
            assert [ids_of(run) for _, run in restored] == [ids for _, ids in live.values()]
            live = {
                name: (recorder, ids)
                for (name, (_, ids)), (recorder, _) in zip(live.items(), restored, strict=True)
            }
        elif live:
            name = data.draw(st.sampled_from(sorted(live)))
            recorder, ids = live[name]
            if action == "forget":
                recorder.forget()
                del live[name]
            else:
                count = data.draw(st.integers(1, 10))
                add(recorder, *range(len(ids), len(ids) + count))
                ids.extend(range(len(ids), len(ids) + count))
    read = runs_in(memory)
    assert [ids_of(run) for run in read] == [ids for _, ids in live.values()]
    assert log.num_forgotten == 0


def test_runs_are_copied_when_a_half_is_full() -> None:
    memory = bytearray(MEMORY)
    recorder = begun(log := RunLog(memory, PRINT))
    old = [begun(log, number) for number in range(1, 4)]
    for one in old:
        one.forget()
    add(recorder, *range(340))
    (run,) = runs_in(memory)
    assert ids_of(run) == list(range(340))


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 1000])
def test_a_kill_in_a_copy_leaves_the_other_half(num_bytes: int) -> None:
    memory = bytearray(MEMORY)
    add(begun(RunLog(memory, PRINT)), 1, 2, 3)
    before = bytes(memory)
    RunLog(memory, PRINT)
    # The copy is written from its second record on, and its first one is the last to be written.
    torn, half = bytearray(before), len(memory) // 2
    other = next(
        begin for begin in (0, half) if before[begin : begin + half] != memory[begin : begin + half]
    )
    first = other + 9 + 44
    torn[first : first + num_bytes] = memory[first : first + num_bytes]
    assert ids_of(runs_in(torn)[0]) == [1, 2, 3]


def test_the_oldest_leave_a_log_that_lives_fill() -> None:
    memory = bytearray(1 << 15)
    log = RunLog(memory, PRINT)
    recorders = [begun(log, number, bytes(1000)) for number in range(12)]
    add(recorders[-1], *range(200))
    add(recorders[0], 5)
    runs = runs_in(memory)
    assert log.num_forgotten == 12 - len(runs) > 0
    assert runs[-1].start.scope == start(11).scope
    assert ids_of(runs[-1]) == list(range(200))


def test_a_run_that_left_a_full_log_keeps_nothing_in_memory() -> None:
    memory = bytearray(1 << 15)
    log = RunLog(memory, PRINT)
    oldest, *others = [begun(log, number, bytes(1000)) for number in range(12)]
    add(others[-1], *range(200))
    assert log.num_forgotten > 0
    write = oldest.writer(0)
    oldest.begin(0, Beginning(0, 1))
    oldest.expand(b"{}")
    write(5, 0.0, False)
    assert oldest.num_bytes == 0
    assert not log.pending
    kept = len(runs_in(memory))
    oldest.end()
    oldest.forget()
    assert len(runs_in(memory)) == kept


def test_a_request_that_is_too_large_does_not_enter_the_log() -> None:
    memory = bytearray(MEMORY)
    log = RunLog(memory, PRINT)
    assert log.begin(start(body=bytes(MEMORY // 16))) is None
    assert runs_in(memory) == []


def test_tries_are_counted_until_a_token() -> None:
    memory = bytearray(MEMORY)
    begun(RunLog(memory, PRINT))
    for count in range(3):
        ((recorder, run),) = RunLog(memory, PRINT).restored()
        assert run.num_tries == count
        recorder.tried()
    ((recorder, run),) = RunLog(memory, PRINT).restored()
    add(recorder, 1)
    (run,) = runs_in(memory)
    assert run.num_tries == 0


def test_a_try_counts_once_if_the_tokens_before_it_fill_the_log() -> None:
    memory = bytearray(MEMORY)
    log = RunLog(memory, PRINT)
    recorder, other = begun(log), begun(log, 1)
    write = other.writer(0)
    while log._position + 16 * 20 < MEMORY // 2:
        add(other, 1)
    for _ in range(40):
        write(1, 0.0, False)
    recorder.tried()
    assert [run.num_tries for run in runs_in(memory)] == [1, 0]


def test_a_detached_run_goes_on_with_another_recorder() -> None:
    memory = bytearray(MEMORY)
    begun(RunLog(memory, PRINT), 1).begin(0, Beginning(5, 9))
    log = RunLog(memory, PRINT)
    ((recorder, _),) = log.restored()
    recorder.tried()
    add(recorder, 1, 2)
    recorder.writer(0)(3, 0.0, False)
    detached = recorder.detached()
    assert detached is not None
    other, run = detached
    assert (ids_of(run), run.beginnings, run.num_tries) == ([1, 2, 3], {0: Beginning(5, 9)}, 0)
    add(recorder, 7)
    recorder.forget()
    for _ in range(2):
        other.tried()
    add(other, 4)
    (run,) = runs_in(memory)
    assert ids_of(run) == [1, 2, 3, 4]
    other.tried()
    other.forget()
    assert runs_in(memory) == []
    assert other.detached() is None


def test_the_memory_of_a_file_outlives_its_router() -> None:
    descriptor = os.memfd_create("log")
    try:
        add(begun(RunLog.of_file(descriptor, PRINT)), 1, 2)
        ((_, run),) = RunLog.of_file(descriptor, PRINT).restored()
        assert ids_of(run) == [1, 2]
        assert os.fstat(descriptor).st_blocks * 512 < 1 << 20, "only what is written takes memory"
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
