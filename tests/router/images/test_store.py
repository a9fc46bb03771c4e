"""Images in memory: each is prepared once, kept while a request has it, and bounded together with the others."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable

import pytest

from millrace_router.errors import ImageInvalid, ImagesUnavailable, Overloaded
from millrace_router.images.child import (
    BrokenProcessError,
    DecodingLimits,
    NotStartedError,
    Tiles,
)
from millrace_router.images.families import geometry_of
from millrace_router.images.fetch import ImageFetcher
from millrace_router.images.geometry import AnyGeometry, Geometry
from millrace_router.images.store import REFUSED_SECONDS, ImageStore
from millrace_router.request.block_hashes import BlockHashes
from millrace_router.request.images import Detail, ImageSource, spans_of
from millrace_testing.shards.fake_images import IMAGE_TOKEN_ID, image_of, request_with

GEOMETRY = Geometry.of(
    "smolvlm", {"size": {"longest_edge": 8}, "max_image_size": {"longest_edge": 8}}
)
TILE = 3 * 8 * 8


class FakeProcess:
    """Makes one tile of any bytes; breaks for those in `breaks`."""

    def __init__(self) -> None:
        self.geometry: AnyGeometry = GEOMETRY
        self.limits = DecodingLimits()
        self.breaks: set[bytes] = set()
        self.is_there = True
        self.decoded: list[bytes] = []
        self.details: list[Detail] = []

    async def decode(self, content: bytes, detail: Detail) -> Tiles:
        self.decoded.append(content)
        self.details.append(detail)
        await asyncio.sleep(0)
        if content in self.breaks:
            raise BrokenProcessError
        if not self.is_there:
            raise NotStartedError
        return Tiles(content.ljust(32), 0, 0, 1, bytes(TILE), tile=(8, 8))


def store_of(
    process: FakeProcess,
    *,
    num_images: int = 3,
    wait_seconds: float = 0.05,
    clock: Callable[[], float] = time.monotonic,
) -> ImageStore:
    return ImageStore(
        process,  # type: ignore[arg-type]
        ImageFetcher((), max_bytes=99),
        rows_per_tile=2,
        max_images=4,
        max_rows=100,
        max_memory=num_images * TILE,
        wait_seconds=wait_seconds,
        clock=clock,
    )


def source(name: str, part: str = "messages.0.content.0") -> ImageSource:
    return ImageSource(f"data:image/png;base64,{base64.b64encode(name.encode()).decode()}", part)


async def test_only_an_image_without_others_has_a_grid_in_llava_onevision() -> None:
    process = FakeProcess()
    for geometry in (geometry_of("llava_onevision", {"max_grid_tiles": 9}), GEOMETRY):
        process.geometry = geometry
        store = store_of(process, num_images=1 << 17)
        for names in ("a", "ab"):
            await store.prepare([source(name) for name in names])
    assert process.details == ["auto", "low", "low", "auto", "auto"]


async def test_requests_at_once_with_one_image_share_it() -> None:
    process = FakeProcess()
    store = store_of(process)
    made = await asyncio.gather(*(store.prepare([source("a")]) for _ in range(5)))
    assert len(process.decoded) == 1
    assert len({id(image) for (image,) in made}) == 1
    assert store.in_use == TILE


async def test_images_without_a_request_make_room_the_oldest_first() -> None:
    process = FakeProcess()
    store = store_of(process)
    for name in "abcad":
        await store.prepare([source(name)])
    assert store.in_use == 3 * TILE
    await store.prepare([source("a")])
    assert process.decoded == [b"a", b"b", b"c", b"d"]
    await store.prepare([source("b")])
    assert process.decoded[-1] == b"b"


async def test_images_of_requests_stay_and_others_wait_and_are_refused() -> None:
    store = store_of(FakeProcess())
    held = [await store.prepare([source(name)]) for name in "abc"]
    with pytest.raises(Overloaded):
        await store.prepare([source("d")])
    assert store.in_use == 3 * TILE
    waiting = asyncio.create_task(store_of(FakeProcess()).prepare([source("d")]))
    held.clear()
    assert await waiting
    assert await store.prepare([source("d")])


async def test_a_request_that_waits_goes_on_when_another_ends() -> None:
    store = store_of(FakeProcess(), num_images=1, wait_seconds=30)
    held = await store.prepare([source("a")])
    waiting = asyncio.create_task(store.prepare([source("b")]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    del held
    (image,) = await waiting
    assert image.digest.startswith(b"b")


async def test_an_image_that_broke_the_process_does_not_get_to_it_again() -> None:
    process = FakeProcess()
    process.breaks.add(b"bomb")
    now = 0.0
    store = store_of(process, clock=lambda: now)
    for message in ("takes too long", "took too long, or too much memory, before"):
        with pytest.raises(ImageInvalid, match=message):
            await store.prepare([source("bomb", "messages.3.content.1")])
    assert process.decoded == [b"bomb"]
    now, process.breaks = REFUSED_SECONDS, set()
    assert await store.prepare([source("bomb")])


async def test_a_process_that_does_not_start_is_tried_again_for_the_next_request() -> None:
    process = FakeProcess()
    process.is_there = False
    store = store_of(process)
    with pytest.raises(ImagesUnavailable):
        await store.prepare([source("a")])
    process.is_there = True
    assert await store.prepare([source("a")])


async def test_requests_at_once_have_memory_for_all_their_images_or_wait_for_it() -> None:
    """None keeps an image while it waits for memory for another one."""
    store = store_of(FakeProcess(), num_images=4, wait_seconds=30)

    async def use(names: str) -> None:
        images = await store.prepare([source(name) for name in names])
        assert store.in_use <= 4 * TILE
        await asyncio.sleep(0)
        del images

    await store.prepare([source("a")])
    await asyncio.gather(*(use(names) for names in ("abc", "def", "ghi", "ajk", "lmn") * 3))


async def test_requests_that_find_no_memory_are_refused_and_leave_it_to_later_ones() -> None:
    store = store_of(FakeProcess())
    held = await store.prepare([source("a")])
    errors = await asyncio.gather(
        *(store.prepare([source(f"{n}{name}") for name in "abc"]) for n in range(20)),
        return_exceptions=True,
    )
    assert {type(error) for error in errors} == {Overloaded}
    del held
    assert len(await store.prepare([source(name) for name in "abc"])) == 3


async def test_a_request_whose_images_do_not_fit_together_is_refused() -> None:
    store = store_of(FakeProcess())
    with pytest.raises(ImageInvalid, match=r"content.3`: the image and those before it do not fit"):
        await store.prepare(
            [source(name, f"messages.0.content.{n}") for n, name in enumerate("abcd")]
        )
    assert await store.prepare([source("e")])


async def test_requests_of_another_salt_share_no_image() -> None:
    process = FakeProcess()
    store = store_of(process)
    digests = set[bytes]()
    for salt in ((), ("a", ""), ("a", ""), ("b", "")):
        (image,) = await store.prepare([source("a")], salt)
        digests.add(image.digest)
    assert (len(digests), len(process.decoded)) == (3, 3)


def keys_of(parts: list[object], salt: tuple[str, ...] = ()) -> list[bytes]:
    request = request_with(parts, 1)  # type: ignore[arg-type]
    hashes = BlockHashes(4, salt=salt, images=request.images)
    return list(hashes.first(len(request.input_ids) // 4, request.input_ids, []))


def test_keys_depend_on_the_image_its_place_and_its_rows() -> None:
    one, other = image_of("one", 3), image_of("other", 3)
    text = [5] * 9
    first, second = keys_of([text, one, text]), keys_of([text, other, text])
    assert first[:2] == second[:2]
    assert set(first[2:]).isdisjoint(second)
    assert keys_of([one, other]) != keys_of([other, one])
    ids = [IMAGE_TOKEN_ID] * 8
    plain = BlockHashes(4).first(2, ids, [])
    spans = spans_of(ids, IMAGE_TOKEN_ID, [one])
    assert set(plain).isdisjoint(BlockHashes(4, images=spans).first(2, ids, []))


def test_keys_tell_two_images_in_one_block_apart_by_their_order() -> None:
    one, other = image_of("one"), image_of("other")
    ids = [IMAGE_TOKEN_ID] * 4
    pairs = [spans_of(ids, IMAGE_TOKEN_ID, pair) for pair in ([one, other], [other, one])]
    keys = [BlockHashes(4, images=spans).first(1, ids, [])[0] for spans in pairs]
    assert keys[0] != keys[1]


def test_more_or_fewer_placeholders_than_the_images_have_are_a_defect() -> None:
    for count in (1, 3):
        with pytest.raises(ValueError, match="placeholders"):
            spans_of([IMAGE_TOKEN_ID] * count, IMAGE_TOKEN_ID, [image_of("one")])
