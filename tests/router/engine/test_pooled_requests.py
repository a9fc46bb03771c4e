"""Requests without tokens in the batcher: beside generations, over failures, and when their clients leave."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.errors import GenerationError
from millrace_router.request.request import Pooling, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.fake_router import (
    DirectShards,
    collect,
    ids_of,
    new_batcher,
    request,
    running,
)
from millrace_testing.shards.fake_shard import FakeShard, continuation
from millrace_testing.shards.hash_tokens import pooled_values

prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 90), min_size=1, max_size=40), st.integers(0, 2)),
    min_size=1,
    max_size=25,
)


def pooled(ids: list[int], *logit_ids: int) -> ValidRequest:
    return ValidRequest(input_ids=tuple(ids), max_new_tokens=1, pooling=Pooling(logit_ids))


async def values_of(stream: TokenStream) -> list[float]:
    """What a pooled request yields, after checking that it has no token."""
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


async def test_no_decode_and_no_token_is_computed_for_them() -> None:
    shard = FakeShard()
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        stream = batcher.submit(pooled([1, 2, 3]))
        assert await values_of(stream) == pooled_values([1, 2, 3], [])
    assert all(not step.decode.decode_slots for step in shard.steps)
    assert all(not step.prefill.decode_slots for step in shard.steps)


async def test_their_prompts_are_found_in_the_prefix_cache_but_for_the_last_token() -> None:
    shard = FakeShard(block_size=4)
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        first = batcher.submit(request([7] * 12, 3))
        await collect(first)
        for ids in ([7] * 12, [7] * 12, [7] * 13):
            stream = batcher.submit(pooled(ids))
            assert await values_of(stream) == pooled_values(ids, [])
            assert stream.cached_tokens == (len(ids) - 1) // 4 * 4


async def test_one_that_is_not_finite_fails_alone() -> None:
    shard = FakeShard()
    shard.not_finite.add(1)
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        good, bad = batcher.submit(pooled([1])), batcher.submit(pooled([2]))
        with pytest.raises(GenerationError, match="not finite"):
            await collect(bad)
        assert await values_of(good) == pooled_values([1], [])


async def test_leaving_frees_everything() -> None:
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
