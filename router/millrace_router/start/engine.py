"""Assembles the batcher and its parts from the flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from millrace_router.adapters.admission import AdapterAdmission
from millrace_router.adapters.residency import Residency
from millrace_router.config import RouterConfig
from millrace_router.engine.adapter_loading import AdapterLoading
from millrace_router.engine.batch_metrics import BatchMetrics
from millrace_router.engine.batcher import Batcher
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
from millrace_router.request.entry import Entry
from millrace_router.request.request import ValidRequest
from millrace_router.scheduler.draft_length import AdaptiveDraftLength
from millrace_router.scheduler.factory import (
    forecaster_from,
    late_planning_from,
    planner_from,
    queue_from,
)
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.shards.step_channel import StepChannel
from millrace_router.start.shards import RouterDeployment
from millrace_router.telemetry.metrics import Metrics
from millrace_router.text.tokenizer import Tokenizer


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


def _forecaster(deployment: RouterDeployment, cost: CostModel, late: LatePlanning) -> Forecaster:
    return forecaster_from(
        deployment.config,
        deployment.budgets(),
        cost,
        late,
        block_size=deployment.info.block_size,
        num_blocks=deployment.capacity.num_blocks - 1,
    )


def new_engine(
    deployment: RouterDeployment,
    channel: StepChannel,
    tokenizer: Tokenizer,
    metrics: Metrics,
    *,
    cost: CostModel,
    launcher: LauncherChannel,
    events: EventRecorder | None = None,
) -> Engine:
    """Make an engine over `channel` that learns with `cost`, and records its KV-cache events if they are enabled."""
    config, info = deployment.config, deployment.info
    late = late_planning_from(config, cost)
    status, quarantine = ShardStatus(config.recovery_grace), Quarantine()
    in_flight = _in_flight(config, channel, late, cost)
    waiting = queue_from(config)
    adapters = _adapters(deployment, channel, waiting, metrics)
    recovery = RecoveryPolicy(_planners(deployment, cost, events), quarantine)
    predictor = LatencyPredictor(
        cost,
        _forecaster(deployment, cost, late),
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
        ),
        metrics=BatchMetrics(metrics),
        adapters=adapters,
    )
    return Engine(batcher, status, quarantine, cost, late, adapters)


def _in_flight(
    config: RouterConfig, channel: StepChannel, late: LatePlanning, cost: CostModel
) -> InFlight:
    return InFlight(
        channel,
        late,
        depth=config.steps_in_flight,
        on_router_seconds=cost.overhead.add_answer,
    )


def entries_of(
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    *,
    block_size: int,
    keeps_content: bool = False,
) -> Callable[[ValidRequest], Entry]:
    """Return a function that makes entries with the ids 0, 1, 2, …"""
    ids = count()
    return lambda request: Entry(
        next(ids),
        request,
        tokenizer,
        eos_token_ids,
        block_size=block_size,
        keeps_content=keeps_content,
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


def _planners(
    deployment: RouterDeployment, cost: CostModel, events: EventRecorder | None
) -> PlannerFactory:
    budgets, max_draft_tokens = deployment.budgets(), deployment.info.max_draft_tokens
    drafts = None
    if max_draft_tokens:
        drafts = AdaptiveDraftLength(cost, max_draft_tokens=max_draft_tokens)
    return partial(
        planner_from,
        budgets,
        cost,
        num_blocks=deployment.capacity.num_blocks,
        block_size=deployment.info.block_size,
        prefix_caching=deployment.config.prefix_caching == "on",
        drafts=drafts,
        new_cache=PrefixCache if events is None else events.new_cache,
    )
