"""Images in memory: each is prepared once, kept while a request has it, and bounded together with the others."""

from __future__ import annotations

import asyncio
import base64

import pytest

from millrace_router.errors import ImageInvalid, Overloaded
from millrace_router.images.child import BrokenProcessError, DecodingLimits, Tiles
from millrace_router.images.families import geometry_of
from millrace_router.images.fetch import ImageFetcher
from millrace_router.images.geometry import AnyGeometry, Geometry
from millrace_router.images.store import ImageStore
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
        self.decoded: list[bytes] = []
        self.details: list[Detail] = []

    async def decode(self, content: bytes, detail: Detail) -> Tiles:
        self.decoded.append(content)
        self.details.append(detail)
        await asyncio.sleep(0)
        if content in self.breaks:
            raise BrokenProcessError
        return Tiles(content.ljust(32), 0, 0, 1, bytes(TILE), tile=(8, 8))


def store_of(
    process: FakeProcess, *, num_images: int = 3, wait_seconds: float = 0.05
) -> ImageStore:
    return ImageStore(
        process,  # type: ignore[arg-type]
        ImageFetcher((), max_bytes=99),
        rows_per_tile=2,
        max_images=4,
        max_rows=100,
        max_memory=num_images * TILE,
        wait_seconds=wait_seconds,
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
    store = store_of(process)
    for message in ("takes too long", "took too long, or too much memory, before"):
        with pytest.raises(ImageInvalid, match=message):
            await store.prepare([source("bomb", "messages.3.content.1")])
    assert process.decoded == [b"bomb"]


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
