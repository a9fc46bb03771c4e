"""Checks the flags, warms up the shards, and resolves the sizes that flags leave open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson
import structlog

from millrace_proto.small_files import read_small_file
from millrace_router.config import RouterConfig
from millrace_router.request.images import Mask
from millrace_router.request.limits import Limits, dialect_of
from millrace_router.request.request import Task
from millrace_router.scheduler.factory import DEFAULT_PREFILL_TOKENS, budgets_from, spare_slots
from millrace_router.scheduler.step_plan import Budgets
from millrace_router.shards.errors import ShardError, ShardHung, ShardLost
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.wire import Capacity, ShardInfo

TGI_COMPUTE_TYPE = "gpu+optimized"
"""The device that TGI's router reports, unless its launcher found a GPU."""
RETRY_SECONDS = 0.5
INFO_SECONDS = 10.0
"""Seconds for the shards to listen, before the log reports why they do not answer."""
log = structlog.get_logger(__name__)


class StartupError(Exception):
    """The server cannot start; the message names what to change."""


def check_arguments(config: RouterConfig) -> None:
    """Check the flags, without the model's files; raises StartupError."""
    if config.validation_workers < 1:
        raise _argument_error("`validation_workers` must be > 0")
    if config.max_batch_size is not None and config.max_batch_size < 1:
        raise _argument_error("`max_batch_size` must be > 0")
    if config.ngrok:
        raise _argument_error("`ngrok` is not supported")
    if config.max_input_tokens is not None and config.max_total_tokens is not None:
        _check_lengths(config.max_input_tokens, config.max_total_tokens)


def check_capacity(config: RouterConfig, capacity: Capacity) -> None:
    """Check the flags against the capacity of the shards; raises StartupError."""
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


def check_head(tasks: frozenset[Task], shard: ShardInfo) -> None:
    """Check that the checkpoint has an output head if a task needs one; raises StartupError."""
    if shard.headless and tasks != {Task.EMBED}:
        raise _argument_error(
            "the checkpoint has no output head (lm_head), so that `task` must be embed"
        )


def _check_lengths(max_input_tokens: int, max_total_tokens: int) -> None:
    if max_input_tokens >= max_total_tokens:
        raise _argument_error("`max_input_tokens` must be < `max_total_tokens`")


def _argument_error(message: str) -> StartupError:
    return StartupError(f"Argument validation error: {message}")


def prefill_tokens(config: RouterConfig, info: ShardInfo, capacity: Capacity | None = None) -> int:
    """Return the most prompt tokens of a step: the flag, or as much of the default as fits a known `capacity`."""
    if config.max_batch_prefill_tokens is not None:
        return config.max_batch_prefill_tokens
    room = capacity.max_batch_total_tokens if capacity else config.max_batch_total_tokens
    return min(
        DEFAULT_PREFILL_TOKENS,
        info.max_position_embeddings or DEFAULT_PREFILL_TOKENS,
        room or DEFAULT_PREFILL_TOKENS,
    )


def whole_tokens(config: RouterConfig, info: ShardInfo) -> int:
    """Return the tokens of a prompt that may have to be computed in one step, beyond its budget."""
    vision = info.vision
    if vision is None or vision.mask is Mask.CAUSAL:
        return 0
    if vision.mask is Mask.IMAGE:
        return vision.rows_per_tile
    return config.max_input_tokens or info.max_position_embeddings


def batch_size(config: RouterConfig) -> int:
    """Return the most running sequences: the flag, or the number of concurrent requests."""
    return config.max_batch_size or config.max_concurrent_requests


def num_slots(config: RouterConfig) -> int:
    """Return the number of the shards' slots, spare ones included."""
    return batch_size(config) + spare_slots(batch_size(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterDeployment:
    """The flags, and the warmed-up shards that serve them."""

    config: RouterConfig
    info: ShardInfo
    capacity: Capacity

    @property
    def compute_type(self) -> str:
        """Value of the `x-compute-type` header: COMPUTE_TYPE, else the number of shards and their device."""
        if (dtype := self.config.compute_type) is not None:
            return dtype
        if self.config.strict_tgi:
            return TGI_COMPUTE_TYPE
        return f"{self.info.world_size}-{self.info.device_type}"

    def budgets(self) -> Budgets:
        """The limits of one step."""
        return budgets_from(
            self.config,
            prefill_tokens=prefill_tokens(self.config, self.info, self.capacity),
            batch_size=batch_size(self.config),
            max_draft_tokens=self.info.max_draft_tokens,
        )

    def limits(self, tasks: frozenset[Task] = frozenset({Task.GENERATE})) -> Limits:
        """The limits of one request, for one of `tasks`."""
        config, info, capacity = self.config, self.info, self.capacity
        return Limits(
            max_input_tokens=capacity.max_input_tokens,
            max_total_tokens=capacity.max_total_tokens,
            vocab_size=info.vocab_size,
            default_max_new_tokens=config.default_max_new_tokens,
            max_new_tokens_limit=config.max_new_tokens_limit,
            strict_max_tokens=config.strict_max_tokens,
            max_concurrent_requests=config.max_concurrent_requests,
            max_best_of=config.max_best_of,
            # Every choice takes a permit, so a request with more choices could never start.
            max_n=min(config.max_n, config.max_concurrent_requests),
            max_stop_sequences=config.max_stop_sequences,
            max_top_n_tokens=config.max_top_n_tokens,
            max_client_batch_size=config.max_client_batch_size,
            prefill_logprobs=info.prefill_logprobs,
            grammars=info.grammars and not config.disable_grammar_support,
            tasks=tasks,
            image_token_id=None if info.vision is None else info.vision.image_token_id,
            whole_prompts=info.vision is not None and info.vision.mask is Mask.PROMPT,
            dialect=dialect_of(
                strict_tgi=config.strict_tgi,
                reads_images=info.vision is not None,
                lacks_encoder=info.vision is None and _lacks_encoder(config.model_folder),
            ),
        )


GGUF_MODEL = "model.gguf"
"""In a folder that was prepared from a GGUF file."""


def _lacks_encoder(folder: Path) -> bool:
    """Return whether a folder has a GGUF file with only the text part of a model that reads images.

    Such a model has positions with rows and columns.
    """
    if not (folder / GGUF_MODEL).exists():
        return False
    try:
        config = orjson.loads(read_small_file(folder / "config.json"))
    except (OSError, orjson.JSONDecodeError):
        return False
    rope = config.get("rope_parameters") if isinstance(config, dict) else None
    return isinstance(rope, dict) and "mrope_section" in rope


async def warm_up(
    config: RouterConfig, group: ShardGroup, restart: Callable[[str], None] = lambda _reason: None
) -> RouterDeployment:
    """Wait for the shards and warm them up; starts again if shards are lost meanwhile.

    `restart` requests a restart of local shards, which have not answered for `--step-timeout`.

    Raises:
        StartupError: the shards cannot serve as the flags require.

    """
    log.debug("Connecting to the shards", addresses=",".join(config.shard_addresses))
    while True:
        try:
            return await _warm_up(config, group, restart)
        except (ShardLost, ShardHung) as error:
            log.warning("the shards were lost during the warm-up", error=str(error))
            await asyncio.sleep(RETRY_SECONDS)
            await group.reset()


async def _warm_up(
    config: RouterConfig, group: ShardGroup, restart: Callable[[str], None]
) -> RouterDeployment:
    try:
        info = await _info(group, restart, patience_seconds=config.step_timeout)
    except (ShardLost, ShardHung):
        raise
    except ShardError as error:
        raise StartupError(f"Unable to get the Python model shards info: {error}") from error
    log.info("Warming up model")
    try:
        capacity = await group.warm_up(
            max_batch_prefill_tokens=prefill_tokens(config, info) + whole_tokens(config, info),
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
    return RouterDeployment(config=config, info=info, capacity=capacity)


async def _info(
    group: ShardGroup, restart: Callable[[str], None], *, patience_seconds: float
) -> ShardInfo:
    """Wait until the shards listen, which they do once the weights are loaded. Raises ShardError."""
    since = time.monotonic()
    while True:
        try:
            return await group.info(timeout=min(INFO_SECONDS, patience_seconds))
        except ShardHung:
            await _log_reason(group)
        if group.is_local and time.monotonic() - since >= patience_seconds:
            since = time.monotonic()
            restart("the shards cannot be reached at their sockets")


async def _log_reason(group: ShardGroup) -> None:
    """Log why the shards do not answer: gRPC waits silently for a shard with a wrong certificate, for example."""
    try:
        await group.health()
    except ShardError as error:
        log.warning("Waiting for the shards", error=str(error))
