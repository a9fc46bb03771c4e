"""Assembles the batcher and its parts from the flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import count

import structlog

from millrace_router.adapters.admission import AdapterAdmission
from millrace_router.adapters.residency import Residency
from millrace_router.config import RouterConfig
from millrace_router.engine.adapter_loading import AdapterLoading
from millrace_router.engine.batch_metrics import BatchMetrics
from millrace_router.engine.batcher import Batcher
from millrace_router.engine.image_loading import ImageLoading
from millrace_router.engine.in_flight import InFlight
from millrace_router.engine.predictor import LatencyPredictor
from millrace_router.kv_events.recorder import EventRecorder
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.forecast import Forecaster
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.recovery.epochs import EpochManager
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.quarantine import Quarantine
from millrace_router.recovery.recovery_policy import PlannerFactory, RecoveryPolicy
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.request.block_hashes import KEY_FORM
from millrace_router.request.entry import Entry, new_entry
from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.block_ledger import BlockLedger, StoredBlocks, new_life
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.draft_length import AdaptiveDraftLength
from millrace_router.scheduler.factory import (
    blocks_from,
    forecaster_from,
    late_planning_from,
    queue_from,
)
from millrace_router.scheduler.image_features import ImageFeatures
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.shards.step_channel import StepChannel
from millrace_router.start.learned import Learned
from millrace_router.start.shards import RouterDeployment, whole_tokens
from millrace_router.telemetry.metrics import Metrics
from millrace_router.text.tokenizer import Tokenizer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A batcher that does not run yet, and its parts that other components read."""

    batcher: Batcher
    status: ShardStatus
    quarantine: Quarantine
    cost: CostModel
    late: LatePlanning
    adapters: AdapterLoading | None


def _epochs(
    config: RouterConfig,
    channel: StepChannel,
    launcher: LauncherChannel,
    status: ShardStatus,
    cost: CostModel,
    metrics: Metrics,
    in_flight: InFlight,
) -> EpochManager:
    oldest, seconds = in_flight.oldest, config.step_timeout
    return EpochManager(
        channel, launcher, status, cost, metrics, oldest=oldest, step_seconds=seconds
    )


def _forecaster(deployment: RouterDeployment, learned: Learned, late: LatePlanning) -> Forecaster:
    return forecaster_from(
        deployment.config,
        deployment.budgets(),
        learned.cost,
        late,
        block_size=deployment.info.block_size,
        num_blocks=deployment.capacity.num_blocks - 1,
        traffic=learned.traffic,
    )


def new_engine(  # noqa: PLR0913
    deployment: RouterDeployment,
    channel: StepChannel,
    tokenizer: Tokenizer,
    metrics: Metrics,
    *,
    learned: Learned,
    launcher: LauncherChannel,
    events: EventRecorder | None = None,
    stored: Sequence[StoredBlocks] = (),
) -> Engine:
    """Make an engine over `channel` that adds to `learned`, takes `stored` blocks, and records `events`, if any."""
    config, info, cost = deployment.config, deployment.info, learned.cost
    late, status = late_planning_from(config, cost), ShardStatus(config.recovery_grace)
    depth = config.steps_in_flight
    in_flight = InFlight(channel, late, depth=depth, on_router_seconds=cost.overhead.add_answer)
    waiting = queue_from(config)
    adapters = _adapters(deployment, channel, waiting, metrics)
    recovery = RecoveryPolicy(_planners(deployment, cost, events), learned.quarantine)
    _adopt(recovery, stored, deployment)
    predictor = LatencyPredictor(
        cost,
        _forecaster(deployment, learned, late),
        metrics,
        in_flight=in_flight,
        recovery=recovery,
        waiting=waiting,
        adapters=adapters,
        max_queue_size=config.max_queue_size,
    )
    epochs = _epochs(config, channel, launcher, status, cost, metrics, in_flight)
    batcher = Batcher(
        in_flight,
        epochs,
        recovery,
        waiting=waiting,
        predictor=predictor,
        new_entry=entries_of(
            tokenizer,
            info.eos_token_ids,
            block_size=info.block_size,
            keeps_content=events is not None,
            further_end_ids=tokenizer.end_ids.intersection(range(info.vocab_size))
            - info.eos_token_ids,
        ),
        metrics=BatchMetrics(metrics),
        adapters=adapters,
        images=ImageLoading(channel) if info.vision else None,
    )
    return Engine(batcher, status, learned.quarantine, cost, late, adapters)


def _adopt(
    recovery: RecoveryPolicy, stored: Sequence[StoredBlocks], deployment: RouterDeployment
) -> None:
    """Take the prefix cache of a router that is gone, if the shards have it."""
    if stored and (count := recovery.adopt(stored, kv_mark(deployment))):
        log.info("The prefix cache goes on", blocks=count)


def entries_of(
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    *,
    block_size: int,
    keeps_content: bool = False,
    further_end_ids: frozenset[int] = frozenset(),
) -> Callable[[ValidRequest], Entry]:
    """Return a function that makes entries with the ids 0, 1, 2, …"""
    return partial(
        new_entry,
        count(),
        tokenizer,
        eos_token_ids,
        block_size=block_size,
        keeps_content=keeps_content,
        further_end_ids=further_end_ids,
    )


def _adapters(
    deployment: RouterDeployment, channel: StepChannel, waiting: RequestQueue, metrics: Metrics
) -> AdapterLoading | None:
    """Make the management of adapters for shards that take them."""
    config, modules = deployment.config, deployment.info.adapter_modules
    if not modules:
        return None
    residency = Residency(
        max_adapters=config.max_adapters,
        num_pages=deployment.capacity.adapter_pages,
        cycle_seconds=config.adapter_cycle_time_s,
    )
    admission = AdapterAdmission(
        residency,
        waiting,
        bytes_per_slice={module.name: module.bytes_per_slice for module in modules},
        max_wait_seconds=config.max_queue_wait,
    )
    return AdapterLoading(admission, channel, metrics)


def kv_mark(deployment: RouterDeployment) -> int:
    """Return 32 bits that differ where equal keys of blocks name other KV."""
    info = replace(deployment.info, int8_gain=None)
    what = repr((KEY_FORM, deployment.config.model_id, deployment.config.revision, info))
    return int.from_bytes(sha256(what.encode()).digest()[:4])


def _planners(
    deployment: RouterDeployment, cost: CostModel, events: EventRecorder | None
) -> PlannerFactory:
    budgets, max_draft_tokens = deployment.budgets(), deployment.info.max_draft_tokens
    has_kv_store, drafts, mark = deployment.capacity.has_kv_store, None, kv_mark(deployment)
    capacity, vision = deployment.capacity, deployment.info.vision
    if max_draft_tokens:
        drafts = AdaptiveDraftLength(cost, max_draft_tokens=max_draft_tokens)

    def new_planner(*, blocks: BlockManager | None = None) -> Planner:
        images = None
        if vision is not None:
            rows, slots = capacity.feature_rows, capacity.image_slots
            images = ImageFeatures(rows, slots, vision.num_layers, vision.mask)
        return Planner(budgets, blocks or new_blocks(), cost, drafts, images)

    def new_blocks() -> BlockManager:
        return blocks_from(
            deployment.capacity.num_blocks,
            deployment.info.block_size,
            prefix_caching=deployment.config.prefix_caching == "on",
            new_cache=PrefixCache if events is None else events.new_cache,
            ledger=BlockLedger(new_life(mark)) if has_kv_store else None,
            windows=deployment.capacity.window_groups,
            whole_tokens=whole_tokens(deployment.config, deployment.info),
            state_pages=deployment.capacity.state_pages,
        )

    return new_planner
