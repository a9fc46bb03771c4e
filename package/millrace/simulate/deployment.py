"""The simulated deployment: the router's flags, the memory of its shards, and the costs of their steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millrace.simulate.simulated_request import Arrival, PrefixNames, SimulatedRequest
from millrace_router.config import OnOff, RouterConfig
from millrace_router.prediction.cost import TILE_COEFFICIENT, CostModel
from millrace_router.prediction.forecast import Forecaster
from millrace_router.prediction.late_planning import MOST, LatePlanning
from millrace_router.scheduler.factory import (
    DEFAULT_PREFILL_TOKENS,
    blocks_from,
    budgets_from,
    forecaster_from,
    queue_from,
)
from millrace_router.scheduler.image_features import ImageFeatures
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.scheduler.step_plan import Budgets
from millrace_router.scheduler.window_blocks import WindowGroup


def _flag(name: str) -> Any:  # noqa: ANN401
    """The router's flag of that name, with its default, bounds and description."""
    return RouterConfig.model_fields[name]


class Deployment(BaseModel):
    """One server. Flags have the names and defaults they have in the router.

    Raises:
        ValueError: the limits contradict each other.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cost_model: dict[str, float] = Field(description="Seconds, by the names of `CostModel`.")
    step_ratios: tuple[Annotated[float, Field(gt=0.0)], ...] = Field(
        default=(),
        description="By what factors steps of one load differ, in an order that repeats.",
    )
    entry_seconds: float = Field(
        default=0.0, ge=0.0, description="What the router takes for a request before it is queued."
    )
    turn_seconds: float = Field(
        default=0.0, ge=0.0, description="What the router takes for the answer to a step."
    )
    num_blocks: int = Field(ge=2, description="KV blocks of the shards, the reserved one included.")
    window_groups: tuple[WindowGroup, ...] = Field(
        default=(),
        description="Layers with an attention window, which have their own blocks in addition to `num_blocks`.",
    )
    block_size: int = Field(ge=1, description="Tokens of one KV block.")
    max_total_tokens: int = Field(ge=2, description="Most tokens of prompt and answer.")
    max_input_tokens: int | None = Field(
        default=None, ge=1, description="Longest prompt in tokens; all but one when absent."
    )

    max_concurrent_requests: int = _flag("max_concurrent_requests")
    max_batch_size: int | None = _flag("max_batch_size")
    max_batch_prefill_tokens: int | None = _flag("max_batch_prefill_tokens")
    steps_in_flight: int = _flag("steps_in_flight")
    late_planning: OnOff = _flag("late_planning")
    late_planning_share: float = Field(
        default=MOST, ge=0.0, le=1.0, description="Of a step, before the next one is planned."
    )
    kv_reservation: Literal["grow", "full"] = _flag("kv_reservation")
    prefix_caching: OnOff = _flag("prefix_caching")
    prefill_order: Literal["shortest", "arrival"] = _flag("prefill_order")
    target_inter_token_latency: float | None = _flag("target_inter_token_latency")
    fairness: Literal["none", "tenant", "adapter"] = _flag("fairness")
    max_active_adapters: int = _flag("max_active_adapters")
    adapter_cycle_time_s: float = _flag("adapter_cycle_time_s")
    adapter_memory_pages: int = Field(
        default=1024, ge=0, description="Pages of 64 KiB for LoRA adapters on each shard."
    )
    adapter_load_seconds: float = Field(
        default=0.05, ge=0.0, description="What a load of an adapter takes."
    )
    feature_rows: int = Field(
        default=1 << 16,
        ge=1,
        description="Rows for features of images on the shards, one for each of their tokens.",
    )
    image_slots: int = Field(
        default=8, ge=1, description="Images whose pixels the shards hold at a time."
    )
    encoder_layers: int = Field(
        default=12, ge=1, description="Layers of the encoder of images, some of which a step runs."
    )
    priority_ageing: float = _flag("priority_ageing")
    max_queue_size: int | None = _flag("max_queue_size")
    max_queue_wait: float | None = _flag("max_queue_wait")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.cost_model:
            raise ValueError("the cost model is empty: the server has not served enough to know")
        CostModel.fixed(self.cost_model)
        if self.max_total_tokens > self.capacity:
            raise ValueError(f"max_total_tokens is beyond the KV blocks, {self.capacity} tokens")
        if self.longest_prompt >= self.max_total_tokens:
            raise ValueError("max_input_tokens must be < max_total_tokens")
        return self

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that one step may compute."""
        return self.max_batch_prefill_tokens or min(DEFAULT_PREFILL_TOKENS, self.capacity)

    @property
    def capacity(self) -> int:
        """The number of KV positions."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt."""
        return self.max_input_tokens or self.max_total_tokens - 1

    @property
    def reads_images(self) -> bool:
        """Whether the cost of a tile of an image is known."""
        return TILE_COEFFICIENT in self.cost_model

    @property
    def flags(self) -> RouterConfig:
        """The flags as the router has them."""
        names = type(self).model_fields.keys() & RouterConfig.model_fields.keys()
        return RouterConfig.model_construct(**{name: getattr(self, name) for name in names})

    @property
    def budgets(self) -> Budgets:
        """Limits of a step and of the batch."""
        return budgets_from(
            self.flags,
            prefill_tokens=self.prefill_tokens,
            batch_size=self.max_batch_size or self.max_concurrent_requests,
        )

    def new_planner(self, cost: CostModel) -> Planner:
        """The router's planner, without rows."""
        caching = self.prefix_caching == "on"
        blocks = blocks_from(
            self.num_blocks,
            self.block_size,
            prefix_caching=caching,
            windows=self.window_groups,
        )
        images = None
        if self.reads_images:
            images = ImageFeatures(self.feature_rows, self.image_slots, self.encoder_layers)
        return Planner(self.budgets, blocks, cost, images=images)

    def new_queue(self) -> RequestQueue:
        return queue_from(self.flags)

    def new_forecaster(self, cost: CostModel, late: LatePlanning) -> Forecaster:
        """The router's forecaster, before the first answer."""
        return forecaster_from(
            self.flags,
            self.budgets,
            cost,
            late,
            block_size=self.block_size,
            num_blocks=self.num_blocks - 1,
        )

    def new_request(
        self, request_id: int, arrival: Arrival, prefixes: PrefixNames
    ) -> SimulatedRequest:
        if self.fairness == "adapter":
            arrival = arrival._replace(tenant=arrival.adapter)
        room = self.max_total_tokens - arrival.prompt_tokens
        return SimulatedRequest(
            request_id,
            arrival,
            max_new_tokens=min(room, arrival.max_new_tokens or room),
            block_size=self.block_size,
            prefixes=prefixes,
        )
