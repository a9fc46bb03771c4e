"""The batcher over a fake shard that checks every step and whose tokens depend on the whole sequence."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.engine.batcher import Batcher
from millrace_router.errors import GenerationError, InternalError, QueueExpired, ShuttingDown
from millrace_router.request.entry import entry_of
from millrace_router.request.request import (
    FinishReason,
    Grammar,
    GrammarKind,
    Pooling,
    SchedulingParameters,
    ValidRequest,
)
from millrace_router.request.token_stream import TokenStream
from millrace_router.text.detokenizer import IncrementalDetokenizer
from millrace_router.text.tokenizer import TokenizerError
from millrace_testing.router.fake_router import (
    DirectShards,
    collect,
    end_of,
    ids_of,
    new_batcher,
    next_token,
    panic,
    request,
    running,
)
from millrace_testing.shards.fake_shard import FakeShard, continuation
from millrace_testing.shards.hash_shard import HashShard
from millrace_testing.shards.hash_tokens import (
    EOS_TOKEN_ID,
    expected_prompt_candidates,
    expected_prompt_logprobs,
    expected_tokens,
    pooled_values,
)
from millrace_testing.shards.held_shards import (
    AlwaysOpen,
    NeverOpen,
    admissions,
    late_batcher,
    turns,
)

requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 90), min_size=1, max_size=40),
        st.integers(1, 12),
        st.none() | st.integers(0, 6),
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(requests, st.integers(1, 24), st.integers(1, 16), st.integers(1, 3))
def test_every_request_ends_once_with_its_own_tokens(
    wanted: list[tuple[list[int], int, int | None]], prefill: int, rows: int, depth: int
) -> None:
    """Outputs do not depend on other requests that run, leave or wait."""

    async def run() -> None:
        shard = FakeShard(num_blocks=32, block_size=4)
        batcher = new_batcher(
            DirectShards(shard),
            shard,
            max_batch_prefill_tokens=prefill + rows,
            max_batch_size=rows,
            depth=depth,
        )

        async def client(ids: list[int], count: int, leave_after: int | None) -> None:
            stream = batcher.submit(request(ids, count))
            if leave_after is None:
                assert ids_of(await collect(stream)) == continuation(ids, count)
                return
            seen: list[int] = []
            while len(seen) < leave_after:
                event = await next_token(stream)
                if event is None:
                    break
                seen.append(event.token.id)
            stream.close()
            assert seen == continuation(ids, len(seen))

        async with running(batcher):
            await asyncio.gather(*(client(*one) for one in wanted))
            await until_idle(shard)
        assert shard.sequences == {}

    asyncio.run(run())


async def until_idle(shard: FakeShard) -> None:
    """Run the event loop until the shard has no sequences left."""
    for _ in range(1000):
        if not shard.sequences:
            return
        await asyncio.sleep(0)
    pytest.fail(f"sequences left behind: {shard.sequences}")


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("leaves", [False, True], ids=["ends", "leaves"])
async def test_a_request_is_freed_when_it_has_gone_and_not_by_the_collector(leaves: bool) -> None:
    """Cycles would keep their memory until the garbage collector runs."""
    shard = FakeShard()
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        stream = batcher.submit(request([1] * 5, 8))
        if leaves:
            await next_token(stream)
        else:
            await collect(stream)
        stream.close()
        gone = weakref.ref(stream)
        del stream
        await until_idle(shard)
        batcher.estimate(request([1] * 5, 8))
        await collect(batcher.submit(request([2], 1)))
        assert gone() is None


async def test_requests_join_while_others_decode_and_blocks_are_reused() -> None:
    shard = FakeShard(num_blocks=6, block_size=4)
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        first = batcher.submit(request([1] * 5, 8))
        await next_token(first)
        second = batcher.submit(request([2] * 5, 4))
        third = batcher.submit(request([3] * 5, 4))
        outputs = await asyncio.gather(*(collect(s) for s in (first, second, third)))
    assert ids_of(outputs[1]) == continuation([2] * 5, 4)
    assert ids_of(outputs[2]) == continuation([3] * 5, 4)
    joined = [s for s in shard.steps if s.prefill.change.admitted and s.prefill.decode_slots]
    assert joined, "the second request was not admitted while the first one decoded"
    grown = [
        block
        for step in shard.steps
        for block in (*step.prefill.change.grown_blocks, *step.decode.change.grown_blocks)
    ]
    assert len(grown) > len(set(grown)), "five blocks served seven blocks' worth of sequences"


async def test_two_steps_are_in_flight() -> None:
    """Step n + 1 is sent before step n is answered."""
    shard = FakeShard()
    shards = DirectShards(shard)
    batcher = new_batcher(shards, shard)
    depths: list[int] = []
    receive = shards.receive

    async def watched() -> object:
        depths.append(shards.last_sent - len(depths))
        return await receive()

    shards.receive = watched  # type: ignore[method-assign,assignment]
    async with running(batcher):
        await collect(batcher.submit(request([1, 2, 3], 10)))
    assert max(depths) == 2


async def test_the_routers_time_for_an_answer_excludes_idle_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, seen = [0.0], list[float]()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0])
    monkeypatch.setattr("millrace_router.engine.in_flight.time", clock)
    shard = HashShard()
    batcher = new_batcher(DirectShards(shard), shard)
    monkeypatch.setattr(batcher._in_flight, "_on_router_seconds", seen.append)
    async with running(batcher):
        for _ in range(3):
            await collect(batcher.submit(request([1, 2], 6)))
            while batcher._in_flight:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            late[0] += 1000.0
    assert len(seen) > 6
    assert max(seen) < 500.0


async def test_end_of_sequence_costs_at_most_one_discarded_token() -> None:
    shard = FakeShard()
    shard.eos_after[0] = 3
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        events = await collect(batcher.submit(request([5, 6], 50)))
        await until_idle(shard)
    assert ids_of(events) == [*continuation([5, 6], 3), EOS_TOKEN_ID]
    assert end_of(events).finish_reason is FinishReason.EOS_TOKEN
    forwards = [s for s in shard.steps if s.WhichOneof("work") in {"prefill", "decode"}]
    assert len(forwards) <= 5


async def test_ignore_eos_goes_on() -> None:
    shard = FakeShard()
    shard.eos_after[0] = 2
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        events = await collect(
            batcher.submit(ValidRequest(input_ids=(5, 6), max_new_tokens=6, ignore_eos=True))
        )
    assert len(ids_of(events)) == 6


async def test_a_stop_sequence_ends_and_stays_in_the_text() -> None:
    shard = FakeShard()
    expected = continuation([8], 6)
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        events = await collect(
            batcher.submit(
                ValidRequest(
                    input_ids=(8,),
                    max_new_tokens=20,
                    stop_sequences=(f"w{expected[3]} w{expected[4]}",),
                )
            )
        )
    assert ids_of(events) == expected[:5]
    finished = end_of(events)
    assert finished.finish_reason is FinishReason.STOP_SEQUENCE
    assert finished.generated_text.endswith(f"w{expected[3]} w{expected[4]}")


async def test_a_failed_step_is_computed_again_unnoticed_by_clients() -> None:
    shard = FakeShard()
    batcher = new_batcher(DirectShards(shard), shard, max_batch_size=1)
    async with running(batcher):
        running_stream = batcher.submit(request([1, 2], 30))
        waiting_stream = batcher.submit(request([3, 4], 5))
        await next_token(running_stream)
        shard.fail_next = "the device caught fire"
        first = await collect(running_stream)
        assert [event.token.id for event in first] == (continuation([1, 2], 30)[1:])
        assert ids_of(await collect(waiting_stream)) == continuation([3, 4], 5)


async def test_only_the_row_that_is_not_finite_fails() -> None:
    shard = FakeShard()
    shard.not_finite.add(1)
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        good, bad = batcher.submit(request([1], 6)), batcher.submit(request([2], 6))
        with pytest.raises(GenerationError, match="not finite"):
            await collect(bad)
        assert ids_of(await collect(good)) == continuation([1], 6)


async def test_only_the_row_whose_grammar_fails_ends_with_the_reason() -> None:
    shard = FakeShard()
    shard.not_finite.add(1)
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        guided = ValidRequest(
            input_ids=(2,), max_new_tokens=6, grammar=Grammar(GrammarKind.REGEX, "a+")
        )
        good, bad = batcher.submit(request([1], 6)), batcher.submit(guided)
        with pytest.raises(
            GenerationError, match="cannot be followed any further: too many states"
        ):
            await collect(bad)
        assert ids_of(await collect(good)) == continuation([1], 6)


@pytest.mark.parametrize("error", [TokenizerError("no text"), panic()])
async def test_only_the_request_whose_token_has_no_text_fails(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the tokenizer raises or panics: the others go on in the same epoch."""
    shard = FakeShard()
    channel = DirectShards(shard)
    batcher = new_batcher(channel, shard)
    step = IncrementalDetokenizer.step
    wrong = continuation([2], 3)[-1]
    assert wrong not in continuation([1], 6)

    def failing(detokenizer: IncrementalDetokenizer, token_id: int) -> str:
        if token_id == wrong:
            raise error
        return step(detokenizer, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "step", failing)
    async with running(batcher):
        good, bad = batcher.submit(request([1], 6)), batcher.submit(request([2], 6))
        with pytest.raises(InternalError):
            await collect(bad)
        assert ids_of(await collect(good)) == continuation([1], 6)
        assert channel.epoch == 1


async def test_leaving_mid_prefill_and_while_queued_frees_everything() -> None:
    shard = FakeShard(num_blocks=40)
    batcher = new_batcher(DirectShards(shard), shard, max_batch_prefill_tokens=4, max_batch_size=1)
    async with running(batcher):
        long_prompt = batcher.submit(request([1] * 100, 5))
        queued = batcher.submit(request([2], 5))
        while not shard.sequences:
            await asyncio.sleep(0)
        queued.close()
        long_prompt.close()
        await until_idle(shard)
        assert ids_of(await collect(batcher.submit(request([4] * 100, 5)))) == continuation(
            [4] * 100, 5
        )
    computed = sum(sum(s.prefill.chunk_tokens) for s in shard.steps)
    assert computed < 200, "the abandoned prompt was computed to its end"


async def test_closing_a_running_stream_frees_its_blocks_within_the_steps_in_flight() -> None:
    shard = FakeShard()
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        leaver = batcher.submit(request([1, 2, 3], 40))
        stayer = batcher.submit(request([4, 5, 6], 40))
        for _ in range(5):
            await next_token(leaver)
        slot = shard.steps[1].prefill.change.admitted[0].slot
        leaver.close()
        seen = len(shard.steps)
        assert ids_of(await collect(stayer)) == continuation([4, 5, 6], 40)
    after = shard.steps[seen:]
    dropped_in = next(i for i, s in enumerate(after) if slot in s.decode.change.dropped_slots)
    assert dropped_in <= 1, "a step was sent with a row whose client has left"
    assert all(slot not in step.decode.decode_slots for step in after[dropped_in:])


async def test_a_prompt_goes_on_while_decodes_use_up_the_budget() -> None:
    shard = FakeShard(num_blocks=64, block_size=4)
    batcher = new_batcher(DirectShards(shard), shard, max_batch_prefill_tokens=4, max_batch_size=8)
    async with running(batcher):
        short = [batcher.submit(request([i], 60)) for i in range(3)]
        for stream in short:
            await next_token(stream)
        long_prompt = batcher.submit(request([9] * 40, 2))
        while not any(
            s.prefill.change.admitted and len(s.prefill.decode_slots) == 3 for s in shard.steps
        ):
            await asyncio.sleep(0)
        admitted_at = len(shard.steps)
        events = await collect(long_prompt)
        assert ids_of(events) == continuation([9] * 40, 2)
        assert len(shard.steps) - admitted_at < 20, "the prompt crawled one token a step"
        for stream in short:
            stream.close()


async def test_prompt_logprobs_arrive_whole_before_the_first_token() -> None:
    shard = FakeShard()
    batcher = new_batcher(DirectShards(shard), shard, max_batch_prefill_tokens=3)
    async with running(batcher):
        stream = batcher.submit(
            ValidRequest(
                input_ids=tuple(range(10)),
                max_new_tokens=2,
                prefill_logprobs=True,
                prompt_top_n_tokens=2,
            )
        )
        await next_token(stream)
        prompt = stream.prompt_logprobs
    assert prompt is not None
    candidates = [list(prompt.candidates(i)) for i in range(1, 10)]
    assert candidates == expected_prompt_candidates(range(10), 2)
    assert prompt.ids == tuple(range(10))
    assert list(prompt.logprobs[1:]) == expected_prompt_logprobs(range(10))


async def test_stopping_ends_every_stream() -> None:
    shard = FakeShard()
    batcher = new_batcher(DirectShards(shard), shard, max_batch_size=1)
    async with running(batcher):
        one, two = batcher.submit(request([1], 50)), batcher.submit(request([2], 50))
        await next_token(one)
    with pytest.raises(GenerationError):
        await collect(one)
    with pytest.raises(ShuttingDown):
        await collect(two)
    with pytest.raises(ShuttingDown):
        batcher.submit(request([3], 1))


SPECULATE = 4


def speculating(num_right: Callable[[int], int] = int) -> tuple[FakeShard, Batcher]:
    """A shard with `num_right` right draft tokens of a number, and a batcher that allows as many as it can."""
    shard = FakeShard(num_blocks=200)
    shard.max_draft_tokens, shard.num_right = SPECULATE, num_right
    return shard, new_batcher(
        DirectShards(shard), shard, max_batch_prefill_tokens=64, max_draft_tokens=SPECULATE
    )


def samples(batcher: Batcher, name: str) -> dict[str, float]:
    """Values of a metric by the label `le`, or by the empty string without the label."""
    registry = batcher._metrics._metrics.registry
    series = [sample for metric in registry.collect() for sample in metric.samples]
    return {sample.labels.get("le", ""): sample.value for sample in series if sample.name == name}


async def test_tokens_of_one_step_are_events_of_their_own() -> None:
    shard, batcher = speculating()
    async with running(batcher):
        streams = [batcher.submit(request([number] * 3, 23)) for number in range(3)]
        outputs = [ids_of(events) for events in await asyncio.gather(*map(collect, streams))]
    assert outputs == [continuation([number] * 3, 23) for number in range(3)]
    forwards = [s for s in shard.steps if s.WhichOneof("work") in {"prefill", "decode"}]
    assert len(forwards) < 10


@pytest.mark.parametrize("right", range(SPECULATE + 1))
async def test_draft_tokens_are_counted_and_so_are_the_tokens_they_save(right: int) -> None:
    _, batcher = speculating(lambda draft_tokens: min(draft_tokens, right))
    async with running(batcher):
        await collect(batcher.submit(request([1] * 3, 200)))
    drafted = samples(batcher, "millrace_speculation_drafted_tokens_total")[""]
    accepted = samples(batcher, "millrace_speculation_accepted_tokens_total")[""]
    assert accepted == pytest.approx(drafted * right / SPECULATE, rel=0.05)
    assert samples(batcher, "tgi_request_skipped_tokens_sum")[""] == accepted
    buckets = samples(batcher, "tgi_request_skipped_tokens_bucket")
    count = samples(batcher, "tgi_request_skipped_tokens_count")[""]
    below = buckets[str(right - 1)] if right else 0.0
    assert buckets[str(right)] - below > 0.9 * count


async def test_tokens_after_the_end_of_sequence_are_dropped() -> None:
    shard, batcher = speculating()
    shard.eos_after[0] = 7
    async with running(batcher):
        events = await collect(batcher.submit(request([5, 6], 50)))
        await until_idle(shard)
    assert ids_of(events) == [*continuation([5, 6], 7), EOS_TOKEN_ID]
    assert end_of(events).finish_reason is FinishReason.EOS_TOKEN


@pytest.mark.parametrize("place", range(5))
async def test_tokens_after_a_stop_sequence_are_dropped(place: int) -> None:
    shard, batcher = speculating()
    expected = continuation([8], 20)
    stop = f"w{expected[4 + place]} w{expected[5 + place]}"
    async with running(batcher):
        events = await collect(
            batcher.submit(ValidRequest(input_ids=(8,), max_new_tokens=40, stop_sequences=(stop,)))
        )
        await until_idle(shard)
    assert ids_of(events) == expected[: 6 + place]
    assert end_of(events).finish_reason is FinishReason.STOP_SEQUENCE


@pytest.mark.parametrize("count", range(1, 13))
async def test_forced_tokens_end_at_the_requested_number(count: int) -> None:
    shard = FakeShard(num_blocks=100)
    shard.num_forced = 5
    batcher = new_batcher(DirectShards(shard), shard, max_batch_prefill_tokens=64)
    guided = ValidRequest(
        input_ids=(1, 2), max_new_tokens=count, grammar=Grammar(GrammarKind.REGEX, ".*")
    )
    async with running(batcher):
        events, plain = await asyncio.gather(
            collect(batcher.submit(guided)), collect(batcher.submit(request([3], 9)))
        )
        await until_idle(shard)
    assert ids_of(events) == continuation([1, 2], count)
    assert end_of(events).finish_reason is FinishReason.LENGTH
    assert ids_of(plain) == continuation([3], 9)


async def test_steps_that_yield_nothing_are_no_steps_that_saved_one() -> None:
    """20 jump-forward tokens take two steps, of which the first yields no token."""
    shard = FakeShard(num_blocks=100)
    shard.num_forced = 20
    batcher = new_batcher(DirectShards(shard), shard, max_batch_prefill_tokens=64)
    guided = ValidRequest(
        input_ids=(1, 2), max_new_tokens=60, grammar=Grammar(GrammarKind.REGEX, ".*")
    )
    async with running(batcher):
        assert ids_of(await collect(batcher.submit(guided))) == continuation([1, 2], 60)
    assert samples(batcher, "tgi_request_skipped_tokens_count") == {"": 3.0}
    assert samples(batcher, "tgi_request_skipped_tokens_sum") == {"": 57.0}


async def test_a_failed_step_of_draft_tokens_is_computed_again_from_the_tokens_delivered() -> None:
    shard, batcher = speculating(lambda draft_tokens: draft_tokens // 2)
    async with running(batcher):
        streams = [batcher.submit(request([number], 60)) for number in range(3)]
        first = await next_token(streams[0])
        assert first is not None
        shard.fail_next = "the device caught fire"
        outputs = await asyncio.gather(*map(collect, streams))
        await until_idle(shard)
    assert [first.token.id, *(e.token.id for e in outputs[0])] == (continuation([0], 60))
    assert [ids_of(events) for events in outputs[1:]] == [
        continuation([number], 60) for number in (1, 2)
    ]


async def test_only_the_row_that_is_not_finite_fails_with_draft_tokens() -> None:
    shard, batcher = speculating()
    shard.not_finite.add(1)
    async with running(batcher):
        good, bad = batcher.submit(request([1], 26)), batcher.submit(request([2], 26))
        with pytest.raises(GenerationError, match="not finite"):
            await collect(bad)
        assert ids_of(await collect(good)) == continuation([1], 26)


async def test_requests_that_come_before_the_late_plan_join_the_step() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        batcher.submit(request([1], 9))
        await turns()
        assert admissions(shard) == [1]
        batcher.submit(request([2], 9))
        shards.let_time_pass()
        await turns()
        assert admissions(shard) == [1, 1]
        batcher.submit(request([3], 9))
        await turns()
        assert admissions(shard) == [1, 1], "two steps are in flight"
        shards.release()
        await turns()
        assert admissions(shard) == [1, 1], "the third one stays open"
        shards.let_time_pass()
        await turns()
        assert admissions(shard) == [1, 1, 1]


async def test_shards_that_are_done_early_get_the_next_step_at_once() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        stream = batcher.submit(request([1], 9))
        await turns()
        for number in range(1, 9):
            assert len(admissions(shard)) == number
            shards.release()
            await turns()
        shards.release()
        assert ids_of(await collect(stream)) == expected_tokens([1], 9)


async def test_a_failure_while_the_next_step_is_open_is_noticed_at_once() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        shard.fail_next = "the device caught fire"
        stream = batcher.submit(request([1], 2))
        await turns()
        for _ in range(3):
            shards.release()
            await turns()
        assert ids_of(await collect(stream)) == expected_tokens([1], 2)


async def test_filter_steps_do_not_train_late_planning() -> None:
    late = AlwaysOpen()
    batcher, shards, shard = late_batcher(late)
    async with running(batcher):
        await turns()
        stream = batcher.submit(request([1], 1))
        await turns()
        shards.let_time_pass()
        await turns()
        shards.release()
        await turns()
        assert ids_of(await collect(stream)) == expected_tokens([1], 1)
        assert admissions(shard) == [1, 0]
        shards.release()
        await turns()
        assert not shards.num_held
    assert late.learned == []


async def test_steps_planned_at_once_report_their_spare_time() -> None:
    late = NeverOpen()
    batcher, shards, _ = late_batcher(late)
    async with running(batcher):
        await turns()
        stream = batcher.submit(request([1], 3))
        await turns()
        for _ in range(4):
            shards.release()
            await turns()
        await collect(stream)
    assert late.learned
    assert not any(late.learned)


async def test_requests_that_expire_before_the_late_plan_do_not_join() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        batcher.submit(request([1], 9))
        await turns()
        hasty = batcher.submit(
            replace(request([2], 9), scheduling=SchedulingParameters(max_queue_seconds=1e-9))
        )
        shards.let_time_pass()
        await turns()
        assert admissions(shard) == [1, 0]
        with pytest.raises(QueueExpired):
            await collect(hasty)


async def test_metrics_of_a_step_are_counted_before_the_late_plan() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        batcher.submit(request([1], 9))
        await turns()
        assert admissions(shard) == [1]
        metrics = batcher._metrics._metrics
        assert metrics.batch_current_size.value == metrics.requests_running.value == 1
        assert metrics.queue_size.value == metrics.requests_waiting.value == 0
        assert metrics.kv_blocks_in_use.value == 1
        batcher.submit(request([2], 9))
        assert metrics.queue_size.value == metrics.requests_waiting.value == 1
        shards.let_time_pass()
        await turns()
        assert metrics.requests_running.value == 2
        assert metrics.requests_waiting.value == 0
        assert metrics.kv_blocks_in_use.value == 2


async def test_metrics_count_steps_of_the_epoch_after_a_failure() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        shard.fail_next = "the device caught fire"
        stream = batcher.submit(request([1], 3))
        await turns()
        metrics = batcher._metrics._metrics
        while metrics.recoveries.labels(reason="failed").value == 0:
            shards.release()
            await turns()
        assert metrics.requests_running.value == metrics.kv_blocks_in_use.value == 1
        for _ in range(6):
            shards.release()
            await turns()
        assert ids_of(await collect(stream)) == expected_tokens([1], 3)
        assert metrics.requests_running.value == metrics.kv_blocks_in_use.value == 0


async def test_no_step_follows_when_the_last_suspect_leaves_while_it_is_open() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        shard.fail_next = "the device caught fire"
        streams = [batcher.submit(request([i], 9)) for i in (1, 2)]
        await turns()
        shard.fail_next = "the device caught fire again"
        for _ in range(2):
            shards.release()
            await turns()
        (suspect,) = batcher._planner.running
        num_steps = len(shard.steps)
        entry_of(suspect.entry).stream.close()
        shards.let_time_pass()
        await turns()
        assert len(shard.steps) == num_steps
        shards.release()
        await turns()
        (other,) = batcher._planner.running
        assert {entry_of(row.entry).stream for row in (suspect, other)} == set(streams)


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 90), min_size=1, max_size=40), st.integers(0, 2)),
    min_size=1,
    max_size=25,
)


def pooled(ids: list[int], *logit_ids: int) -> ValidRequest:
    return ValidRequest(input_ids=tuple(ids), max_new_tokens=1, pooling=Pooling(logit_ids))


async def values_of(stream: TokenStream) -> list[float]:
    """What a pooled request yields, after checking that it generated no tokens."""
    (event,) = await collect(stream)
    assert (event.index, event.finished is not None) == (0, True)
    assert stream.pooled is not None
    return list(stream.pooled)


@settings(deadline=None, max_examples=60)
@given(prompts, st.integers(1, 24), st.integers(1, 16), st.integers(1, 3), st.booleans())
def test_every_kind_of_request_yields_its_own(
    wanted: list[tuple[list[int], int]], prefill: int, rows: int, depth: int, fails: bool
) -> None:
    """States, logits and tokens do not depend on the other requests, nor on a step that fails."""

    async def run() -> None:
        shard = FakeShard(num_blocks=32, block_size=4)
        batcher = new_batcher(
            DirectShards(shard),
            shard,
            max_batch_prefill_tokens=prefill + rows,
            max_batch_size=rows,
            depth=depth,
        )

        async def client(ids: list[int], kind: int) -> None:
            if kind == 0:
                stream = batcher.submit(request(ids, 6))
                assert ids_of(await collect(stream)) == continuation(ids, 6)
                return
            logit_ids = [5, 6, 7] if kind == 2 else []
            stream = batcher.submit(pooled(ids, *logit_ids))
            assert await values_of(stream) == pooled_values(ids, logit_ids)

        async with running(batcher):
            if fails:
                shard.fail_next = "the device caught fire"
            await asyncio.gather(*(client(*one) for one in wanted))

    asyncio.run(run())


async def test_no_decode_and_no_token_is_computed_for_pooled_prompts() -> None:
    shard = FakeShard()
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        stream = batcher.submit(pooled([1, 2, 3]))
        assert await values_of(stream) == pooled_values([1, 2, 3], [])
    assert all(not step.decode.decode_slots for step in shard.steps)
    assert all(not step.prefill.decode_slots for step in shard.steps)


async def test_pooled_prompts_hit_the_prefix_cache_except_for_the_last_token() -> None:
    shard = FakeShard(block_size=4)
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        first = batcher.submit(request([7] * 12, 3))
        await collect(first)
        for ids in ([7] * 12, [7] * 12, [7] * 13):
            stream = batcher.submit(pooled(ids))
            assert await values_of(stream) == pooled_values(ids, [])
            assert stream.cached_tokens == (len(ids) - 1) // 4 * 4


async def test_only_the_request_that_is_not_finite_fails() -> None:
    shard = FakeShard()
    shard.not_finite.add(1)
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        good, bad = batcher.submit(pooled([1])), batcher.submit(pooled([2]))
        with pytest.raises(GenerationError, match="not finite"):
            await collect(bad)
        assert await values_of(good) == pooled_values([1], [])


async def test_clients_that_leave_free_their_slot_and_blocks() -> None:
    shard = FakeShard(num_blocks=40)
    batcher = new_batcher(DirectShards(shard), shard, max_batch_prefill_tokens=4, max_batch_size=1)
    async with running(batcher):
        long_prompt, queued = batcher.submit(pooled([1] * 100)), batcher.submit(pooled([2]))
        while not shard.sequences:
            await asyncio.sleep(0)
        queued.close()
        long_prompt.close()
        assert await values_of(batcher.submit(pooled([3] * 100))) == pooled_values([3] * 100, [])
    computed = sum(sum(step.prefill.chunk_tokens) for step in shard.steps)
    assert computed < 200, "the abandoned prompt was computed to its end"
