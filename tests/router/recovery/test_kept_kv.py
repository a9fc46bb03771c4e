"""When the KV of a failed epoch is kept, and when it is dropped: a batcher over a shard that lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import accumulate
from math import ceil, log2
from typing import TypeAlias, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_proto import generate_pb2 as pb
from millrace_router.engine.batcher import Batcher
from millrace_router.errors import Quarantined
from millrace_router.kv_events.recorder import EventRecorder
from millrace_router.prediction.cost import CostModel
from millrace_router.recovery import epochs
from millrace_router.recovery.epochs import EpochManager
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.quarantine import Quarantine
from millrace_router.recovery.recovery_policy import RecoveryPolicy
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.request.block_hashes import BlockHashes
from millrace_router.request.token_stream import TokenEvent
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.step_plan import Budgets, StepPlan
from millrace_router.shards.errors import ShardLost
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.shards.step_result import StepResult
from millrace_router.telemetry.metrics import Metrics
from millrace_testing.router.fake_router import (
    DirectShards,
    collect,
    ids_of,
    new_batcher,
    next_token,
    request,
    running,
)
from millrace_testing.shards.fake_shard import FakeShard, continuation
from millrace_testing.shards.hash_choices import Choices
from millrace_testing.shards.hash_shard import HashShard
from millrace_testing.shards.hash_tokens import expected_tokens

Kind: TypeAlias = "pb.StepError.Kind.ValueType"
OUT_OF_MEMORY, FAILED = pb.StepError.KIND_OUT_OF_MEMORY, pb.StepError.KIND_FAILED
PROMPTS = [[number] * 11 for number in range(4)]


class FailingShards(DirectShards):
    """A shard some of whose steps fail."""

    def __init__(self, shard: HashShard, fails_at: Mapping[int, Kind]) -> None:
        """The kind of failure by the number of the step, counted over all epochs."""
        super().__init__(shard)
        self._fails_at = fails_at
        self._num_sent = 0
        self.is_restarted = False
        """Whether the shard has other KV memory in each epoch."""

    async def open(self) -> None:
        if self.is_restarted:
            self.kv_stores = (self.kv_stores[0] + 1,)
        assert isinstance(self.shard, HashShard)
        self.shard.keeps_kv = not self.is_restarted
        await super().open()

    async def send(self, plan: StepPlan) -> None:
        self._num_sent += 1
        kind = self._fails_at.get(self._num_sent)
        assert isinstance(self.shard, HashShard)
        if kind is not None:
            self.shard.fail_next, self.shard.fails_with = "it fails", kind
        await super().send(plan)


async def outputs(batcher: Batcher, count: int = 20) -> list[list[int]]:
    async with running(batcher):
        streams = [batcher.submit(request(prompt, count)) for prompt in PROMPTS]
        return [ids_of(events) for events in await asyncio.gather(*map(collect, streams))]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("step", [1, 2, 3, 7, 14])
async def test_a_step_without_memory_costs_no_token_that_was_computed(
    step: int, prefix_caching: bool
) -> None:
    shard = HashShard(block_size=8)
    shards = FailingShards(shard, {step: OUT_OF_MEMORY, step + 4: OUT_OF_MEMORY})
    batcher = new_batcher(shards, shard, max_batch_prefill_tokens=64, prefix_caching=prefix_caching)
    assert await outputs(batcher) == [expected_tokens(prompt, 20) for prompt in PROMPTS]
    assert shards.epoch == 3
    assert batcher._metrics._metrics.tokens_recomputed.value == 0
    admitted = [each for sent in shard.steps for each in sent.prefill.change.admitted]
    assert step == 1 or any(each.cached_tokens % 8 for each in admitted)


@pytest.mark.parametrize(
    ("kinds", "num_kept"),
    [
        ([OUT_OF_MEMORY], 1),
        ([FAILED], 0),
        # What may be broken is not kept, and the search for a poison request goes on.
        ([FAILED, OUT_OF_MEMORY], 0),
        ([OUT_OF_MEMORY, FAILED], 1),
    ],
)
async def test_kv_is_kept_after_a_lack_of_memory_and_while_no_request_is_searched_for(
    kinds: list[Kind], num_kept: int
) -> None:
    shard = HashShard(block_size=8)
    shards = FailingShards(shard, {7 + 3 * number: kind for number, kind in enumerate(kinds)})
    batcher = new_batcher(shards, shard, max_batch_prefill_tokens=64)
    assert await outputs(batcher) == [expected_tokens(prompt, 20) for prompt in PROMPTS]
    begin_with_kv = [
        any(each.cached_tokens for each in sent.prefill.change.admitted)
        for before, sent in zip(shard.steps, shard.steps[1:], strict=False)
        if before.HasField("open")
    ]
    assert sum(begin_with_kv) == num_kept
    assert (batcher._metrics._metrics.tokens_recomputed.value == 0) == (FAILED not in kinds)


async def test_kv_of_a_shard_with_other_memory_is_forgotten() -> None:
    shard = HashShard(block_size=8)
    shards = FailingShards(shard, {7: OUT_OF_MEMORY})
    shards.is_restarted = True
    batcher = new_batcher(shards, shard, max_batch_prefill_tokens=64)
    assert await outputs(batcher) == [expected_tokens(prompt, 20) for prompt in PROMPTS]
    assert batcher._metrics._metrics.tokens_recomputed.value > 4 * 11
    blocks = batcher._planner.blocks
    assert blocks.num_free + blocks.num_cached == blocks.num_blocks


async def test_ranks_that_restart_after_a_lack_of_memory_keep_nothing() -> None:
    status, metrics = ShardStatus(1.0), Metrics(max_input_tokens=8, max_total_tokens=9)

    def manager(*addresses: str) -> EpochManager:
        channel = StepChannel(ShardGroup(addresses))
        launcher = LauncherChannel(None)
        return EpochManager(channel, launcher, status, CostModel(), metrics, oldest=lambda: None)

    kinds = ["lost", "hung", "failed", "out_of_memory", "planned"]
    alone, two = manager("unix:/0"), manager("unix:/0", "unix:/1")
    assert [kind for kind in kinds if alone.may_keep_kv(kind)] == ["out_of_memory"]
    assert not any(map(two.may_keep_kv, kinds))


async def test_a_shard_that_was_out_of_reach_keeps_nothing_without_a_directory() -> None:
    class Living(FailingShards):
        """A shard that only its stream left."""

        async def receive(self) -> StepResult:
            if self._num_sent == 7:
                self._num_sent += 1
                raise ShardLost("the stream has ended")
            return await super().receive()

    shard = HashShard(block_size=8)
    shards = Living(shard, {})
    batcher = new_batcher(shards, shard, max_batch_prefill_tokens=64)
    assert await outputs(batcher) == [expected_tokens(prompt, 20) for prompt in PROMPTS]
    assert shards.kv_stores == (0,)
    assert batcher._metrics._metrics.tokens_recomputed.value > 4 * 11


@pytest.mark.parametrize("keep", [True, False])
def test_blocks_that_stay_are_not_cleared_in_events(keep: bool) -> None:
    recorder = EventRecorder(4)

    def new_planner(*, blocks: BlockManager | None = None) -> Planner:
        blocks = blocks or BlockManager(8, 4, recorder.new_cache())
        return Planner(Budgets(max_batch_prefill_tokens=64, max_batch_size=8), blocks)

    policy = RecoveryPolicy(new_planner, Quarantine())
    keys = BlockHashes(4, keeps_content=True).first(1, [1, 2, 3, 4], [])
    blocks = policy.planner.blocks
    blocks.admit(0, 5, keys=keys)
    blocks.grow(0, 5)
    blocks.enter(0, keys)
    recorder.take()
    policy.next_epoch(keep=keep)
    assert len(policy.planner.blocks.find(keys)) == keep
    batch = recorder.take()
    names = [] if batch is None else [event[0] for event in batch[1]]  # type: ignore[attr-defined]
    assert names == ([] if keep else ["BlockRemoved", "AllBlocksCleared"])
    policy.forget_kv()
    assert not policy.planner.blocks.find(keys)


@settings(deadline=None, max_examples=60)
@given(
    gaps=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    num_blocks=st.integers(8, 40),
    prefix_caching=st.booleans(),
    draft_tokens=st.sampled_from([0, 3]),
    seed=st.integers(0, 1000),
)
def test_entries_that_are_held_back_keep_their_kv_or_give_way(
    gaps: list[int], num_blocks: int, prefix_caching: bool, draft_tokens: int, seed: int
) -> None:
    """As after a kill from outside: the first failure keeps KV, and begins a search for a poison request."""
    shard = HashShard(
        num_blocks=num_blocks, block_size=4, max_draft_tokens=draft_tokens, choices=Choices(seed)
    )
    shards = FailingShards(shard, dict.fromkeys(accumulate(gaps), FAILED))
    prompts = [[1] * 9 + [number // 2] for number in range(10)]

    async def run() -> list[list[int]]:
        batcher = new_batcher(
            shards,
            shard,
            max_batch_size=4,
            max_draft_tokens=draft_tokens,
            prefix_caching=prefix_caching,
        )
        async with running(batcher):
            streams = [batcher.submit(request(prompt, 12)) for prompt in prompts]
            results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        blocks = batcher._planner.blocks
        assert blocks.num_free + blocks.num_cached == blocks.num_blocks
        return [[] if isinstance(each, BaseException) else ids_of(each) for each in results]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epochs, "KEEPING", {"failed"})
        results = asyncio.run(run())
    expected = [expected_tokens(prompt, 12) for prompt in prompts]
    # A request whose steps failed by themselves, too, counts as the cause; no single failure blames one.
    assert sum(result != right for result, right in zip(results, expected, strict=True)) < len(gaps)
    assert all(result in ([], right) for result, right in zip(results, expected, strict=True))
    assert shard.violation is None


@pytest.mark.parametrize("count", [1, 2, 7, 16])
async def test_a_poison_request_among_kept_rows_is_found_as_soon(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "KEEPING", {"failed"})
    shard = FakeShard(num_blocks=256)
    shard.keeps_kv = True
    prompts = [[number, number + 1, number + 2] for number in range(count)]
    known = {token for prompt in prompts for token in (*prompt, *continuation(prompt, 12))}
    poison = shard.poison_id = next(token for token in range(90) if token not in known)
    shards = DirectShards(shard)
    async with running(new_batcher(cast("StepChannel", shards), shard)) as batcher:
        streams = [batcher.submit(request(prompt, 12)) for prompt in prompts]
        # The others have computed KV by then.
        for stream in streams:
            await next_token(stream)
        last = batcher.submit(request([3, poison, 4], 12))
        results = await asyncio.gather(*map(collect, [*streams, last]), return_exceptions=True)
    assert isinstance(results.pop(), Quarantined)
    events = cast("list[list[TokenEvent]]", results)
    answers = [[event.token.id for event in each] for each in events]
    assert answers == [continuation(prompt, 12)[1:] for prompt in prompts]
    assert shards.epoch - 1 <= 3 + ceil(log2(count + 1))
