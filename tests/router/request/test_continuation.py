"""Answers that are continued: by the batcher on a fake shard, and in the order in which their choices had tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace_router.errors import NotResumable
from millrace_router.request.continuation import Answer, Beginning, KnownToken, TokenWriter, Turns
from millrace_router.request.entry import check_of
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenEvent, TokenStream
from millrace_testing.router.edge import token_event
from millrace_testing.router.fake_router import (
    DirectShards,
    collect,
    end_of,
    ids_of,
    new_batcher,
    running,
)
from millrace_testing.shards.fake_shard import FakeShard, continuation

PROMPT = [1, 2, 3]
COUNT = 12


class Recorder:
    """Keeps what is recorded; tokens count once they are flushed."""

    number: int | None = None

    def __init__(self) -> None:
        self.beginnings: dict[int, Beginning] = {}
        self.tokens: list[tuple[int, int]] = []
        self.flushed = 0

    def begin(self, choice: int, beginning: Beginning) -> None:
        self.beginnings[choice] = beginning

    def writer(self, choice: int) -> TokenWriter:
        return lambda token_id, logprob, closed: self.tokens.append((choice, token_id))

    def flush(self) -> None:
        self.flushed = len(self.tokens)

    def expand(self, body: bytes) -> None:
        raise AssertionError("no body refers to anything")


def asked(answer: Answer | None = None, *, top_n_tokens: int = 0) -> ValidRequest:
    choice = None if answer is None else answer.next_choice()
    return ValidRequest(
        input_ids=tuple(PROMPT),
        max_new_tokens=COUNT,
        choice=choice,
        top_n_tokens=top_n_tokens,
    )


def known(ids: Sequence[int], request: ValidRequest) -> Answer:
    tokens = [KnownToken(0, id_, -0.5) for id_ in ids]
    return Answer(Recorder(), tokens, {0: Beginning(2, check_of(request))})


async def run(request: ValidRequest) -> tuple[list[TokenEvent], FakeShard, TokenStream]:
    shard = FakeShard()
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        stream = batcher.submit(request)
        return await collect(stream), shard, stream


async def test_tokens_are_recorded_before_they_are_sent() -> None:
    recorder = Recorder()
    shard = FakeShard()
    expected = continuation(PROMPT, COUNT)

    class Sink:
        def token(self, event: TokenEvent) -> None:
            assert recorder.flushed >= event.index

        def fail(self, error: Exception) -> None:
            raise error

    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        stream = batcher.submit(asked(Answer(recorder)))
        others = batcher.submit(asked())
        stream.connect(Sink())
        assert ids_of(await collect(others)) == expected
        assert recorder.tokens == [(0, id_) for id_ in expected]
    assert recorder.beginnings == {0: Beginning(0, check_of(asked()))}


@pytest.mark.parametrize("count", range(COUNT + 1))
async def test_the_rest_is_computed_and_nothing_else(count: int) -> None:
    expected = continuation(PROMPT, COUNT)
    events, shard, stream = await run(asked(known(expected[:count], asked())))
    assert ids_of(events) == expected
    assert end_of(events).generated_tokens == COUNT
    assert stream.cached_tokens == 2
    yielded = sum(step.WhichOneof("work") in {"prefill", "decode"} for step in shard.steps)
    assert yielded <= COUNT - count + 2


async def test_tokens_of_another_request_are_refused() -> None:
    other = known([5], ValidRequest(input_ids=(1, 2), max_new_tokens=COUNT))
    with pytest.raises(NotResumable):
        await run(asked(other))


async def test_a_token_that_is_computed_again_must_be_the_same() -> None:
    expected = continuation(PROMPT, COUNT)
    wanted = asked(top_n_tokens=1)
    events, _, _ = await run(asked(known(expected[:4], wanted), top_n_tokens=1))
    assert ids_of(events) == expected
    with pytest.raises(NotResumable):
        await run(asked(known([*expected[:3], 5], wanted), top_n_tokens=1))


def live(order: Sequence[int], *, leads: bool) -> list[int]:
    """The choices of the tokens in the order in which a stream sends them as they come."""
    made: list[tuple[int, int]] = []
    streams = streams_to(made, leads=leads)
    for stream in streams.values():
        if not stream.is_follower:
            stream.connect()
    for place, number in enumerate(order):
        streams[number].stream.token(token_event(place + 1, "x"))
    return [number for number, _ in made]


@example(order=[1, 2, 1, 0], connected=[0, 1, 2], early=0, leads=True)
@example(order=[1, 2, 1, 0], connected=[0, 1, 2], early=4, leads=True)
@example(order=[2, 1], connected=[0, 1, 2], early=2, leads=True)
@given(
    order=st.lists(st.integers(0, 2), max_size=20),
    connected=st.permutations(range(3)),
    early=st.integers(0, 20),
    leads=st.booleans(),
)
def test_tokens_have_the_order_that_they_had(
    order: list[int], connected: list[int], early: int, *, leads: bool
) -> None:
    made: list[tuple[int, int]] = []
    streams = streams_to(made, leads=leads)
    counts = dict.fromkeys(streams, 0)

    def send(number: int) -> None:
        counts[number] += 1
        streams[number].stream.token(token_event(counts[number], "x"))

    for number in order[:early]:
        send(number)
    turns = Turns(streams, order)
    for number in connected:
        if not streams[number].is_follower:
            streams[number].connect()
    turns.advance()
    # The others come in another order.
    for number in sorted(order[early:]):
        send(number)
    assert [number for number, _ in made] == live(order, leads=leads)
    send(1)
    send(0)
    assert [number for number, _ in made] == live([*order, 1, 0], leads=leads)
    for number in streams:
        indices = [index for choice, index in made if choice == number]
        assert indices == list(range(1, counts[number] + 1))


def streams_to(made: list[tuple[int, int]], *, leads: bool) -> dict[int, Stream]:
    """Three streams; number 0 may lead the others."""
    streams = {number: Stream(number, made) for number in range(3)}
    if leads:
        streams[0].followers = [streams[1], streams[2]]
        streams[1].is_follower = streams[2].is_follower = True
    return streams


class Stream:
    """A stream whose tokens go to a list; the first token connects the followers before."""

    def __init__(self, number: int, made: list[tuple[int, int]]) -> None:
        self.stream = TokenStream()
        self.followers: list[Stream] = []
        self.is_follower = False
        self._number, self._made = number, made

    @property
    def is_connected(self) -> bool:
        return self.stream.is_connected

    @property
    def num_held(self) -> int:
        return self.stream.num_held

    @property
    def ended(self) -> bool:
        return self.stream.ended

    def connect(self) -> None:
        self.stream.connect(self)

    def hold(self, on_token: Callable[[], None], on_connect: Callable[[], None]) -> None:
        self.stream.hold(on_token, on_connect)

    def pass_on(self) -> bool:
        return self.stream.pass_on()

    def release(self) -> None:
        self.stream.release()

    def token(self, event: TokenEvent) -> None:
        followers, self.followers = self.followers, []
        for follower in followers:
            follower.connect()
        self._made.append((self._number, event.index))

    def fail(self, error: Exception) -> None:
        raise error
