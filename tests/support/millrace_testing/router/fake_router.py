"""Parts for router tests: a tiny real tokenizer, and a batcher on a fake shard without sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import cast

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from millrace_proto import generate_pb2 as pb
from millrace_router.adapters.admission import AdapterAdmission
from millrace_router.adapters.residency import Residency
from millrace_router.engine.adapter_loading import AdapterLoading
from millrace_router.engine.batch_metrics import BatchMetrics
from millrace_router.engine.batcher import Batcher
from millrace_router.engine.image_loading import ImageLoading
from millrace_router.engine.in_flight import InFlight
from millrace_router.engine.predictor import LatencyPredictor
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.forecast import Forecaster
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.recovery.epochs import EpochManager
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.quarantine import Quarantine
from millrace_router.recovery.recovery_policy import RecoveryPolicy
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.request.adapter import AdapterVersion
from millrace_router.request.images import PreparedImage
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import Finished, TokenEvent, TokenStream
from millrace_router.scheduler.block_ledger import BlockLedger, StoredBlocks
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.factory import blocks_from
from millrace_router.scheduler.image_features import ImageFeatures
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.queue import RequestQueue, WaitingQueue
from millrace_router.scheduler.step_plan import Budgets, StepPlan
from millrace_router.shards.errors import (
    AdapterNotLoaded,
    ImageRefused,
    ShardBusy,
    ShardError,
    ShardLost,
    StepFailed,
)
from millrace_router.shards.step_channel import StepChannel
from millrace_router.shards.step_result import StepResult, result_from_pb
from millrace_router.shards.wire import image_to_pb, open_to_pb, plan_to_pb
from millrace_router.start.engine import entries_of
from millrace_router.telemetry.metrics import Metrics
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing.adapters.fake_adapters import MODULE, AdapterLoadError, FakeAdapters
from millrace_testing.shards.fake_images import NUM_LAYERS
from millrace_testing.shards.fake_shard import FakeShard
from millrace_testing.shards.hash_shard import HashShard
from millrace_testing.shards.hash_tokens import EOS_TOKEN_ID, VOCAB_SIZE

EOS_TOKEN_IDS = frozenset({EOS_TOKEN_ID})


def tiny_tokenizer() -> Tokenizer:
    """One token per word: ` w0` … ` w95`, and `</s>` as the end of sequence."""
    vocab = {f"▁w{i}": i for i in range(VOCAB_SIZE - 1)} | {"</s>": EOS_TOKEN_ID}
    rust = RustTokenizer(models.WordLevel(vocab, unk_token="▁w0"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    rust.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(rust)


def panic() -> BaseException:
    """The exception of a library in Rust that panics, which is no `Exception`."""
    try:
        decoders.Strip("a", 0, 5).decode(["a"])
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError("the tokenizer does not panic")


class DirectShards:
    """A `StepChannel`, and its `ShardGroup`, whose only shard is a fake in the same process."""

    def __init__(self, shard: FakeShard | HashShard) -> None:
        self.shard = shard
        self.group = self
        self.last_sent = 0
        self.epoch = 0
        self.held_loads: dict[str, asyncio.Event] = {}
        """Loads of a digest wait for its event."""
        self.lost = False
        """Whether the calls of adapters find no shard."""
        self.is_local = True
        self.has_kv_store = False
        self.kv_stores = (0,)
        self.settle: Callable[[], Awaitable[int]] | None = None
        self._answers: deque[StepResult | ShardError] = deque()

    def __len__(self) -> int:
        return 1

    async def health(self) -> bool:
        return True

    async def pulse(self) -> int:
        await self.health()
        return 0

    async def end(self, reason: str) -> bool:
        return False

    async def stored_blocks(self) -> list[StoredBlocks]:
        return []

    async def open(self) -> None:
        self.kv_stores = (self.kv_stores[0] + (not self.shard.keeps_kv),)
        life = 0 if self.settle is None else await self.settle()
        self.epoch += 1
        self.last_sent = 0
        self._answers.clear()
        self.shard.step(open_to_pb(self.epoch, life))

    async def close(self) -> None:
        """End nothing: another router has a shard of its own."""

    async def load_adapter(self, slot: int, digest: str, *, timeout: float) -> None:
        epoch = self.epoch
        await asyncio.sleep(0)
        if digest in self.held_loads:
            await self.held_loads[digest].wait()
        self._check_call(epoch)
        adapters = self.shard.adapters
        try:
            error = adapters.load(slot, digest, in_use=self.shard.adapters_in_use)
        except AdapterLoadError as refused:
            raise ShardBusy(str(refused)) from None
        if error is not None:
            raise AdapterNotLoaded(error)

    async def unload_adapter(self, slot: int, *, timeout: float) -> None:
        epoch = self.epoch
        await asyncio.sleep(0)
        self._check_call(epoch)
        self.shard.adapters.unload(slot, in_use=self.shard.adapters_in_use)

    async def put_image(
        self, slot: int, first_row: int, image: PreparedImage, *, timeout: float
    ) -> None:
        epoch = self.epoch
        messages = [one async for one in image_to_pb(epoch, slot, first_row, image)]
        await asyncio.sleep(0)
        self._check_call(epoch)
        error = self.shard.images.put(messages)
        if error is not None:
            raise ImageRefused(error)

    def _check_call(self, epoch: int) -> None:
        if self.lost:
            raise ShardLost("the shard is gone")
        assert epoch == self.epoch, "a call of an epoch that has ended"

    def report_failure(self, kind: str, error: ShardError) -> None:
        pass

    async def send(self, plan: StepPlan) -> None:
        self.last_sent += 1
        message = plan_to_pb(plan, epoch=self.epoch, number=self.last_sent)
        answer = self.shard.step(message)
        failed = answer.HasField("error")
        self._answers.append(
            StepFailed(
                answer.error.message,
                out_of_memory=answer.error.kind == pb.StepError.KIND_OUT_OF_MEMORY,
            )
            if failed
            else result_from_pb([answer])
        )

    async def receive(self) -> StepResult:
        await asyncio.sleep(0)
        answer = self._answers.popleft()
        if isinstance(answer, ShardError):
            raise answer
        if isinstance(self.shard, HashShard):
            self.shard.answered = answer.number
        return answer


def _forecaster(budgets: Budgets, cost: CostModel, shard: FakeShard | HashShard) -> Forecaster:
    return Forecaster(
        cost,
        max_batch_size=budgets.max_batch_size,
        max_batch_prefill_tokens=budgets.max_batch_prefill_tokens,
        block_size=shard.block_size,
        num_blocks=shard.num_blocks - 1,
    )


def new_batcher(
    channel: StepChannel | DirectShards,
    shard: FakeShard | HashShard,
    *,
    max_batch_prefill_tokens: int = 16,
    max_batch_size: int | None = None,
    max_draft_tokens: int = 0,
    budgets: Budgets | None = None,
    prefix_caching: bool = True,
    waiting: RequestQueue | None = None,
    max_queue_size: int | None = None,
    launcher: LauncherChannel | None = None,
    grace_seconds: float = 300.0,
    depth: int = 2,
    late: LatePlanning | None = None,
    cycle_seconds: float = 2.0,
) -> Batcher:
    """A batcher over `shard`'s blocks; `budgets` take the place of the two numbers before them."""
    size = max_batch_size or shard.max_batch_size
    budgets = budgets or _budgets(max_batch_prefill_tokens, size, max_draft_tokens)
    metrics, cost = Metrics(max_input_tokens=1000, max_total_tokens=1000), CostModel()
    channel = cast("StepChannel", channel)
    in_flight = _in_flight(channel, late or LatePlanning(cost, most=0.0), cost, depth)
    launcher, status = launcher or LauncherChannel(None), ShardStatus(grace_seconds)
    epochs = EpochManager(channel, launcher, status, cost, metrics, oldest=in_flight.oldest)
    recovery = _recovery(shard, budgets, cost, prefix_caching=prefix_caching)
    waiting = WaitingQueue() if waiting is None else waiting
    adapters = _adapters(channel, shard.adapters, waiting, metrics, cycle_seconds)
    predictor = LatencyPredictor(
        cost,
        _forecaster(budgets, cost, shard),
        metrics,
        in_flight=in_flight,
        recovery=recovery,
        waiting=waiting,
        adapters=adapters,
        max_queue_size=max_queue_size,
    )
    return Batcher(
        in_flight,
        epochs,
        recovery,
        waiting=waiting,
        predictor=predictor,
        new_entry=entries_of(tiny_tokenizer(), EOS_TOKEN_IDS, block_size=shard.block_size),
        metrics=BatchMetrics(metrics),
        adapters=adapters,
        images=ImageLoading(channel) if shard.images.num_rows else None,
    )


def _budgets(prefill_tokens: int, size: int, max_draft_tokens: int) -> Budgets:
    return Budgets(
        max_batch_prefill_tokens=prefill_tokens,
        max_batch_size=size,
        max_draft_tokens=max_draft_tokens,
    )


def _in_flight(channel: StepChannel, late: LatePlanning, cost: CostModel, depth: int) -> InFlight:
    return InFlight(channel, late, depth=depth, on_router_seconds=cost.overhead.add_answer)


def _recovery(
    shard: FakeShard | HashShard, budgets: Budgets, cost: CostModel, *, prefix_caching: bool
) -> RecoveryPolicy:
    planners = partial(_new_planner, shard, budgets, cost, prefix_caching=prefix_caching)
    return RecoveryPolicy(planners, Quarantine())


def _new_planner(
    shard: FakeShard | HashShard,
    budgets: Budgets,
    cost: CostModel,
    *,
    prefix_caching: bool,
    blocks: BlockManager | None = None,
) -> Planner:
    ledger = BlockLedger(next(shard.lives)) if shard.lives is not None else None
    blocks = blocks or blocks_from(
        shard.num_blocks,
        shard.block_size,
        prefix_caching=prefix_caching,
        ledger=ledger,
        windows=shard.windows,
        state_pages=getattr(shard, "state_pages", 0),
    )
    return Planner(budgets, blocks, cost, images=_features(shard))


def _features(shard: FakeShard | HashShard) -> ImageFeatures | None:
    images = shard.images
    if not images.num_rows:
        return None
    return ImageFeatures(images.num_rows, images.num_slots, NUM_LAYERS, images.mask)


def _adapters(
    channel: StepChannel,
    adapters: FakeAdapters,
    waiting: RequestQueue,
    metrics: Metrics,
    cycle_seconds: float,
) -> AdapterLoading | None:
    if not adapters.max_adapters:
        return None
    residency = Residency(
        max_adapters=adapters.max_adapters,
        num_pages=adapters.num_pages,
        cycle_seconds=cycle_seconds,
    )
    admission = AdapterAdmission(
        residency, waiting, bytes_per_slice={MODULE.name: MODULE.bytes_per_slice}
    )
    return AdapterLoading(admission, channel, metrics)


@asynccontextmanager
async def running(batcher: Batcher) -> AsyncIterator[Batcher]:
    """`batcher.run` as a task for the length of the block."""
    task = asyncio.create_task(batcher.run())
    try:
        yield batcher
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class _Reader:
    """Keeps what a stream sends for a test that reads it token by token."""

    def __init__(self, stream: TokenStream) -> None:
        self._items: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        self._ended = False
        stream.connect(self)

    def token(self, event: TokenEvent) -> None:
        self._items.put_nowait(event)

    def fail(self, error: Exception) -> None:
        self._items.put_nowait(error)

    async def next(self) -> TokenEvent | None:
        if self._ended:
            return None
        item = await self._items.get()
        self._ended = isinstance(item, Exception) or item.finished is not None
        if isinstance(item, Exception):
            raise item
        return item


async def next_token(stream: TokenStream) -> TokenEvent | None:
    """Wait for the next token of a stream; None after the last; raises what the stream failed with."""
    sink = stream._sink
    return await (sink if isinstance(sink, _Reader) else _Reader(stream)).next()


async def collect(stream: TokenStream) -> list[TokenEvent]:
    """Every token of a stream that has not been read yet."""
    events: list[TokenEvent] = []
    while (event := await next_token(stream)) is not None:
        events.append(event)
    return events


def ids_of(events: list[TokenEvent]) -> list[int]:
    """Token ids of a stream, after checking that indexes run 1, 2, 3 … and that the last one alone ends it."""
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    assert [event.finished is not None for event in events].count(True) == 1
    assert end_of(events).generated_tokens == len(events)
    return [event.token.id for event in events]


def end_of(events: list[TokenEvent]) -> Finished:
    """The end, which comes with the last event."""
    last = events[-1]
    assert last.finished is not None
    return last.finished


def request(
    ids: list[int], max_new_tokens: int, adapter: AdapterVersion | None = None
) -> ValidRequest:
    """A greedy request."""
    return ValidRequest(input_ids=tuple(ids), max_new_tokens=max_new_tokens, adapter=adapter)
