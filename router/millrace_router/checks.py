"""Checks of the flags and of the shards' capacity before the router serves."""

from __future__ import annotations

from millrace_router.config import RouterConfig
from millrace_router.request.request import Task
from millrace_router.shards.wire import Capacity, ShardInfo


class StartupError(Exception):
    """The server cannot start; the message names what to change."""


def check_arguments(config: RouterConfig) -> None:
    """Check the flags alone; raises StartupError."""
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
