"""From flags to something that can serve: read the model folder, reach the shards, warm them up, check, assemble."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from millrace_router.batcher_factory import batcher_from
from millrace_router.checks import StartupError, check_arguments, check_capacity
from millrace_router.config import RouterConfig
from millrace_router.engine.batcher import Batcher
from millrace_router.engine.calibration import calibrate
from millrace_router.engine.health import Health
from millrace_router.engine.infer import Infer
from millrace_router.journal.errors import JournalError
from millrace_router.journal.journal import Journal
from millrace_router.journal_start import journal_folder, open_journal
from millrace_router.prediction.cost import CostModel
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.request.dialect import dialect_of
from millrace_router.request.limits import Limits
from millrace_router.scheduler.budgets import Budgets
from millrace_router.scheduler.factory import (
    DEFAULT_PREFILL_TOKENS,
    budgets_from,
    late_planning_from,
    spare_slots,
)
from millrace_router.server.services import Services
from millrace_router.shards.channels import TlsError, is_exposed, tls_from
from millrace_router.shards.errors import ShardError, ShardHung, ShardLost
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.shards.wire import Capacity, ShardInfo
from millrace_router.telemetry.metrics import Metrics
from millrace_router.telemetry.request_file import RequestFile
from millrace_router.telemetry.request_log import RequestLog
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.hub_cache import find_snapshot
from millrace_router.text.model_files import ModelFiles, ModelFilesError
from millrace_router.text.tokenizer import Tokenizer, TokenizerError
from millrace_router.tool_calls.formats import format_of
from millrace_router.validation.grammar_admission import GrammarAdmission
from millrace_router.validation.validator import Validator

RETRY_SECONDS = 0.5
PATIENCE_SECONDS = 10.0
"""How long shards are waited for before the log says what keeps them."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What has to be stopped in the end: the batcher first, then the handlers, then the shards' channels."""

    services: Services
    batcher_task: asyncio.Task[None]
    shards: StepChannel
    launcher: LauncherChannel
    supervisor_task: asyncio.Task[None]
    journal: Journal | None

    async def stop_batcher(self) -> None:
        """End the batcher, and with it every stream that is still open."""
        self.batcher_task.cancel()
        with suppress(asyncio.CancelledError):
            await self.batcher_task

    async def close(self) -> None:
        """Let the shards go; they keep their weights."""
        self.supervisor_task.cancel()
        if self.journal is not None:
            await self.journal.close()
        await self.shards.close()
        self.services.tokenizer.close()
        if self.services.request_log is not None:
            await asyncio.to_thread(self.services.request_log.close)


async def start(config: RouterConfig) -> Running:
    """Bring everything up but the HTTP listener; raises StartupError."""
    check_arguments(config)
    try:
        config = _with_model_folder(config)
        files = ModelFiles.load(
            config.model_folder, tokenizer_config_path=config.tokenizer_config_path
        )
        tokenizer = Tokenizer.load(
            config.model_folder, validation_workers=config.validation_workers
        )
        tls = tls_from(config)
        folder = journal_folder(config)
        request_file = _request_file(config)
    except (ModelFilesError, TokenizerError, TlsError, JournalError) as error:
        raise StartupError(str(error)) from error
    for address in config.shard_addresses:
        if is_exposed(address, tls):
            log.warning("Prompts go to the shard without TLS", address=address)
    group = ShardGroup(config.shard_addresses, tls, silence_seconds=config.step_timeout)
    shards = StepChannel(group)
    try:
        info, capacity = await warm_up(config, group)
        check_capacity(config, capacity)
    except StartupError:
        await shards.close()
        raise
    cost, supervisor = CostModel(), LauncherChannel(config.supervisor_fd)
    supervisor_task = asyncio.create_task(supervisor.run())
    await _calibrate(
        config, shards, info, capacity, tokenizer=tokenizer, cost=cost, supervisor=supervisor
    )
    services, batcher = assemble(
        config,
        shards=shards,
        info=info,
        capacity=capacity,
        tokenizer=tokenizer,
        template=ChatTemplate.of(files),
        cost=cost,
        supervisor=supervisor,
        request_file=request_file,
    )
    journal = None
    if folder is not None:
        journal = open_journal(folder, config, services, group.warmup_fields)
        shards.observer = journal
    return Running(
        services=services,
        batcher_task=asyncio.create_task(batcher.run()),
        journal=journal,
        shards=shards,
        launcher=supervisor,
        supervisor_task=supervisor_task,
    )


def _with_model_folder(config: RouterConfig) -> RouterConfig:
    """Look up a --tokenizer-name that is no folder in the hub's cache. Raises ModelFilesError."""
    name = config.tokenizer_name
    if name is None or Path(name) != config.model_folder or config.model_folder.is_dir():
        return config
    folder = find_snapshot(name, revision=config.revision, cache=config.hub_cache)
    return config.model_copy(update={"model_folder": folder, "revision": folder.name})


def _request_file(config: RouterConfig) -> RequestFile | None:
    """Open the file that requests are logged to, if one is asked for; raises StartupError."""
    if config.log_requests is None:
        return None
    try:
        return RequestFile(config.log_requests, max_bytes=config.log_requests_max_bytes)
    except OSError as error:
        raise StartupError(f"cannot write --log-requests: {error}") from error


def prefill_tokens(config: RouterConfig, info: ShardInfo, capacity: Capacity | None = None) -> int:
    """Prompt tokens of one step: what was asked for, or the default as far as there is room, once that is known."""
    if config.max_batch_prefill_tokens is not None:
        return config.max_batch_prefill_tokens
    room = capacity.max_batch_total_tokens if capacity else config.max_batch_total_tokens
    return min(
        DEFAULT_PREFILL_TOKENS,
        info.max_position_embeddings or DEFAULT_PREFILL_TOKENS,
        room or DEFAULT_PREFILL_TOKENS,
    )


async def warm_up(config: RouterConfig, group: ShardGroup) -> tuple[ShardInfo, Capacity]:
    """Learn what the shards have loaded, and have them make room; shards that die meanwhile are waited for.

    Raises:
        StartupError: they cannot serve what the flags ask for.

    """
    log.info("Connecting to the shards", addresses=",".join(config.shard_addresses))
    while True:
        try:
            return await _warm_up(config, group)
        except (ShardLost, ShardHung) as error:
            log.warning("the shards went away while warming up", error=str(error))
            await asyncio.sleep(RETRY_SECONDS)
            await group.reset()


async def _warm_up(config: RouterConfig, group: ShardGroup) -> tuple[ShardInfo, Capacity]:
    try:
        info = await _info(group)
    except (ShardLost, ShardHung):
        raise
    except ShardError as error:
        raise StartupError(f"Unable to get the Python model shards info: {error}") from error
    log.info("Warming up model")
    try:
        capacity = await group.warm_up(
            max_batch_prefill_tokens=prefill_tokens(config, info),
            max_batch_size=num_slots(config),
            max_concurrent_requests=config.max_concurrent_requests,
            max_input_tokens=config.max_input_tokens,
            max_total_tokens=config.max_total_tokens,
            max_batch_total_tokens=config.max_batch_total_tokens,
        )
    except (ShardLost, ShardHung):
        raise
    except ShardError as error:
        raise StartupError(f"Unable to warmup the Python model shards: {error}") from error
    log.info("Setting max batch total tokens to %d", capacity.max_batch_total_tokens)
    return info, capacity


async def _info(group: ShardGroup) -> ShardInfo:
    """Wait for the shards to listen, which takes as long as loading; raises ShardError."""
    while True:
        try:
            return await group.info(timeout=PATIENCE_SECONDS)
        except ShardHung:
            await _say_why(group)


async def _say_why(group: ShardGroup) -> None:
    """Log what keeps shards from answering: wrong papers for TLS, for one, would be waited out in silence."""
    try:
        await group.health()
    except ShardError as error:
        log.warning("Waiting for the shards", error=str(error))


def batch_size(config: RouterConfig) -> int:
    """Sequences that may run together: as many as are accepted, unless the flag says fewer."""
    return config.max_batch_size or config.max_concurrent_requests


def num_slots(config: RouterConfig) -> int:
    """Slots the shards have to have: spare ones too."""
    return batch_size(config) + spare_slots(batch_size(config))


async def _calibrate(
    config: RouterConfig,
    shards: StepChannel,
    info: ShardInfo,
    capacity: Capacity,
    *,
    tokenizer: Tokenizer,
    cost: CostModel,
    supervisor: LauncherChannel,
) -> None:
    """Have `cost` learn from a batcher of its own, which leaves no trace in metrics, cache or queue."""
    limits = limits_from(config, info, capacity)
    # Shards that go meanwhile are waited for while clients can see it.
    quiet = config.model_copy(
        update={
            "fairness": "none",
            "max_queue_size": None,
            "max_queue_wait": None,
            "recovery_grace": 0.0,
        }
    )
    batcher = batcher_from(
        quiet,
        _budgets(config, info, capacity),
        shards=shards,
        info=info,
        capacity=capacity,
        tokenizer=tokenizer,
        metrics=_metrics(limits),
        cost=cost,
        late=late_planning_from(quiet, cost),
        supervisor=supervisor,
    )
    log.info("Measuring steps")
    await calibrate(batcher, limits, max_batch_size=batch_size(config))


def _budgets(config: RouterConfig, info: ShardInfo, capacity: Capacity) -> Budgets:
    return budgets_from(
        config,
        prefill_tokens=prefill_tokens(config, info, capacity),
        batch_size=batch_size(config),
        max_draft_tokens=info.max_draft_tokens,
    )


def _metrics(limits: Limits) -> Metrics:
    return Metrics(
        max_input_tokens=limits.max_input_tokens, max_total_tokens=limits.max_total_tokens
    )


def assemble(  # noqa: PLR0913
    config: RouterConfig,
    *,
    shards: StepChannel,
    info: ShardInfo,
    capacity: Capacity,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    cost: CostModel | None = None,
    supervisor: LauncherChannel | None = None,
    request_file: RequestFile | None = None,
) -> tuple[Services, Batcher]:
    """Put the parts together, `cost` being what is known of steps; the batcher is not running yet."""
    limits = limits_from(config, info, capacity)
    metrics = _metrics(limits)
    metrics.batch_max_total_tokens.set(capacity.max_batch_total_tokens)
    metrics.kv_blocks.set(capacity.num_blocks - 1)
    budgets = _budgets(config, info, capacity)
    cost = cost or CostModel()
    late = late_planning_from(config, cost)
    batcher = batcher_from(
        config,
        budgets,
        shards=shards,
        info=info,
        capacity=capacity,
        tokenizer=tokenizer,
        metrics=metrics,
        cost=cost,
        late=late,
        supervisor=supervisor or LauncherChannel(None),
    )
    metrics.show_recoveries()
    health = Health(batcher.recovery, batcher, grace_seconds=config.recovery_grace)
    grammars = GrammarAdmission(
        shards.group, batcher.recovery, metrics, grace_seconds=config.recovery_grace
    )
    validator = Validator(tokenizer, limits, metrics, grammars)
    services = Services(
        config=config,
        shard=info,
        capacity=capacity,
        limits=limits,
        max_batch_prefill_tokens=budgets.max_batch_prefill_tokens,
        tokenizer=tokenizer,
        template=template,
        tool_format=format_of(
            template.tool_source, config.tool_call_parser, special_ids=tokenizer.special_ids
        ),
        validator=validator,
        infer=Infer(
            batcher,
            validator,
            metrics,
            on_failure=health.failed,
            on_token=health.generated,
            on_entry=cost.overhead.add_entry,
        ),
        metrics=metrics,
        health=health,
        quarantine=batcher.quarantine,
        request_log=(
            RequestLog(request_file, metrics.request_log_dropped_lines) if request_file else None
        ),
        cost=cost,
        late=late,
        compute_type=config.compute_type,
    )
    return services, batcher


def limits_from(config: RouterConfig, info: ShardInfo, capacity: Capacity) -> Limits:
    """Resolve what one request may ask for."""
    return Limits(
        max_input_tokens=capacity.max_input_tokens,
        max_total_tokens=capacity.max_total_tokens,
        vocab_size=info.vocab_size,
        max_concurrent_requests=config.max_concurrent_requests,
        max_best_of=config.max_best_of,
        # Every choice takes a permit, so more could never be had.
        max_n=min(config.max_n, config.max_concurrent_requests),
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=config.max_top_n_tokens,
        max_client_batch_size=config.max_client_batch_size,
        prefill_logprobs=info.prefill_logprobs,
        grammars=info.grammars and not config.disable_grammar_support,
        dialect=dialect_of(strict_tgi=config.strict_tgi),
    )
