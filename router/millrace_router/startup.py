"""From flags to something that can serve: read the model folder, reach the shards, warm them up, check, assemble."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass

import structlog

from millrace_router.batcher import Batcher
from millrace_router.budgets import Budgets
from millrace_router.calibration import calibrate
from millrace_router.config import RouterConfig
from millrace_router.cost import CostModel
from millrace_router.health import Health
from millrace_router.infer import Infer
from millrace_router.limits import Limits
from millrace_router.metrics import Metrics
from millrace_router.model_files import ModelFiles, ModelFilesError
from millrace_router.policies import DEFAULT_PREFILL_TOKENS, budgets_from, spare_slots
from millrace_router.scheduling import batcher_from
from millrace_router.services import Services
from millrace_router.shard_client import ShardedClient, ShardError
from millrace_router.template import ChatTemplate
from millrace_router.tokenizer import Tokenizer, TokenizerError
from millrace_router.validation import Validator
from millrace_router.wire import Capacity, ShardInfo

log = structlog.get_logger(__name__)


class StartupError(Exception):
    """The server cannot start; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What has to be stopped in the end: the batcher first, then the handlers, then the shards' channels."""

    services: Services
    batcher_task: asyncio.Task[None]
    shards: ShardedClient

    async def stop_batcher(self) -> None:
        """End the batcher, and with it every stream that is still open."""
        self.batcher_task.cancel()
        with suppress(asyncio.CancelledError):
            await self.batcher_task

    async def close(self) -> None:
        """Let the shards go; they keep their weights."""
        await self.shards.close()
        self.services.tokenizer.close()


async def start(config: RouterConfig) -> Running:
    """Bring everything up but the HTTP listener; raises StartupError."""
    check_arguments(config)
    try:
        files = ModelFiles.load(
            config.model_folder, tokenizer_config_path=config.tokenizer_config_path
        )
        tokenizer = Tokenizer.load(
            config.model_folder, validation_workers=config.validation_workers
        )
    except (ModelFilesError, TokenizerError) as error:
        raise StartupError(str(error)) from error
    shards = ShardedClient(config.shard_addresses)
    try:
        info, capacity = await warm_up(config, shards)
        check_capacity(config, capacity)
    except StartupError:
        await shards.close()
        raise
    cost = CostModel()
    await _calibrate(config, shards, info, capacity, tokenizer=tokenizer, cost=cost)
    services, batcher = assemble(
        config,
        shards=shards,
        info=info,
        capacity=capacity,
        tokenizer=tokenizer,
        template=ChatTemplate.of(files),
        cost=cost,
    )
    return Running(
        services=services, batcher_task=asyncio.create_task(batcher.run()), shards=shards
    )


def check_arguments(config: RouterConfig) -> None:
    """Check what needs no model; raises StartupError."""
    if config.validation_workers < 1:
        raise _argument_error("`validation_workers` must be > 0")
    if config.max_batch_size is not None and config.max_batch_size < 1:
        raise _argument_error("`max_batch_size` must be > 0")
    if config.ngrok:
        raise _argument_error("`ngrok` is not supported")
    if config.max_input_tokens is not None and config.max_total_tokens is not None:
        _check_lengths(config.max_input_tokens, config.max_total_tokens)


def check_capacity(config: RouterConfig, capacity: Capacity) -> None:
    """Check the limits against what the shards have room for; raises StartupError."""
    _check_lengths(capacity.max_input_tokens, capacity.max_total_tokens)
    prefill, available = config.max_batch_prefill_tokens, capacity.max_batch_total_tokens
    if prefill is not None and prefill > available:
        raise _argument_error(
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {prefill} and {available}"
        )
    if capacity.max_total_tokens > available:
        raise _argument_error(
            "`max_total_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {capacity.max_total_tokens} and {available}"
        )
    if config.prefill_chunking == "off":
        _check_prompts_fit(
            prefill or min(DEFAULT_PREFILL_TOKENS, available), capacity.max_input_tokens
        )


def _check_prompts_fit(prefill: int, max_input_tokens: int) -> None:
    if prefill < max_input_tokens:
        raise _argument_error(
            "`max_batch_prefill_tokens` must be >= `max_input_tokens`. "
            f"Given: {prefill} and {max_input_tokens}"
        )


def _check_lengths(max_input_tokens: int, max_total_tokens: int) -> None:
    if max_input_tokens >= max_total_tokens:
        raise _argument_error("`max_input_tokens` must be < `max_total_tokens`")


def _argument_error(message: str) -> StartupError:
    return StartupError(f"Argument validation error: {message}")


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


async def warm_up(config: RouterConfig, shards: ShardedClient) -> tuple[ShardInfo, Capacity]:
    """Learn what the shards have loaded, and have them make room; raises StartupError."""
    log.info("Connecting to the shards", addresses=",".join(config.shard_addresses))
    try:
        info = await shards.info()
    except ShardError as error:
        raise StartupError(f"Unable to get the Python model shards info: {error}") from error
    log.info("Warming up model")
    try:
        capacity = await shards.warmup(
            max_batch_prefill_tokens=prefill_tokens(config, info),
            max_batch_size=num_slots(config),
            max_concurrent_requests=config.max_concurrent_requests,
            max_input_tokens=config.max_input_tokens,
            max_total_tokens=config.max_total_tokens,
            max_batch_total_tokens=config.max_batch_total_tokens,
        )
    except ShardError as error:
        raise StartupError(f"Unable to warmup the Python model shards: {error}") from error
    log.info("Setting max batch total tokens to %d", capacity.max_batch_total_tokens)
    return info, capacity


def batch_size(config: RouterConfig) -> int:
    """Sequences that may run together: as many as are accepted, unless the flag says fewer."""
    return config.max_batch_size or config.max_concurrent_requests


def num_slots(config: RouterConfig) -> int:
    """Slots the shards have to have: spare ones too."""
    return batch_size(config) + spare_slots(batch_size(config))


async def _calibrate(
    config: RouterConfig,
    shards: ShardedClient,
    info: ShardInfo,
    capacity: Capacity,
    *,
    tokenizer: Tokenizer,
    cost: CostModel,
) -> None:
    """Have `cost` learn from a batcher of its own, which leaves no trace in metrics, cache or queue."""
    limits = limits_from(config, info, capacity)
    quiet = config.model_copy(
        update={"fairness": "none", "max_queue_size": None, "max_queue_wait": None}
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
    )
    log.info("Measuring steps")
    await calibrate(batcher, limits, max_batch_size=batch_size(config))


def _budgets(config: RouterConfig, info: ShardInfo, capacity: Capacity) -> Budgets:
    return budgets_from(
        config,
        prefill_tokens=prefill_tokens(config, info, capacity),
        batch_size=batch_size(config),
    )


def _metrics(limits: Limits) -> Metrics:
    return Metrics(
        max_input_tokens=limits.max_input_tokens, max_total_tokens=limits.max_total_tokens
    )


def assemble(
    config: RouterConfig,
    *,
    shards: ShardedClient,
    info: ShardInfo,
    capacity: Capacity,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    cost: CostModel | None = None,
) -> tuple[Services, Batcher]:
    """Put the parts together, `cost` being what is known of steps; the batcher is not running yet."""
    limits = limits_from(config, info, capacity)
    metrics = _metrics(limits)
    metrics.batch_max_total_tokens.set(capacity.max_batch_total_tokens)
    metrics.kv_blocks.set(capacity.num_blocks - 1)
    budgets = _budgets(config, info, capacity)
    cost = cost or CostModel()
    batcher = batcher_from(
        config,
        budgets,
        shards=shards,
        info=info,
        capacity=capacity,
        tokenizer=tokenizer,
        metrics=metrics,
        cost=cost,
    )
    health = Health(shards, batcher)
    validator = Validator(tokenizer, limits, metrics)
    services = Services(
        config=config,
        shard=info,
        capacity=capacity,
        limits=limits,
        max_batch_prefill_tokens=budgets.max_batch_prefill_tokens,
        tokenizer=tokenizer,
        template=template,
        validator=validator,
        infer=Infer(
            batcher,
            validator,
            metrics,
            on_failure=health.failed,
            on_token=health.generated,
        ),
        metrics=metrics,
        health=health,
        cost=cost,
        compute_type=os.environ.get("COMPUTE_TYPE", "gpu+optimized"),
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
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=config.max_top_n_tokens,
        max_client_batch_size=config.max_client_batch_size,
        prefill_logprobs=info.prefill_logprobs,
    )
