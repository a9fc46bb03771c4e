"""Connects to the shards and has them allocate their KV cache."""

from __future__ import annotations

import asyncio

import structlog

from millrace_router.checks import StartupError, check_capacity
from millrace_router.config import RouterConfig
from millrace_router.shards.errors import ShardError, ShardHung, ShardLost
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.wire import ShardInfo
from millrace_router.sizing import Deployment, num_slots, prefill_tokens

RETRY_SECONDS = 0.5
INFO_SECONDS = 10.0
"""Wait for the shards to listen, before the log says why they do not answer."""

log = structlog.get_logger(__name__)


async def warm_up(config: RouterConfig, group: ShardGroup) -> Deployment:
    """Wait for the shards and warm them up; starts again if shards are lost meanwhile.

    Raises:
        StartupError: the shards cannot serve as the flags require.

    """
    log.debug("Connecting to the shards", addresses=",".join(config.shard_addresses))
    while True:
        try:
            return await _warm_up(config, group)
        except (ShardLost, ShardHung) as error:
            log.warning("the shards were lost during the warm-up", error=str(error))
            await asyncio.sleep(RETRY_SECONDS)
            await group.reset()


async def _warm_up(config: RouterConfig, group: ShardGroup) -> Deployment:
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
            max_adapters=config.max_adapters if info.adapter_modules else None,
        )
    except (ShardLost, ShardHung):
        raise
    except ShardError as error:
        raise StartupError(f"Unable to warmup the Python model shards: {error}") from error
    log.debug("Setting max batch total tokens to %d", capacity.max_batch_total_tokens)
    check_capacity(config, capacity)
    return Deployment(config=config, info=info, capacity=capacity)


async def _info(group: ShardGroup) -> ShardInfo:
    """Wait until the shards listen, which they do once the weights are loaded. Raises ShardError."""
    while True:
        try:
            return await group.info(timeout=INFO_SECONDS)
        except ShardHung:
            await _log_reason(group)


async def _log_reason(group: ShardGroup) -> None:
    """Log why the shards do not answer: gRPC waits silently for a shard with a wrong certificate, for example."""
    try:
        await group.health()
    except ShardError as error:
        log.warning("Waiting for the shards", error=str(error))
