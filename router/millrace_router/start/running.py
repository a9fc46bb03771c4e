"""Starts the router, except for its HTTP port: model files, shards, engine, services."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from millrace_router.access.keys import ApiKeys, KeyFileError
from millrace_router.adapters.resolver import Resolver
from millrace_router.config import RouterConfig
from millrace_router.engine.batcher import Batcher
from millrace_router.engine.calibration import calibrate
from millrace_router.engine.health import Health
from millrace_router.engine.infer import Infer
from millrace_router.images.prompts import NO_IMAGES, ImagePrompts
from millrace_router.journal.frames import JournalError
from millrace_router.journal.journal import Journal
from millrace_router.pooling.model import GENERATES, PoolingModel
from millrace_router.prediction.cost import CostModel
from millrace_router.reasoning.formats import reasoning_of_model
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.scheduler.block_ledger import StoredBlocks
from millrace_router.server.services import Services
from millrace_router.shards.channels import TlsError, is_exposed, tls_from
from millrace_router.shards.errors import ShardError
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.start.adapters import OpenAdapters, open_adapters
from millrace_router.start.engine import Engine, new_engine
from millrace_router.start.files import (
    StartFiles,
    open_files,
    tool_format,
    with_model_folder,
)
from millrace_router.start.images import open_images, with_image_bodies
from millrace_router.start.journal import record_steps
from millrace_router.start.learned import Learned, Memory
from millrace_router.start.shards import (
    RouterDeployment,
    StartupError,
    batch_size,
    check_arguments,
    check_head,
    warm_up,
)
from millrace_router.start.traces import (
    KvEvents,
    check_kv_events,
    check_traces,
    open_kv_events,
    open_traces,
)
from millrace_router.telemetry.metrics import Metrics
from millrace_router.telemetry.request_log import RequestFile, RequestLog
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.model_files import ModelFilesError
from millrace_router.text.tokenizer import Tokenizer, TokenizerError
from millrace_router.validation.grammar_admission import GrammarAdmission
from millrace_router.validation.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from millrace_router.validation.validator import Validator

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The running parts, in the order in which they stop: the batcher, the handlers, the channels to the shards."""

    services: Services
    batcher: Batcher
    batcher_task: asyncio.Task[None]
    channel: StepChannel
    launcher: LauncherChannel
    launcher_task: asyncio.Task[None]
    journal: Journal | None
    adapters: OpenAdapters | None
    kv_events: KvEvents | None
    memory: Memory
    memory_task: asyncio.Task[None]

    async def stop_batcher(self) -> None:
        """Stop the batcher, which ends every open stream."""
        self.batcher_task.cancel()
        with suppress(asyncio.CancelledError):
            await self.batcher_task

    async def close(self) -> None:
        """Close files and channels; the shards keep their weights."""
        self.launcher_task.cancel()
        self.memory_task.cancel()
        # It writes a last time.
        await asyncio.wait({self.memory_task})
        if self.adapters is not None:
            await self.adapters.fetcher.close()
        if self.journal is not None:
            await self.journal.close()
        await self.channel.close()
        if self.kv_events is not None:
            self.kv_events.close()
        self.services.tokenizer.close()
        await self.services.images.close()
        if self.services.request_log is not None:
            await asyncio.to_thread(self.services.request_log.close)
        if self.services.traces is not None:
            await self.services.traces.sink.close()


async def start(config: RouterConfig, keys: ApiKeys | None = None) -> Running:
    """Start everything except the HTTP port, with `keys` or else the keys of the flags; raises StartupError."""
    stages = _Stages()
    config, keys, files, channel = _opened(config, keys)
    launcher = _launcher(config, channel.group)
    launcher_task = asyncio.create_task(launcher.run())
    try:
        deployment = await _deployment(config, channel.group, launcher, stages)
        check_head(files.pooling.tasks, deployment.info)
        metrics = metrics_of(deployment)
        images = open_images(deployment, files.tokenizer, metrics)
        adapters = await open_adapters(deployment, metrics)
        kv_events = open_kv_events(config, block_size=deployment.info.block_size)
    except StartupError:
        launcher_task.cancel()
        await channel.close()
        raise
    engine, memory, memory_task = await _measured_engine(
        deployment, channel, files.tokenizer, metrics, launcher=launcher, kv_events=kv_events
    )
    log.info("Started", **stages.done("measuring"))
    services = services_of(
        deployment,
        engine,
        channel.group,
        metrics,
        tokenizer=files.tokenizer,
        template=files.template,
        keys=keys,
        defaults=files.defaults,
        pooling=files.pooling,
        request_file=files.requests,
        images=images,
        adapters=None if adapters is None else adapters.resolver,
    )
    if adapters is not None:
        adapters.in_use = services.infer.adapters_in_use
    return Running(
        services=services,
        batcher=engine.batcher,
        batcher_task=asyncio.create_task(engine.batcher.run()),
        channel=channel,
        launcher=launcher,
        launcher_task=launcher_task,
        journal=record_steps(files.journal, services, channel),
        adapters=adapters,
        kv_events=kv_events,
        memory=memory,
        memory_task=memory_task,
    )


def _opened(
    config: RouterConfig, keys: ApiKeys | None
) -> tuple[RouterConfig, ApiKeys, StartFiles, StepChannel]:
    """Check the flags, and read and open what they name; raises StartupError."""
    _check(config)
    try:
        keys = keys or ApiKeys.of(config)
        config = with_model_folder(config)
        return config, keys, open_files(config), StepChannel(_group(config))
    except (ModelFilesError, TokenizerError, TlsError, JournalError, KeyFileError) as error:
        raise StartupError(str(error)) from error


class _Stages:
    """The seconds of each part of the start."""

    def __init__(self) -> None:
        self._seconds = dict[str, float]()
        self._since = time.monotonic()

    def done(self, name: str) -> dict[str, float]:
        """The part `name` ends now; it began with the end of the last one. Returns all so far."""
        now = time.monotonic()
        self._seconds[f"{name}_seconds"], self._since = round(now - self._since, 2), now
        return self._seconds


async def _deployment(
    config: RouterConfig, group: ShardGroup, launcher: LauncherChannel, stages: _Stages
) -> RouterDeployment:
    """Wait for the shards and warm them up; raises StartupError."""
    stages.done("files")
    launcher.opened()
    await launcher.shards_ready()
    stages.done("shards")
    deployment = with_image_bodies(await warm_up(config, group, launcher.restart_shards))
    stages.done("warm_up")
    return deployment


async def _measured_engine(
    deployment: RouterDeployment,
    channel: StepChannel,
    tokenizer: Tokenizer,
    metrics: Metrics,
    *,
    launcher: LauncherChannel,
    kv_events: KvEvents | None,
) -> tuple[Engine, Memory, asyncio.Task[None]]:
    """Make the engine, which knows what the last router has learned, and the task that keeps what it learns."""
    memory = Memory(deployment, launcher)
    learned = memory.recall()
    stored = await _stored_blocks(deployment, channel.group, launcher)
    if not stored:
        await measure_steps(deployment, channel, tokenizer, cost=learned.cost, launcher=launcher)
    events = None if kv_events is None else kv_events.recorder
    engine = new_engine(
        deployment,
        channel,
        tokenizer,
        metrics,
        learned=learned,
        launcher=launcher,
        events=events,
        stored=stored,
    )
    return engine, memory, asyncio.create_task(memory.run(learned))


async def _stored_blocks(
    deployment: RouterDeployment, group: ShardGroup, launcher: LauncherChannel
) -> list[StoredBlocks]:
    """Return the directories of the shards, if there are any and their KV may be used; steps to measure overwrite it.

    Blocks whose tokens are unknown are of no use where they are published, or written down for a replay.
    """
    config = deployment.config
    is_written_down = config.kv_events is not None or config.journal is not None
    if not launcher.trusts_kv or is_written_down or config.prefix_caching == "off":
        return []
    try:
        stored = await group.stored_blocks()
    except ShardError as error:
        log.debug("the blocks of the shards are unknown", error=str(error))
        return []
    return stored if any(rank.blocks for rank in stored) else []


def _check(config: RouterConfig) -> None:
    """Check the flags; raises StartupError."""
    check_arguments(config)
    check_traces(config)
    check_kv_events(config)


def _launcher(config: RouterConfig, group: ShardGroup) -> LauncherChannel:
    """Follow the shards from now on; other events before there is an engine concern a wait that goes on anyway."""
    launcher = LauncherChannel(config.supervisor_fd)
    launcher.on_moved = group.move
    return launcher


def _group(config: RouterConfig) -> ShardGroup:
    """Connect to the shards that the flags name. Raises TlsError."""
    tls = tls_from(config)
    for address in config.shard_addresses:
        if is_exposed(address, tls):
            log.warning("Prompts go to the shard without TLS", address=address)
    return ShardGroup(config.shard_addresses, tls, silence_seconds=config.step_timeout)


async def measure_steps(
    deployment: RouterDeployment,
    channel: StepChannel,
    tokenizer: Tokenizer,
    *,
    cost: CostModel,
    launcher: LauncherChannel,
) -> None:
    """Measure the costs of steps with a separate engine, which leaves metrics, cache and queue as they are.

    Costs that are known already are not measured.
    """
    if cost.is_known:
        return
    # An outage must not delay the port: clients should see the state of the server.
    quiet = {
        "fairness": "none",
        "max_queue_size": None,
        "max_queue_wait": None,
        "recovery_grace": 0.0,
    }
    deployment = replace(deployment, config=deployment.config.model_copy(update=quiet))
    engine = new_engine(
        deployment,
        channel,
        tokenizer,
        metrics_of(deployment),
        learned=Learned(cost),
        launcher=launcher,
    )
    log.info("Measuring steps")
    await calibrate(
        engine.batcher, deployment.limits(), max_batch_size=batch_size(deployment.config)
    )


def metrics_of(deployment: RouterDeployment) -> Metrics:
    """Make the metrics, with histograms up to the limits of a request, and set what is known before the first one."""
    capacity = deployment.capacity
    metrics = Metrics(
        max_input_tokens=capacity.max_input_tokens, max_total_tokens=capacity.max_total_tokens
    )
    num_blocks = capacity.num_blocks - 1
    metrics.batch_max_total_tokens.set(capacity.max_batch_total_tokens)
    metrics.kv_blocks.set(num_blocks)
    metrics.kv_window_blocks.set(sum(each.num_blocks - 1 for each in capacity.window_groups))
    labels = {"block_size": str(deployment.info.block_size), "num_gpu_blocks": str(num_blocks)}
    metrics.cache_config_info.labels(**labels).set(1)
    metrics.show_recoveries()
    return metrics


def services_of(  # noqa: PLR0913
    deployment: RouterDeployment,
    engine: Engine,
    group: ShardGroup,
    metrics: Metrics,
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    keys: ApiKeys,
    defaults: SamplingDefaults = NO_DEFAULTS,
    pooling: PoolingModel = GENERATES,
    request_file: RequestFile | None = None,
    images: ImagePrompts = NO_IMAGES,
    adapters: Resolver | None = None,
) -> Services:
    """Assemble the services of the HTTP routes."""
    config, health = deployment.config, Health(engine.status, engine.batcher)
    grammars = GrammarAdmission(group, engine.status, metrics)
    validator = Validator(tokenizer, deployment.limits(pooling.tasks), metrics, grammars, defaults)
    return Services(
        config=config,
        shard=deployment.info,
        capacity=deployment.capacity,
        limits=validator.limits,
        max_batch_prefill_tokens=deployment.budgets().max_batch_prefill_tokens,
        tokenizer=tokenizer,
        template=template,
        tool_format=tool_format(config, template, tokenizer),
        reasoning=reasoning_of_model(config, template.source, tokenizer),
        pooling=pooling,
        validator=validator,
        infer=_infer_of(config, engine, validator, metrics, health=health, adapters=adapters),
        metrics=metrics,
        health=health,
        quarantine=engine.quarantine,
        keys=keys,
        images=images,
        adapters=adapters,
        request_log=None
        if request_file is None
        else RequestLog(request_file, metrics.request_log_dropped_lines),
        traces=open_traces(config, engine.status),
        cost=engine.cost,
        late=engine.late,
        loading=engine.adapters,
        compute_type=deployment.compute_type,
    )


def _infer_of(
    config: RouterConfig,
    engine: Engine,
    validator: Validator,
    metrics: Metrics,
    *,
    health: Health,
    adapters: Resolver | None,
) -> Infer:
    return Infer(
        engine.batcher,
        validator,
        metrics,
        adapters=adapters,
        by_adapter=config.fairness == "adapter",
        by_tenant=config.fairness == "tenant",
        on_failure=health.failed,
        on_token=health.generated,
        on_entry=engine.cost.overhead.add_entry,
    )
