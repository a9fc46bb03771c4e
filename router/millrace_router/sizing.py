"""Resolves the sizes that flags leave open, from the model and the shards' memory."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_router.config import RouterConfig
from millrace_router.request.dialect import dialect_of
from millrace_router.request.limits import Limits
from millrace_router.request.request import Task
from millrace_router.scheduler.factory import DEFAULT_PREFILL_TOKENS, budgets_from, spare_slots
from millrace_router.scheduler.step_plan import Budgets
from millrace_router.shards.wire import Capacity, ShardInfo

TGI_COMPUTE_TYPE = "gpu+optimized"
"""What TGI's router says on every device, unless its launcher found a GPU."""


def prefill_tokens(config: RouterConfig, info: ShardInfo, capacity: Capacity | None = None) -> int:
    """Prompt tokens of one step: the flag, or as many of the default as fit; `capacity` is unknown before warm-up."""
    if config.max_batch_prefill_tokens is not None:
        return config.max_batch_prefill_tokens
    room = capacity.max_batch_total_tokens if capacity else config.max_batch_total_tokens
    return min(
        DEFAULT_PREFILL_TOKENS,
        info.max_position_embeddings or DEFAULT_PREFILL_TOKENS,
        room or DEFAULT_PREFILL_TOKENS,
    )


def batch_size(config: RouterConfig) -> int:
    """The largest number of running sequences: the flag, or the number of concurrent requests."""
    return config.max_batch_size or config.max_concurrent_requests


def num_slots(config: RouterConfig) -> int:
    """The slots of the shards, spare ones included."""
    return batch_size(config) + spare_slots(batch_size(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The flags, and the warmed-up shards that serve them."""

    config: RouterConfig
    info: ShardInfo
    capacity: Capacity

    @property
    def compute_type(self) -> str:
        """Value of the `x-compute-type` header: COMPUTE_TYPE, else the number of shards and their device."""
        if (given := self.config.compute_type) is not None:
            return given
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
            dialect=dialect_of(strict_tgi=config.strict_tgi),
        )
