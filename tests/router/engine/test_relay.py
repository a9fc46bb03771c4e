"""Requests of one router that another one computes: tokens, ends and errors reach the clients of the first one."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace

import pytest

from millrace_router.engine.batcher import Batcher
from millrace_router.engine.relay import (
    LENGTH,
    Feed,
    RelayedImage,
    RelayedRequests,
    Submitted,
    described,
    error_of,
)
from millrace_router.errors import (
    GrammarFailed,
    InternalError,
    QueueFull,
    RouterError,
    ShardsGone,
    ShuttingDown,
)
from millrace_router.request.images import GridReduction
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenEvent, TokenStream
from millrace_testing.router.fake_router import (
    DirectShards,
    collect,
    end_of,
    ids_of,
    new_batcher,
    next_token,
    running,
)
from millrace_testing.shards.fake_images import FakeImages, image_of, request_with, seen_by_model
from millrace_testing.shards.fake_shard import FakeShard, continuation
from millrace_testing.shards.hash_tokens import expected_tokens

PROMPT = [1, 2, 3]
COUNT = 24


def asked(*, count: int = COUNT, stop: tuple[str, ...] = ()) -> ValidRequest:
    return ValidRequest(input_ids=tuple(PROMPT), max_new_tokens=count, stop_sequences=stop)


async def read_token(stream: TokenStream) -> TokenEvent:
    event = await next_token(stream)
    assert event is not None
    return event


def no_run(_submitted: Submitted, _feed: Feed) -> None:
    """Find no run that computes the same."""


class Pair:
    """A router that is replaced, and the next one."""

    def __init__(self, old: Batcher, new: Batcher) -> None:
        self.old = old
        self.new = new
        self.running = 0
        """Requests that the next one computes."""
        self.refusal: Exception | None = None
        """Why it computes none."""

    @contextmanager
    def accept(self, request: ValidRequest) -> Iterator[TokenStream]:
        if self.refusal is not None:
            raise self.refusal
        self.running += 1
        stream = self.new.submit(request, is_accepted=True)
        try:
            yield stream
        finally:
            self.running -= 1
            stream.close()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Let the next one compute what the old one has, for the length of the block."""
        olds, news = socket.socketpair()
        for end in (olds, news):
            end.settimeout(0)
        serving = asyncio.create_task(RelayedRequests(self.accept, no_run).serve(news))
        relaying = asyncio.create_task(self.old.relay().run(olds))
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.wait({serving, relaying})

    async def released(self) -> None:
        self.old.leave()
        await self.old.released.wait()


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    shards = FakeShard(), FakeShard()
    old, new = (new_batcher(DirectShards(shard), shard) for shard in shards)
    async with running(old), running(new):
        yield Pair(old, new)


@pytest.mark.parametrize("num_read", [0, 3])
async def test_the_next_router_gets_the_images(num_read: int) -> None:
    shards = [FakeShard(images=FakeImages(num_rows=32, num_slots=2)) for _ in range(2)]
    old, new = (new_batcher(DirectShards(shard), shard) for shard in shards)
    cat = image_of("cat", 3)
    wanted = request_with([[5], cat, [6], image_of("dog"), cat], COUNT)
    async with running(old), running(new):
        both = Pair(old, new)
        stream = old.submit(wanted)
        read = [await read_token(stream) for _ in range(num_read)]
        await both.released()
        async with both.connected():
            ids = ids_of(read + await collect(stream))
    assert ids == expected_tokens(seen_by_model(wanted), COUNT)


def test_an_image_arrives_with_its_order_and_its_reduction() -> None:
    reduction = GridReduction(columns=1, top=1, left=0, rows=2, row_size=3)
    sent = replace(image_of("cat", 3), extra_rows=1, order=((9, 3), (0, 6)), reduction=reduction)
    text = RelayedImage.of(sent).model_dump_json()
    arrived = RelayedImage.model_validate_json(text).prepared()
    assert asdict(arrived) == asdict(sent)


@pytest.mark.parametrize("num_read", [0, 1, 5])
async def test_the_next_router_computes_the_rest(num_read: int) -> None:
    async with pair() as both:
        stream = both.old.submit(asked())
        read = [await read_token(stream) for _ in range(num_read)]
        await both.released()
        late = both.old.submit(asked())
        async with both.connected():
            events = read + await collect(stream)
            assert ids_of(events) == continuation(PROMPT, COUNT)
            assert end_of(events).generated_tokens == COUNT
            assert ids_of(await collect(late)) == continuation(PROMPT, COUNT)
            after = both.old.submit(asked())
            assert ids_of(await collect(after)) == continuation(PROMPT, COUNT)
        assert both.running == 0


async def test_a_router_that_stays_goes_on_with_its_requests() -> None:
    async with pair() as both:
        stream = both.old.submit(asked())
        read = await read_token(stream)
        await both.released()
        late = both.old.submit(asked())
        both.old.stay()
        assert ids_of([read, *await collect(stream)]) == continuation(PROMPT, COUNT)
        assert ids_of(await collect(late)) == continuation(PROMPT, COUNT)


async def test_another_router_computes_the_rest_after_the_next_one_is_gone() -> None:
    async with pair() as both:
        stream = both.old.submit(asked())
        await both.released()
        async with both.connected():
            read = await read_token(stream)
        assert both.running == 0
        async with both.connected():
            assert ids_of([read, *await collect(stream)]) == continuation(PROMPT, COUNT)


async def test_only_the_old_router_looks_for_stop_sequences() -> None:
    async with pair() as both:
        alone = both.new.submit(asked())
        events = await collect(alone)
        (text,) = {event.finished.generated_text for event in events if event.finished}
        stop = text[len(text) // 2 :][:2]
        whole = await collect(both.new.submit(asked(stop=(stop,))))
        stream = both.old.submit(asked(stop=(stop,)))
        await both.released()
        async with both.connected():
            assert ids_of(await collect(stream)) == ids_of(whole)
            assert len(whole) < COUNT


async def test_a_client_that_leaves_ends_its_request_in_the_next_router() -> None:
    async with pair() as both:
        stream = both.old.submit(asked(count=500))
        await both.released()
        async with both.connected():
            await next_token(stream)
            assert both.running == 1
            stream.close()
            while both.running:
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    "error",
    [
        GrammarFailed("no token fits"),
        QueueFull(3, retry_after_seconds=2.0),
        ShardsGone("no memory"),
        ShuttingDown(),
    ],
)
async def test_the_errors_of_the_next_router_are_those_of_the_old_one(error: RouterError) -> None:
    async with pair() as both:
        stream = both.old.submit(asked())
        await both.released()
        both.refusal = error
        async with both.connected():
            with pytest.raises(type(error)) as refusal:
                await collect(stream)
    assert str(refusal.value) == str(error)
    assert refusal.value.retry_after_seconds == error.retry_after_seconds
    assert refusal.value.client_text == error.client_text


async def test_a_defect_of_the_next_router_ends_one_request() -> None:
    async with pair() as both:
        first, second = both.old.submit(asked()), both.old.submit(asked())
        await both.released()
        both.refusal = ValueError("a defect")
        async with both.connected():
            with pytest.raises(InternalError):
                await collect(first)
            with pytest.raises(InternalError):
                await collect(second)
            both.refusal = None
            third = both.old.submit(asked())
            assert ids_of(await collect(third)) == continuation(PROMPT, COUNT)


def test_errors_without_a_class_here_are_internal() -> None:
    assert isinstance(error_of("Popen", "", {}), InternalError)
    assert isinstance(error_of(*described(ValueError("a defect"))), InternalError)


async def test_a_request_with_unknown_fields_is_refused_and_the_others_are_not() -> None:
    async with pair() as both:
        olds, news = socket.socketpair()
        for end in (olds, news):
            end.settimeout(0)
        serving = asyncio.create_task(RelayedRequests(both.accept, no_run).serve(news))
        reader, writer = await asyncio.open_connection(sock=olds)
        request = {"input_ids": PROMPT, "max_new_tokens": 1}
        for number, extra in enumerate(({"watermark_strength": 3}, {})):
            what = {"number": number, "request": request | extra}
            message = json.dumps(["submit", what]).replace('"submit", ', '"submit",').encode()
            writer.write(LENGTH.pack(len(message)) + message)
        answers = []
        for _ in range(2):
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            answers.append(json.loads(await reader.readexactly(length)))
        assert [answer[:2] for answer in answers] == [["failed", 0], ["token", 1]]
        writer.close()
        await serving
