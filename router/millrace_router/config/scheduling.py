"""Flags of the scheduler."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from millrace_router.config.values import OnOff


class SchedulingFlags(BaseModel):
    """The order of requests, and how steps are planned."""

    waiting_served_ratio: float = Field(
        default=0.3,
        ge=0,
        description="No effect: prompts are computed in chunks together with decodes, which never wait for them.",
    )
    max_waiting_tokens: int = Field(
        default=20,
        ge=0,
        description="No effect: prompts are computed in chunks, which never wait for decodes.",
    )
    prefill_chunking: OnOff = Field(
        default="on",
        description="No effect: prompts are always computed in chunks together with decodes.",
    )
    prefill_order: Literal["shortest", "arrival"] = Field(
        default="shortest",
        description="Compute short prompts before older long ones, which keep half of each step "
        "(shortest), or prompts one after the other (arrival).",
    )
    prefix_caching: OnOff = Field(
        default="on", description="Keep computed KV blocks for requests that begin alike."
    )
    kv_events: str | None = Field(
        default=None,
        description="Address to publish what the prefix cache has at, in vLLM's ZeroMQ format, such as"
        " tcp://127.0.0.1:5557; the events contain prompts.",
    )
    kv_events_replay: str | None = Field(
        default=None,
        description="Address at which subscribers request events that they missed, such as tcp://127.0.0.1:5558.",
    )
    kv_events_topic: str = Field(
        default="", description="Topic of the events; llm-d expects kv@ADDRESS@MODEL."
    )
    kv_events_any_host: bool = Field(
        default=False, description="Allow these addresses to be others than loopback."
    )
    kv_reservation: Literal["grow", "full"] = Field(
        default="grow",
        description="Give a request KV blocks as it grows, preempting when they run out (grow), or "
        "admit it with blocks for all of max_new_tokens (full).",
    )
    target_inter_token_latency: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Milliseconds that a step with running requests should not exceed for the sake "
        "of prompts; when absent, three times what it takes without prompts, and longer with few requests.",
    )
    fairness: Literal["none", "tenant", "adapter"] = Field(
        default="none",
        description="Share tokens equally between API keys, or values of x-tenant (tenant), between LoRA adapters and"
        " the base model (adapter), or not.",
    )
    priority_ageing: float = Field(
        default=10.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds of waiting that are worth one step of priority.",
    )
    max_queue_size: int | None = Field(
        default=None, ge=1, description="Requests that may wait; more are answered 429."
    )
    max_queue_wait: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that a request may wait; one that would, or has, is answered 429.",
    )
    steps_in_flight: int = Field(
        default=2,
        ge=1,
        le=2,
        description="Steps sent before the first is answered; 1 turns it off.",
    )
    late_planning: OnOff = Field(
        default="on",
        description="Plan the second step in flight when the first is nearly done, so that requests "
        "which arrive meanwhile are in it.",
    )
