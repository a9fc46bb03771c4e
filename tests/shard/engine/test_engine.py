"""The engine over a model that reads its own KV back: order, epochs, failures, pipelining, replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from millrace_proto.sampling import Sampling
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.device_tables import BatchLimits
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step import (
    BatchChange,
    FailureKind,
    Filter,
    Open,
    Step,
    StepFailure,
    StepResult,
    Unknown,
    Work,
)
from millrace_shard.device.process_group import CollectiveError
from millrace_shard.errors import StepInvalid
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.model_runner.launched_step import LaunchedStep
from millrace_testing.engines.engine_driver import (
    PROMPT,
    WARMUP,
    Driver,
    forward,
    generate,
    ints,
    tokens,
)
from millrace_testing.engines.fake_engine import BLOCK_SIZE, VOCAB_SIZE, greedy, logits_for

SAMPLING = Sampling(
    do_sample=True, temperature=1.3, top_k=30, top_p=0.95, repetition_penalty=1.2, seed=11
)


@pytest.fixture(params=[False, True], ids=["inline", "overlap"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    driver = Driver(overlap=request.param)
    driver.warm_up()
    driver.open()
    yield driver
    driver.engine.close()


def test_greedy_tokens_follow_from_the_whole_context(driver: Driver) -> None:
    assert generate(driver, 3, 7) == greedy(PROMPT, 7)


def test_a_step_reports_logprobs_and_timings(driver: Driver) -> None:
    result = driver.run(forward(driver.admit(0), chunks=[(0, 6)]))
    expected = logits_for(PROMPT).log_softmax(-1).max()
    assert result.logprobs.tolist() == pytest.approx([float(expected)], abs=1e-6)
    timings = result.timings
    assert timings.concat_ns is not None
    assert 0 < timings.forward_ns < timings.total_ns
    assert timings.forward_ns + timings.decode_ns <= timings.total_ns
    assert driver.run(forward(decodes=[0])).timings.concat_ns is None


def test_chunks_in_steps_with_decodes_change_no_token(driver: Driver) -> None:
    other = [7, 1, 1, 60, 80, 33, 21, 2, 2, 90]
    first = driver.run(forward(driver.admit(0), chunks=[(0, 6)]))
    assert tokens(first)[0] == greedy(PROMPT, 1)[0]
    second = driver.run(forward(driver.admit(4, other), chunks=[(4, 3)], decodes=[0]))
    assert tokens(second) == {0: greedy(PROMPT, 2)[1]}
    third = driver.run(forward(chunks=[(4, 6)], decodes=[0]))
    assert third.slots.tolist() == [0]
    fourth = driver.run(forward(chunks=[(4, 1)], decodes=[0]))
    assert tokens(fourth) == {4: greedy(other, 1)[0], 0: greedy(PROMPT, 4)[3]}
    assert tokens(driver.run(forward(decodes=[0, 4])))[4] == greedy(other, 2)[1]


def test_next_steps_are_sent_before_the_first_is_answered(driver: Driver) -> None:
    gate, entered = Event(), Event()

    def block(_: object) -> None:
        entered.set()
        assert gate.wait(30)

    driver.model.before_forward = block
    steps = [driver.send(forward(driver.admit(0), chunks=[(0, 6)]))]
    steps += [driver.send(forward(decodes=[0])) for _ in range(3)]
    assert entered.wait(30)
    assert driver.engine.progress().pending_steps == 4
    assert driver.engine.progress().last_step == 0
    assert not any(step.done() for step in steps)
    gate.set()
    replies = [step.result(30) for step in steps]
    assert [reply.number for reply in replies] == [1, 2, 3, 4]
    results = [reply.outcome for reply in replies]
    found = [tokens(result)[0] for result in results if isinstance(result, StepResult)]
    assert found == greedy(PROMPT, 4)
    assert driver.engine.progress().pending_steps == 0
    assert driver.engine.progress().last_step == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_is_answered_while_the_next_one_is_computed(*, overlap: bool) -> None:
    driver = Driver(overlap=overlap)
    driver.warm_up()
    driver.open()
    driver.run(forward(driver.admit(0), chunks=[(0, 6)]))
    first, second, gate = Event(), Event(), Event()

    def block(batch: RaggedBatch) -> None:
        if batch.num_context == (7,):
            assert first.wait(30)
        else:
            second.set()
            assert gate.wait(30)

    driver.model.before_forward = block
    steps = [driver.send(forward(decodes=[0])) for _ in range(2)]
    first.set()
    assert second.wait(30)
    outcome = steps[0].result(30).outcome
    assert isinstance(outcome, StepResult)
    assert [tokens(outcome)[0]] == greedy(PROMPT, 2)[1:]
    assert not steps[1].done()
    gate.set()
    assert steps[1].result(30).number == 3
    driver.engine.close()


@pytest.mark.parametrize("work", ["filter", "invalid", "warm-up", "end"])
def test_a_step_is_answered_when_other_work_follows(work: str, driver: Driver) -> None:
    driver.run(forward(driver.admit(0), chunks=[(0, 6)]))
    gate = Event()

    def block(_: object) -> None:
        assert gate.wait(30)

    driver.model.before_forward = block
    step = driver.send(forward(decodes=[0]))
    match work:
        case "filter":
            driver.send(Filter(ints([0])))
        case "invalid":
            driver.send(forward(decodes=[3]))
        case "warm-up":
            driver.engine.warm_up(WARMUP)
        case _:
            driver.engine._threads.end()
    gate.set()
    outcome = step.result(30).outcome
    assert isinstance(outcome, StepResult)
    assert [tokens(outcome)[0]] == greedy(PROMPT, 2)[1:]


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(overlap=True)
    driver.warm_up()
    driver.open()
    third = Event()
    finish = LaunchedStep.finish

    def wait_for_the_third(launched: LaunchedStep) -> StepResult:
        assert third.wait(30)
        return finish(launched)

    monkeypatch.setattr(LaunchedStep, "finish", wait_for_the_third)
    steps = [driver.send(forward(driver.admit(0), chunks=[(0, 6)]))]
    steps.append(driver.send(forward(decodes=[0])))
    driver.model.before_forward = lambda batch: third.set() if batch.num_context == (8,) else None
    steps.append(driver.send(forward(decodes=[0])))
    results = [step.result(60).outcome for step in steps]
    assert [tokens(r)[0] for r in results if isinstance(r, StepResult)] == greedy(PROMPT, 3)
    driver.engine.close()


def test_a_replayed_sequence_goes_on_with_the_same_samples(driver: Driver) -> None:
    whole = generate(driver, 0, 8, parameters=SAMPLING)
    for kept in (1, 4, 7):
        rest = generate(
            driver,
            5,
            8 - kept,
            ids=[*PROMPT, *whole[:kept]],
            generated_tokens=kept,
            parameters=SAMPLING,
        )
        assert whole[:kept] + rest == whole
    assert whole != generate(driver, 0, 8, parameters=Sampling(do_sample=True, seed=12))


def test_a_cached_prefix_is_read_and_not_cleared(driver: Driver) -> None:
    sequence, pairs = driver.admit(0)
    driver.run(forward((sequence, pairs), chunks=[(0, 6)]))
    shared = pairs[0][1]
    cached = Sequence(slot=1, request_id=1, input_ids=ints(PROMPT), cached_tokens=4)
    own = driver.free.pop(0)
    driver.kernels.zeroed.clear()
    result = driver.run(forward((cached, [(1, shared), (1, own)]), chunks=[(1, 2)]))
    assert tokens(result) == {1: greedy(PROMPT, 1)[0]}
    assert driver.kernels.zeroed == [[own]]


def test_blocks_are_granted_as_a_sequence_grows(driver: Driver) -> None:
    driver.run(forward(driver.admit(0, room=0), chunks=[(0, 6)]))
    result = []
    for step in range(8):
        grown = [(0, driver.free.pop(0))] if (6 + step) % BLOCK_SIZE == 0 else []
        result.append(tokens(driver.run(forward(decodes=[0], grown=grown)))[0])
    assert result == greedy(PROMPT, 9)[1:]


def test_a_slot_and_its_blocks_are_free_again_once_dropped(driver: Driver) -> None:
    sequence, pairs = driver.admit(2)
    driver.run(forward((sequence, pairs), chunks=[(2, 6)]))
    again = (Sequence(slot=2, request_id=9, input_ids=ints([1, 2, 3])), pairs)
    result = driver.run(forward(again, chunks=[(2, 3)], dropped=[2]))
    assert tokens(result) == {2: greedy([1, 2, 3], 1)[0]}


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda d: forward(decodes=[3]), "do not hold sequences"),
        (lambda d: forward(decodes=[99]), "do not hold sequences"),
        (lambda d: Filter(ints([3])), "do not hold sequences"),
        (lambda d: forward(dropped=[0, 0]), "named twice"),
        (lambda d: forward(d.admit(0), chunks=[(0, 1)]), "slot 0 is in use"),
        (lambda d: forward(d.admit(6), chunks=[(6, 1)]), "slot 6 is not one of the 6 slots"),
        (lambda d: forward(d.admit(1), chunks=[(1, 7)]), "more tokens than its prompt has left"),
        (lambda d: forward(d.admit(1), chunks=[(1, 0)]), "has left, or none"),
        (lambda d: forward(d.admit(1), decodes=[1]), "decode of an unfinished one"),
        (lambda d: forward(chunks=[(0, 1)]), "chunk of a finished prompt"),
        (lambda d: forward(d.admit(1, room=-3), chunks=[(1, 6)]), "block table is too short"),
        (lambda d: forward(decodes=[0], grown=[(0, 0)]), "blocks are numbered"),
        (lambda d: forward(decodes=[0], grown=[(0, 64)]), "blocks are numbered"),
        (lambda d: forward(decodes=[0], grown=[(1, 60)]), "do not hold sequences"),
        (lambda d: forward(d.admit(1), grown=[(0, d.free[0] - 1)]), "another owner"),
        (lambda d: forward(decodes=[0], grown=[(0, d.free[0] - 1)]), "another owner"),
        (lambda d: forward(decodes=[0], grown=[(0, b) for b in d.free[:40]]), "over 17 blocks"),
        (
            lambda d: forward(d.admit(1), grown=[(0, d.free[0]), (0, d.free[0])]),
            "another owner",
        ),
        (lambda d: forward(decodes=[0, 0]), "named twice"),
        (lambda d: Unknown(), "the work of the step is unknown to this shard"),
    ],
)
def test_an_invalid_step_fails_and_names_the_reason(
    work: Callable[[Driver], Work], message: str
) -> None:
    driver = Driver()
    driver.warm_up()
    driver.open()
    driver.run(forward(driver.admit(0), chunks=[(0, 6)]))
    failure = driver.fail(work(driver))
    assert failure.kind is FailureKind.FAILED
    assert message in failure.message
    assert driver.fail(Filter(ints([]))).kind is FailureKind.REFUSED
    driver.engine.close()


INVALID: dict[str, dict[str, Any]] = {
    "token ids beyond the vocabulary": {"ids": [5, 97]},
    "1 to 64 fit": {"ids": [1] * 100},
    "0 tokens": {"ids": []},
    "leaves no token to compute": {"ids": [1] * 8, "cached_tokens": 8},
    "lacks a prompt": {"generated_tokens": 6},
    "`temperature` must be strictly positive": {"parameters": Sampling(temperature=0.0)},
    "`presence_penalty` must be finite": {"parameters": Sampling(presence_penalty=float("inf"))},
}


@pytest.mark.parametrize("reason", INVALID)
def test_an_invalid_sequence_fails_no_other_sequence_of_its_step(
    reason: str, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    invalid = driver.admit(1, **INVALID[reason])
    chunk = (1, max(1, len(invalid[0].input_ids)))
    driver.run(forward(driver.admit(0), chunks=[(0, 6)]))
    first = driver.run(forward(driver.admit(2), invalid, chunks=[chunk, (2, 6)], decodes=[0]))
    assert first.failed_slots.tolist() == [1]
    assert tokens(first) == {2: greedy(PROMPT, 1)[0], 0: greedy(PROMPT, 2)[1]}
    assert reason in caplog.text
    alone = driver.run(forward(decodes=[1], grown=[(1, invalid[1][0][1] if invalid[1] else 60)]))
    assert (alone.failed_slots.tolist(), tokens(alone)) == ([1], {})
    # The slot is good for another one, and so are the blocks that were granted.
    again = (driver.admit(1)[0], invalid[1][:4] or driver.admit(1)[1])
    last = driver.run(forward(again, chunks=[(1, 6)], decodes=[2, 0], dropped=[1]))
    assert not len(last.failed_slots)
    assert tokens(last) == dict(
        zip([1, 2, 0], [greedy(PROMPT, n)[-1] for n in (1, 2, 3)], strict=True)
    )


@pytest.mark.parametrize("forget", [Batch.clear, lambda batch: batch.drop(ints([0]))])
def test_a_refused_growth_leaves_no_owner_behind(
    forget: Callable[[Batch], None], driver: Driver
) -> None:
    batch = Batch(
        BatchLimits(
            max_batch_size=2, max_tokens=16, num_blocks=9, block_size=4, vocab_size=VOCAB_SIZE
        ),
        torch.device("cpu"),
    )
    sequence, _ = driver.admit(0)
    change = BatchChange(admitted=(sequence,), grown_slots=ints([0, 0]), grown_blocks=ints([7, 7]))
    with pytest.raises(StepInvalid, match="another owner"):
        batch.apply(change)
    forget(batch)
    good = BatchChange(admitted=(sequence,), grown_slots=ints([0, 0]), grown_blocks=ints([7, 8]))
    assert batch.apply(good).blocks.tolist() == [7, 8]
    forget(batch)
    assert batch.apply(good).blocks.tolist() == [7, 8]
    assert len(batch) == 1


def test_a_lost_group_fails_the_step_and_ends_the_engine(driver: Driver) -> None:
    ended = Event()
    driver.engine.when_ended(ended.set)

    def lose(_: object) -> None:
        raise CollectiveError("a collective of the ranks failed: Connection closed by peer")

    driver.model.before_forward = lose
    steps = [driver.send(forward(driver.admit(0), chunks=[(0, 6)])), driver.send(Filter(ints([])))]
    outcomes = [step.result(30).outcome for step in steps]
    assert [o.kind for o in outcomes if isinstance(o, StepFailure)] == [
        FailureKind.FAILED,
        FailureKind.REFUSED,
    ]
    assert ended.wait(30)
    at_once = Event()
    driver.engine.when_ended(at_once.set)
    assert at_once.is_set()


def test_after_a_failure_nothing_runs_until_a_new_epoch_opens(driver: Driver) -> None:
    driver.run(forward(driver.admit(0), chunks=[(0, 6)]))

    def explode(_: object) -> None:
        raise ValueError("boom")

    driver.model.before_forward = explode
    steps = [driver.send(forward(decodes=[0])) for _ in range(3)]
    outcomes = [step.result(30).outcome for step in steps]
    refused = FailureKind.REFUSED
    assert outcomes[0] == StepFailure(FailureKind.FAILED, "boom")
    assert [o.kind for o in outcomes[1:] if isinstance(o, StepFailure)] == [refused, refused]
    assert len(driver.model.batches) == 2
    driver.model.before_forward = lambda _: None
    assert isinstance(driver.open().outcome, StepResult)
    assert driver.fail(forward(decodes=[0])).kind is FailureKind.FAILED
    driver.open()
    driver.free = list(range(1, 64))
    assert generate(driver, 0, 3) == greedy(PROMPT, 3)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 bytes"),
        MemoryError(),
    ],
)
def test_out_of_memory_is_recognized(error: Exception) -> None:
    driver = Driver()
    driver.warm_up()
    driver.open()

    def run_out(_: object) -> None:
        raise error

    driver.model.before_forward = run_out
    failure = driver.fail(forward(driver.admit(0), chunks=[(0, 6)]))
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert failure.message
    driver.engine.close()


def test_steps_of_other_epochs_and_numbers_are_refused(driver: Driver) -> None:
    def refused(epoch: int, number: int, work: Work | None = None) -> bool:
        outcome = (
            driver.engine.step(Step(epoch, number, work or Filter(ints([])))).result(30).outcome
        )
        return isinstance(outcome, StepFailure) and outcome.kind is FailureKind.REFUSED

    assert refused(driver.epoch - 1, 1)
    assert refused(driver.epoch, 0)
    assert refused(driver.epoch, 2)
    assert refused(driver.epoch, 0, Open())
    assert refused(driver.epoch + 1, 1, Open())
    assert isinstance(driver.run(Filter(ints([]))), StepResult)
    assert refused(driver.epoch, 1)


def test_nothing_runs_before_warmup() -> None:
    driver = Driver()
    failure = driver.open().outcome
    assert isinstance(failure, StepFailure)
    assert "Warmup" in failure.message
    driver.engine.close()


def test_a_late_end_of_an_old_epoch_leaves_the_new_one(driver: Driver) -> None:
    old = driver.epoch
    driver.open()
    driver.run(forward(driver.admit(0), chunks=[(0, 6)]))
    driver.engine.end_epoch(old).result(30)
    assert tokens(driver.run(forward(decodes=[0]))) == {0: greedy(PROMPT, 2)[1]}
    driver.engine.end_epoch(driver.epoch).result(30)
    assert driver.fail(forward(decodes=[0])).kind is FailureKind.REFUSED


def test_warming_up_again_ends_the_epoch_and_starts_empty(driver: Driver) -> None:
    driver.run(forward(driver.admit(0), chunks=[(0, 6)]))
    driver.warm_up()
    assert driver.fail(forward(decodes=[0])).kind is FailureKind.REFUSED
    driver.open()
    driver.free = list(range(1, 64))
    assert generate(driver, 0, 4) == greedy(PROMPT, 4)


def test_a_prompt_that_is_not_finite_is_reported_with_the_chunk_that_shows_it(
    driver: Driver,
) -> None:
    driver.model.poison = 90
    sick, healthy = driver.admit(0, [4, 7, 90, 8, 5, 6]), driver.admit(1)
    first = driver.run(forward(sick, healthy, chunks=[(0, 2), (1, 3)]))
    assert (first.failed_slots.tolist(), tokens(first)) == ([], {})
    second = driver.run(forward(chunks=[(0, 2), (1, 3)]))
    assert second.failed_slots.tolist() == [0]
    assert tokens(second) == {1: greedy(PROMPT, 1)[0]}
    driver.model.poison = None
    last = driver.run(forward(chunks=[(0, 2)], decodes=[1]))
    assert last.failed_slots.tolist() == [0]
    assert tokens(last) == {1: greedy(PROMPT, 2)[1]}


def test_only_rows_that_are_not_finite_fail_and_they_stay_failed(driver: Driver) -> None:
    driver.model.poison = 90
    healthy, sick = driver.admit(1), driver.admit(0, [4, 90, 8], top_n_tokens=2)
    result = driver.run(forward(healthy, sick, chunks=[(1, 6), (0, 3)]))
    assert result.failed_slots.tolist() == [0]
    assert tokens(result) == {1: greedy(PROMPT, 1)[0]}
    assert not len(result.top_ids)
    driver.model.poison = None
    again = driver.run(forward(decodes=[0, 1]))
    assert again.failed_slots.tolist() == [0]
    assert tokens(again) == {1: greedy(PROMPT, 2)[1]}
    fresh = driver.run(forward(driver.admit(0, [4, 90, 8]), chunks=[(0, 3)], dropped=[0]))
    assert tokens(fresh) == {0: greedy([4, 90, 8], 1)[0]}
    assert not len(fresh.failed_slots)


def test_the_checksum_distinguishes_tokens(driver: Driver) -> None:
    first = driver.run(forward(driver.admit(0), chunks=[(0, 6)])).checksum
    driver.run(Filter(ints([0])))
    driver.free = list(range(1, 64))
    assert driver.run(forward(driver.admit(0), chunks=[(0, 6)])).checksum == first
    driver.run(Filter(ints([0])))
    driver.free = list(range(1, 64))
    assert driver.run(forward(driver.admit(0, [8]), chunks=[(0, 1)])).checksum != first


@pytest.mark.parametrize("cuts", [[10], [1, 9], [4, 4, 2], [9, 1], [3, 3, 3, 1]])
def test_prompt_logprobs_do_not_depend_on_chunks(driver: Driver, cuts: list[int]) -> None:
    prompt = [7, 1, 1, 60, 80, 33, 21, 2, 2, 90]
    expected = [
        float(logits_for(prompt[:i]).log_softmax(-1)[prompt[i]]) for i in range(1, len(prompt))
    ]
    admitted = [driver.admit(5, [3, 4, 5]), driver.admit(2, prompt, prefill_logprobs=True)]
    found: list[float] = []
    results: list[StepResult] = []
    for cut in cuts:
        chunks = [(5, 3)] if admitted else []
        results.append(driver.run(forward(*admitted, chunks=[*chunks, (2, cut)])))
        result = results[-1]
        assert result.prefill_slots.tolist() == [2]
        assert result.prefill_counts.tolist() == [cut]
        found += result.prefill_logprobs.tolist()
        admitted = []
    assert np.isnan(found[0])
    assert found[1:] == pytest.approx(expected, abs=1e-5)
    assert tokens(results[-1])[2] == greedy(prompt, 1)[0]


def test_candidates_come_with_tokens_most_likely_first(driver: Driver) -> None:
    rows = {0: (PROMPT, 9), 1: ([8, 8], 0), 2: ([4, 4, 4], 5)}
    admitted = [driver.admit(slot, ids, top_n_tokens=n, room=2) for slot, (ids, n) in rows.items()]
    result = driver.run(forward(*admitted, chunks=[(2, 3), (1, 2), (0, 6)]))
    assert result.top_counts.tolist() == [5, 0, 9]
    best = [logits_for(ids).log_softmax(-1).topk(n) for ids, n in (rows[2], rows[0])]
    assert result.top_ids.tolist() == torch.cat([each.indices for each in best]).tolist()
    expected = torch.cat([each.values for each in best]).tolist()
    assert result.top_logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_work_that_raises_reports_it_and_the_thread_lives_on(driver: Driver) -> None:
    def explode() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        driver.engine.submit(explode).result(30)
    assert driver.engine.submit(torch.get_num_threads).result(30) == 1
    assert driver.engine.is_alive()
