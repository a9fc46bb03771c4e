"""From flags to something that can serve: read the model folder, reach the shards, warm them up, check, assemble."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog

from millrace_router.batcher import Batcher
from millrace_router.blocks import BlockTable
from millrace_router.config import RouterConfig
from millrace_router.health import Health
from millrace_router.infer import Infer
from millrace_router.limits import Limits
from millrace_router.metrics import Metrics
from millrace_router.model_files import ModelFiles, ModelFilesError
from millrace_router.planner import Budgets, Planner
from millrace_router.services import Services
from millrace_router.shard_client import ShardedClient, ShardError
from millrace_router.template import ChatTemplate
from millrace_router.tokenizer import Tokenizer, TokenizerError
from millrace_router.validation import Validator
from millrace_router.wire import Capacity, ShardInfo

DEFAULT_PREFILL_TOKENS = 4096

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
    services, batcher = assemble(
        config,
        shards=shards,
        info=info,
        capacity=capacity,
        tokenizer=tokenizer,
        template=ChatTemplate.of(files),
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
            max_batch_size=batch_size(config),
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


def assemble(
    config: RouterConfig,
    *,
    shards: ShardedClient,
    info: ShardInfo,
    capacity: Capacity,
    tokenizer: Tokenizer,
    template: ChatTemplate,
) -> tuple[Services, Batcher]:
    """Put the parts together; the batcher is not running yet."""
    limits = limits_from(config, info, capacity)
    metrics = Metrics(
        max_input_tokens=limits.max_input_tokens, max_total_tokens=limits.max_total_tokens
    )
    metrics.batch_max_total_tokens.set(capacity.max_batch_total_tokens)
    metrics.kv_blocks.set(capacity.num_blocks - 1)
    budgets = Budgets(
        max_batch_prefill_tokens=prefill_tokens(config, info, capacity),
        max_batch_size=batch_size(config),
    )
    batcher = Batcher(
        shards=shards,
        new_planner=partial(_new_planner, budgets, capacity.num_blocks, info.block_size),
        tokenizer=tokenizer,
        eos_token_ids=info.eos_token_ids,
        metrics=metrics,
        depth=config.steps_in_flight,
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


def _new_planner(budgets: Budgets, num_blocks: int, block_size: int) -> Planner:
    return Planner(budgets, BlockTable(num_blocks, block_size))
