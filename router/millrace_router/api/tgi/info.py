"""Answers about the server itself."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict


class ErrorResponseJson(TypedDict):
    """A failure, as TGI's clients read it."""

    error: str
    error_type: str
    reason: NotRequired[str]
    """Not in TGI: why the server is not healthy."""


class QuarantineJson(TypedDict):
    """Answer of `/v1/quarantine`."""

    quarantined: list[dict[str, object]]


class InfoJson(TypedDict):
    """Answer of `/info`."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_n: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_input_length: int
    max_total_tokens: int
    waiting_served_ratio: float
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    max_waiting_tokens: int
    max_batch_size: int | None
    validation_workers: int
    max_client_batch_size: int
    prefill_chunking: str
    prefix_caching: str
    kv_reservation: str
    target_inter_token_latency: float | None
    fairness: str
    priority_ageing: float
    max_queue_size: int | None
    max_queue_wait: float | None
    steps_in_flight: int
    late_planning: str
    late_planning_share: float
    block_size: int
    num_blocks: int
    cost_model: dict[str, float]
    step_ratios: list[float]
    entry_seconds: float
    turn_seconds: float
    attention: str
    deterministic: bool
    speculate: int
    grammars: bool
    num_shard: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
