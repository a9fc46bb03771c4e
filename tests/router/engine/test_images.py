"""Requests with images over a shard that checks rows and slots, and whose tokens depend on every pixel."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_proto import generate_pb2 as pb
from millrace_router.engine.batcher import Batcher
from millrace_router.engine.image_loading import MAX_FAILURES
from millrace_router.errors import GenerationError, NonFiniteOutput, Quarantined
from millrace_router.request.images import Mask, PreparedImage
from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.planner import MOST_STEPS_BEFORE_TILE
from millrace_testing.router.fake_router import (
    DirectShards,
    collect,
    ids_of,
    new_batcher,
    next_token,
    request,
    running,
)
from millrace_testing.shards.fake_images import (
    NUM_LAYERS,
    FakeImages,
    image_of,
    request_with,
    seen_by_model,
)
from millrace_testing.shards.fake_shard import FakeShard
from millrace_testing.shards.hash_tokens import expected_tokens

CAT, DOG = image_of("cat", 3), image_of("dog", 2)


def reads_images(
    *, num_rows: int = 32, num_slots: int = 2, num_blocks: int = 64, mask: Mask = Mask.CAUSAL
) -> FakeShard:
    images = FakeImages(num_rows=num_rows, num_slots=num_slots, mask=mask)
    return FakeShard(num_blocks=num_blocks, images=images)


def answer_to(request: ValidRequest) -> list[int]:
    return expected_tokens(seen_by_model(request), request.max_new_tokens)


async def ask(batcher: Batcher, wanted: ValidRequest) -> None:
    assert ids_of(await collect(batcher.submit(wanted))) == answer_to(wanted)


def tiles_of(*images: PreparedImage) -> list[tuple[bytes, int]]:
    return [(image.digest, tile) for image in images for tile in range(image.num_tiles)]


async def test_an_answer_depends_on_the_image_and_not_on_its_placeholders() -> None:
    shard = reads_images()
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        for image in (CAT, image_of("mouse", 3)):
            await ask(batcher, request_with([[5, 6], image, [7]], 4))
    assert answer_to(request_with([CAT], 4)) != answer_to(request_with([image_of("mouse", 3)], 4))


async def test_two_images_in_another_order_have_another_answer() -> None:
    shard = reads_images()
    one, other = image_of("one"), image_of("other")
    orders = [request_with([[3], *pair], 4) for pair in ((one, other), (other, one))]
    assert orders[0].input_ids == orders[1].input_ids
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        for wanted in orders:
            await ask(batcher, wanted)
    assert len(shard.images.encoded) == 2


async def test_an_image_that_is_seen_twice_is_encoded_once() -> None:
    shard = reads_images()
    batcher = new_batcher(DirectShards(shard), shard, prefix_caching=False)
    async with running(batcher):
        await ask(batcher, request_with([[1], CAT], 3))
        await ask(batcher, request_with([[2, 2], CAT, [3]], 3))
        await asyncio.gather(*(ask(batcher, request_with([[n], DOG], 3)) for n in (4, 5)))
    assert shard.images.encoded == tiles_of(CAT, DOG)
    assert shard.images.num_puts == 2


async def test_the_pixels_of_an_encoded_image_are_not_kept() -> None:
    shard = reads_images()
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        image = image_of("short", 3)
        is_alive = weakref.ref(image)
        await ask(batcher, request_with([[1], image], 3))
        del image
        # The last step's plan may refer to it.
        await ask(batcher, request([1, 2], 2))
        gc.collect()
        assert is_alive() is None
        assert len(batcher._planner.images or ()) == 1


async def test_a_prefix_hit_over_the_whole_image_needs_no_features() -> None:
    shard = reads_images(num_rows=8)
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        await ask(batcher, request_with([CAT, [9] * 8], 2))
        await ask(batcher, request_with([image_of("mouse", 3)], 2))
        num_encoded, num_hit = len(shard.images.encoded), shard.num_hit
        await ask(batcher, request_with([CAT, [9] * 9], 2))
    assert len(shard.images.encoded) == num_encoded
    assert shard.num_hit > num_hit


async def test_the_shards_know_the_grid_of_an_image_of_any_size_also_of_a_cached_one() -> None:
    shard = reads_images()
    token_at, seen = shard.images.token_at, set[tuple[tuple[int, int, int], ...]]()

    def noting(sequence: pb.Sequence, position: int, token_id: int) -> int:
        seen.add(tuple((grid.position, grid.rows, grid.columns) for grid in sequence.image_grids))
        return token_at(sequence, position, token_id)

    shard.images.token_at = noting  # type: ignore[method-assign]
    image = replace(image_of("grid"), rows=1, columns=2, is_grid=True)
    parts: list[Sequence[int] | PreparedImage] = [[4, 5, 6], image, [7] * 60]
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        await ask(batcher, request_with(parts, 3))
        puts = shard.images.num_puts
        await ask(batcher, request_with([*parts, [8]], 3))
    assert (puts, shard.images.num_puts) == (1, 1)
    assert seen == {((4, 1, 2),)}


async def test_a_prefix_hit_into_an_image_needs_all_of_its_tiles_again() -> None:
    shard = reads_images(num_rows=8)
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        await ask(batcher, request_with([CAT], 2))
        await ask(batcher, request_with([image_of("mouse", 3)], 2))
        await ask(batcher, request_with([CAT], 2))
    assert shard.images.encoded[-4:] == tiles_of(CAT)


async def test_running_streams_go_on_between_two_tiles() -> None:
    shard = reads_images()
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        text = batcher.submit(request([1, 2], 60))
        await next_token(text)
        await ask(batcher, request_with([CAT, image_of("bird", 3)], 2))
        await collect(text)
    kinds = [step.WhichOneof("work") for step in shard.steps]
    first, last = kinds.index("encode"), len(kinds) - kinds[::-1].index("encode")
    assert "encode" not in {
        one
        for one, other in zip(kinds[first:last], kinds[first + 1 : last], strict=False)
        if one == other
    }
    assert all(len(step.encode.units) <= 1 for step in shard.steps)


@pytest.mark.parametrize("num_prompts", [1, 12])
async def test_streams_wait_for_a_tile_or_for_prompts_and_only_after_some_steps_for_both(
    num_prompts: int,
) -> None:
    shard = reads_images()
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        text = batcher.submit(request([1, 2], 60))
        await next_token(text)
        others = [batcher.submit(request([number] * 30, 1)) for number in range(num_prompts)]
        image = batcher.submit(request_with([CAT], 2))
        await asyncio.gather(*map(collect, (image, text, *others)))
    kinds = [step.WhichOneof("work") for step in shard.steps]
    beside_prompts = 0
    for index, kind in enumerate(kinds):
        if kind == "encode" and "prefill" in kinds[index + 1 : index + 2]:
            beside_prompts += 1
            assert "encode" not in kinds[index - MOST_STEPS_BEFORE_TILE : index]
    assert (beside_prompts > 0) == (num_prompts > 1)


async def test_a_tile_is_encoded_as_a_whole_alone_and_layer_by_layer_beside_streams() -> None:
    shard = reads_images()
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        text = batcher.submit(request([1, 2], 60))
        await next_token(text)
        # What a tile costs is not known yet.
        await ask(batcher, request_with([CAT], 2))
        await collect(text)
        beside = [list(step.encode.layers) for step in shard.steps if step.HasField("encode")]
        await ask(batcher, request_with([DOG], 2))
    alone = [list(step.encode.layers) for step in shard.steps if step.HasField("encode")]
    assert beside[:NUM_LAYERS] == [[1]] * NUM_LAYERS
    assert sum(map(sum, beside)) == CAT.num_tiles * NUM_LAYERS
    assert alone[len(beside) :] == [[NUM_LAYERS]] * DOG.num_tiles


async def test_an_estimate_has_the_tiles_that_are_to_be_encoded_and_their_time() -> None:
    shard = reads_images()
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        for _ in range(8):
            await ask(batcher, request([1, 2], 8))
        asked = [request_with([[1], CAT, [number]], 3) for number in range(2)]
        before = batcher.estimate(asked[0])
        assert before.num_tiles == CAT.num_tiles
        assert before.prediction is None, "no tile was ever encoded"
        await ask(batcher, request_with([DOG], 2))
        cost = batcher._predictor.cost
        late = batcher.estimate(asked[0])
        assert late.prediction is not None
        assert late.prediction.queue_seconds >= CAT.num_tiles * cost.tile_seconds > 0
        await ask(batcher, asked[0])
        again = batcher.estimate(asked[1])
        assert again.num_tiles == 0
        assert again.prediction is not None
        assert again.prediction.queue_seconds == 0


async def test_text_is_answered_while_an_image_waits_for_rows() -> None:
    shard = reads_images(num_rows=8)
    channel = DirectShards(shard)
    async with running(new_batcher(channel, shard, max_batch_size=2)) as batcher:
        images = [
            asyncio.create_task(ask(batcher, request_with([image_of(str(n), 3)], 3)))
            for n in range(6)
        ]
        await ask(batcher, ValidRequest(input_ids=(1, 2), max_new_tokens=2))
        await asyncio.gather(*images)


async def test_an_image_with_more_pictures_than_slots_is_encoded_one_after_the_other() -> None:
    shard = reads_images(num_slots=1)
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        await ask(batcher, request_with([image_of(str(number)) for number in range(6)], 3))


async def test_everything_is_encoded_again_after_a_failure() -> None:
    shard = reads_images()
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        stream = batcher.submit(wanted := request_with([[5], CAT, [6]], 9))
        seen = [await next_token(stream)]
        shard.fail_next = "the device caught fire"
        seen += await collect(stream)
    assert [event.token.id for event in seen if event] == answer_to(wanted)
    assert shard.images.encoded == tiles_of(CAT, CAT)


@pytest.mark.parametrize("tile", range(4))
async def test_a_failure_at_any_tile_costs_no_token(tile: int) -> None:
    shard = reads_images()
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        stream = batcher.submit(wanted := request_with([[5], CAT, [6]], 5))
        while len(shard.images.encoded) <= tile:
            await asyncio.sleep(0)
        shard.fail_next = "the device caught fire"
        assert ids_of(await collect(stream)) == answer_to(wanted)


async def test_a_lost_shard_during_a_put_costs_no_token() -> None:
    shard = reads_images()
    channel = DirectShards(shard)
    async with running(new_batcher(channel, shard)) as batcher:
        channel.lost = True
        stream = batcher.submit(wanted := request_with([CAT], 5))
        while channel.epoch < 2:
            await asyncio.sleep(0)
        channel.lost = False
        assert ids_of(await collect(stream)) == answer_to(wanted)


async def test_features_that_are_not_finite_fail_only_requests_with_the_image() -> None:
    shard = reads_images()
    shard.images.not_finite.add(CAT.digest)
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        bad = batcher.submit(request_with([CAT, DOG], 3))
        await ask(batcher, request_with([DOG], 3))
        with pytest.raises(NonFiniteOutput):
            await collect(bad)
        shard.images.not_finite.clear()
        await ask(batcher, request_with([CAT], 3))


async def test_pixels_that_the_shards_refuse_fail_only_their_requests() -> None:
    shard = reads_images()
    shard.images.errors[CAT.digest] = "bytes of another number"
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        bad = batcher.submit(request_with([CAT], 3))
        await ask(batcher, request_with([DOG], 3))
        with pytest.raises(GenerationError, match="cannot be encoded"):
            await collect(bad)


@pytest.mark.parametrize("poison", range(CAT.num_tiles))
async def test_an_image_that_breaks_the_shards_is_quarantined_alone(poison: int) -> None:
    shard = reads_images()
    encode = shard.images.encode

    def break_for_cat(step, response) -> None:  # type: ignore[no-untyped-def]
        digests = {shard.images.slots[slot].digest for slot in step.image_slots}
        encode(step, response)
        if CAT.digest in digests and shard.images.encoded[-1:] == [(CAT.digest, poison)]:
            del shard.images.encoded[-1]
            response.error.message = "poison"
            shard.has_failed = True

    shard.images.encode = break_for_cat  # type: ignore[method-assign]
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        text = batcher.submit(request([1, 2], 60))
        bad = batcher.submit(request_with([CAT], 3))
        with pytest.raises(Quarantined):
            await collect(bad)
        assert len(shard.images.encoded) == MAX_FAILURES * poison
        (record,) = batcher._recovery.quarantine.to_json()
        assert record["reason"] == "an image of it failed while it was encoded"
        assert ids_of(await collect(text)) == expected_tokens([1, 2], 60)
        with pytest.raises(Quarantined):
            batcher.submit(request_with([[4], CAT], 3))
        await ask(batcher, request_with([DOG], 3))


async def test_failures_while_an_image_is_encoded_are_forgotten_once_it_is() -> None:
    shard, mouse = reads_images(num_rows=8), image_of("mouse")
    async with running(new_batcher(DirectShards(shard), shard, prefix_caching=False)) as batcher:
        for _ in range(MAX_FAILURES + 1):
            shard.fail_next = "the device caught fire"
            await ask(batcher, request_with([mouse], 3))
            await ask(batcher, request_with([CAT], 3))
    assert shard.images.encoded.count((mouse.digest, 0)) == 2 * (MAX_FAILURES + 1)


async def test_a_client_that_leaves_while_its_image_is_encoded_leaves_nothing_behind() -> None:
    shard = reads_images(num_rows=8, num_slots=1)
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        stream = batcher.submit(request_with([CAT], 5))
        while not shard.images.encoded:
            await asyncio.sleep(0)
        stream.close()
        await ask(batcher, request_with([DOG, [4]], 3))
        await ask(batcher, request_with([image_of("mouse", 3)], 3))


async def test_an_image_whose_client_has_left_is_encoded_no_further() -> None:
    shard = reads_images(num_slots=1)
    images = [image_of(f"left {number}", 9) for number in range(3)]
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        text = batcher.submit(request([1, 2], 90))
        await next_token(text)
        streams = [batcher.submit(request_with([image], 5)) for image in images]
        while not shard.images.encoded:
            await next_token(text)
        for stream in streams:
            stream.close()
        await ask(batcher, request_with([CAT], 3))
        await collect(text)
        num_tiles = len(shard.images.encoded) - CAT.num_tiles
        assert 0 < num_tiles < 5
        await ask(batcher, request_with([images[0]], 3))
        assert shard.violation is None


@pytest.mark.parametrize("budget", [2, 3, 5])
async def test_no_chunk_ends_inside_an_image_whose_tokens_see_each_other(budget: int) -> None:
    shard = reads_images(mask=Mask.IMAGE)
    batcher = new_batcher(DirectShards(shard), shard, max_batch_prefill_tokens=budget)
    async with running(batcher):
        text = batcher.submit(request([1, 2], 60))
        seen = [await next_token(text)]
        wanted = [request_with([[5] * n, CAT, [6], DOG, [7]], 3) for n in range(1, 4)]
        await asyncio.gather(*(ask(batcher, one) for one in wanted))
        seen += await collect(text)
    assert [event.token.id for event in seen if event] == expected_tokens([1, 2], 60)
    assert shard.violation is None


images = st.sampled_from([image_of("a"), image_of("b"), image_of("c", 2), image_of("d", 3)])
prompts = st.lists(
    images | st.lists(st.integers(0, 90), min_size=1, max_size=9), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(prompts, st.integers(1, 9), st.none() | st.integers(0, 5)), min_size=1, max_size=9
    ),
    st.integers(2, 24),
    st.integers(1, 6),
    st.tuples(st.integers(1, 3), st.sampled_from(Mask)),
    st.integers(24, 60),
    st.integers(0, 1),
    st.randoms(use_true_random=False),
)
def test_answers_do_not_depend_on_company_chunks_hits_preemptions_and_failures(
    wanted: list[tuple[Sequence[PreparedImage | list[int]], int, int | None]],
    prefill: int,
    rows: int,
    slots: tuple[int, Mask],
    num_blocks: int,
    failures: int,
    draw: random.Random,
) -> None:
    num_slots, mask = slots
    shard = reads_images(num_slots=num_slots, num_blocks=num_blocks, mask=mask)

    async def client(batcher: Batcher, one: ValidRequest, leave_after: int | None) -> None:
        stream = batcher.submit(one)
        seen: list[int] = []
        while leave_after is None or len(seen) < leave_after:
            event = await next_token(stream)
            if event is None:
                break
            seen.append(event.token.id)
        stream.close()
        expected = answer_to(one)
        assert seen == (expected if leave_after is None else expected[: len(seen)])

    async def fail() -> None:
        for _ in range(failures):
            for _ in range(draw.randint(1, 40)):
                await asyncio.sleep(0)
            shard.fail_next = "the device caught fire"

    async def run() -> None:
        batcher = new_batcher(
            DirectShards(shard), shard, max_batch_prefill_tokens=prefill + rows, max_batch_size=rows
        )
        async with running(batcher):
            await asyncio.gather(
                fail(),
                *(
                    client(batcher, request_with(parts, count), leave)
                    for parts, count, leave in wanted
                ),
            )

    asyncio.run(run())
    assert shard.violation is None
