"""Journals without threads, sockets or models: a schedule driver is recorded, and replayed to a hash shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TypeVar, cast

from millrace_proto import generate_pb2 as pb
from millrace_proto.sampling import Sampling
from millrace_router.adapters.slots import AdapterSlot, SlotState
from millrace_router.journal.header import Header
from millrace_router.journal.journal import Journal
from millrace_router.journal.reader import read_epochs
from millrace_router.journal.replay.player import Outcome, Player
from millrace_router.journal.rotation import JournalFolder
from millrace_router.journal.writer import JournalWriter
from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.step_plan import Budgets, StepPlan
from millrace_router.shards.errors import StepFailed
from millrace_router.shards.step_channel import StepChannel
from millrace_router.shards.wire import Capacity, ShardInfo, open_to_pb
from millrace_router.telemetry.instruments import Counter
from millrace_testing.adapters.fake_adapters import MODULE, adapters_for, version_of
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.schedules.requests import VERSIONS
from millrace_testing.shards.hash_choices import Choices, RandomLengths
from millrace_testing.shards.hash_shard import HashShard
from millrace_testing.shards.hash_tokens import VOCAB_SIZE

MOST_BYTES = 1 << 20


def header(shard: HashShard, *, keeps_tokens: bool = True, deterministic: bool = True) -> Header:
    """The header of a deployment of `shard` alone."""
    return Header(
        life="a life",
        version="0",
        model_id="hash",
        model_sha=None,
        keeps_tokens=keeps_tokens,
        shard=info_of(shard, deterministic=deterministic),
        warmup={"max_batch_prefill_tokens": 16, "max_batch_size": shard.max_batch_size},
        capacity=capacity_of(shard),
    )


def info_of(shard: HashShard, *, deterministic: bool = True) -> ShardInfo:
    return ShardInfo(
        model_type="hash",
        dtype="float32",
        device_type="cpu",
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=1024,
        eos_token_ids=frozenset({96}),
        block_size=shard.block_size,
        world_size=1,
        attention="none",
        deterministic=deterministic,
        prefill_logprobs=True,
        window_size=None,
        quantization=None,
        max_draft_tokens=shard.max_draft_tokens,
        adapter_modules=(MODULE,) if shard.adapters.max_adapters else (),
    )


def capacity_of(shard: HashShard) -> Capacity:
    room = (shard.num_blocks - 1) * shard.block_size
    return Capacity(
        num_blocks=shard.num_blocks,
        max_batch_total_tokens=room,
        max_input_tokens=room - 1,
        max_total_tokens=room,
        kv_bytes_per_token=1,
        adapter_pages=shard.adapters.num_pages if shard.adapters.max_adapters else 0,
    )


class InlineWriter(JournalWriter):
    """Writes as soon as it is woken, on the thread that wakes it; not while it is `stuck`."""

    stuck = False

    def start(self) -> None:
        pass

    def wake(self) -> None:
        if not self.stuck:
            self._drain()

    def close(self) -> bool:
        self._finish()
        return True


def journal_in(
    folder: Path, header: Header, *, max_bytes: int = MOST_BYTES
) -> tuple[Journal, InlineWriter, Counter]:
    """A journal, its writer, and the counter of dropped records."""
    writer, dropped = InlineWriter(JournalFolder(folder, max_bytes=max_bytes), header), Counter()
    return Journal(writer, dropped), writer, dropped


class RecordedDriver(ScheduleDriver):
    """Passes its messages and their answers to a journal."""

    def __init__(
        self, budgets: Budgets, shard: HashShard, journal: Journal, *, depth: int = 2
    ) -> None:
        self.journal = journal
        most = budgets.max_draft_tokens
        drafts = RandomLengths(1, most) if most else None
        super().__init__(budgets, shard, drafts=drafts, depth=depth)

    def _open(self) -> None:
        super()._open()
        message = self.shard.steps[-1]
        self.journal.sent(message)
        self.journal.answered([pb.StepResponse(epoch=message.epoch)])

    def send(self) -> StepPlan | None:
        plan = super().send()
        if plan is not None:
            self.journal.sent(self.shard.steps[-1])
        return plan

    def cut_with_kept_kv(self) -> None:
        """End the epoch, and begin another one with its KV."""
        self.keeps_kv = True
        self.journal.failed("out_of_memory", "there is no memory")
        self.cut()

    def _end_call(self, place: AdapterSlot) -> None:
        digest = None if place.state is SlotState.LEAVING else place.digest
        super()._end_call(place)
        self.journal.adapter_changed(self._epoch, place.number, digest)

    def receive(self) -> None:
        answer = self.flights[0].answer
        if answer.HasField("error"):
            self.journal.failed("failed", answer.error.message)
        else:
            self.journal.answered([answer])
        super().receive()


T = TypeVar("T")


class ReplayShards:
    """The parts of a `StepChannel` and its `ShardGroup` that replays use, over a hash shard."""

    def __init__(self, shard: HashShard) -> None:
        self.shard = shard
        self.group = self
        self.epoch = 0
        self.warmups: list[dict[str, int]] = []
        self.info_now = info_of(shard)
        self._answers: deque[pb.StepResponse] = deque()

    async def info(self, *, timeout: float | None = None) -> ShardInfo:
        return self.info_now

    async def warm_up(self, **fields: int) -> Capacity:
        self.warmups.append(fields)
        return capacity_of(self.shard)

    async def open(self) -> None:
        self.epoch += 1
        self._answers.clear()
        self.shard.step(open_to_pb(self.epoch))

    async def load_adapter(self, slot: int, digest: str, *, timeout: float) -> None:
        assert self.shard.adapters.load(slot, digest, in_use=self.shard.adapters_in_use) is None

    async def unload_adapter(self, slot: int, *, timeout: float) -> None:
        self.shard.adapters.unload(slot, in_use=self.shard.adapters_in_use)

    async def write(self, message: pb.StepRequest) -> None:
        self._answers.append(self.shard.step(message))

    async def while_computing(self, call: Awaitable[T], silence: str) -> T:
        return await call

    async def read(self) -> list[pb.StepResponse]:
        answer = self._answers.popleft()
        if answer.HasField("error"):
            raise StepFailed(answer.error.message)
        self.shard.answered = answer.number
        return [answer]


def player_of(shard: HashShard, **info: object) -> Player:
    """A player to `shard`; `info` changes what it says of itself."""
    shards = ReplayShards(shard)
    shards.info_now = ShardInfo(**{**asdict(shards.info_now), **info})
    return Player(cast("StepChannel", shards), step_seconds=30.0)


async def replayed(path: Path, shard: HashShard, **info: object) -> list[Outcome]:
    """The outcomes of all epochs of a journal; `info` changes what `shard` says of itself."""
    player = player_of(shard, **info)
    return [await player.play(epoch) for epoch in read_epochs(path)]


def requests(count: int, *, seed: int = 0, adapters: bool = False) -> list[ValidRequest]:
    """Requests of which some share beginnings, are sampled, or ask for their prompts' log probabilities.

    With `adapters`, two of three have one.
    """
    random = Random(seed)
    versions = [None, *VERSIONS, version_of("c"), version_of("d")]
    return [
        ValidRequest(
            input_ids=(*([1 + random.randrange(2)] * random.choice((0, 4, 9, 13))), number % 90),
            max_new_tokens=random.randint(3, 14),
            ignore_eos=True,
            sampling=Sampling(seed=number % 3, do_sample=number % 3 > 0),
            prefill_logprobs=number % 5 == 0,
            prompt_top_n_tokens=number % 2 * 2,
            adapter=versions[number % len(versions)] if adapters else None,
        )
        for number in range(count)
    ]


def new_shard(*, max_draft_tokens: int = 0, choices: int = 0, max_adapters: int = 0) -> HashShard:
    """Little room, so that blocks are reused and rows preempted."""
    return HashShard(
        num_blocks=20,
        block_size=4,
        max_batch_size=8,
        max_draft_tokens=max_draft_tokens,
        choices=Choices(choices),
        adapters=adapters_for(VERSIONS, max_adapters=max_adapters, num_pages=3),
    )


BUDGETS = Budgets(max_batch_prefill_tokens=16, max_batch_size=6, spare_slots=2)
