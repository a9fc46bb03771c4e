"""Answers about the server itself."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from millrace_router.engine.adapter_loading import FIRST_LOAD_SECONDS
from millrace_router.request.request import Task
from millrace_router.server.services import Services
from millrace_router.version import VERSION


class ErrorResponseJson(TypedDict):
    """A failure, as TGI's clients read it."""

    error: str
    error_type: str
    reason: NotRequired[str]
    """Not in TGI: why the server is not healthy."""


class QuarantineJson(TypedDict):
    """Answer of `/v1/quarantine`."""

    quarantined: list[dict[str, object]]


class VersionJson(TypedDict):
    """Answer of `/version`."""

    version: str


class LimitsJson(TypedDict):
    """The model, and the limits of one request."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    quantize: str | None
    """How the weights are quantised, in the file or as they were loaded; not in TGI."""
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
    default_max_new_tokens: int | None
    """Most new tokens of a request that names no limit; None for what the context leaves."""
    max_new_tokens_limit: int | None
    """Most new tokens that a request may have; None if only the context limits them."""
    waiting_served_ratio: float
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    max_waiting_tokens: int
    max_batch_size: int | None
    validation_workers: int
    max_client_batch_size: int


class CostsJson(TypedDict, total=False):
    """The costs that the scheduler has measured, of use to a simulation: only with `?costs=true`."""

    cost_model: dict[str, float]
    step_ratios: list[float]
    entry_seconds: float
    turn_seconds: float


class WindowGroupJson(TypedDict):
    """Layers with one attention window."""

    num_blocks: int
    window: int
    """Positions that a query sees, its own included."""
    reach: int
    """Positions before a query's own that its attention may read, those that it masks included."""
    num_layers: int
    bytes_per_token: int
    """Bytes of a position on one shard."""


class SchedulerJson(TypedDict):
    """Settings of the scheduler: with the costs, the input of a simulation."""

    prefill_chunking: str
    prefill_order: str
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
    max_active_adapters: int
    adapter_cycle_time_s: float
    adapter_memory_pages: int
    """Pages of 64 KiB for adapters on each shard."""
    adapter_load_seconds: float
    """The mean of late loads of adapters."""
    block_size: int
    num_blocks: int
    window_groups: list[WindowGroupJson]
    """Layers with an attention window, which give their blocks back behind it."""


class ImagesJson(TypedDict):
    """What images may be in a request."""

    max_bytes: int
    max_pixels: int
    max_per_request: int
    tokens_per_tile: int
    """At most, where an image is one tile of any size."""
    max_tiles: int
    """The most tiles of one image."""


class InfoJson(LimitsJson, SchedulerJson, CostsJson):
    """Answer of `/info`."""

    tasks: list[str]
    """What the server does: `generate`, `embed`, `score`."""
    hidden_size: int
    """Numbers of an embedding."""
    attention: str
    operators: list[str]
    """Operators of libraries that the CUDA kernels take; see `--disable-operators`."""
    kv_cache_dtype: str
    """Type of keys and values in the KV cache."""
    quantize_activations: str | None
    """The activations that quantised weights are multiplied with, `exact` or `int8`; null for plain weights."""
    int8_activation_gain: float | None
    """How many times as fast `int8` was when `--quantize-activations auto` chose; null where nothing was measured."""
    deterministic: bool
    speculate: int
    grammars: bool
    adapters: bool
    max_loras: int
    """The most adapters in the shards at a time; 0 without adapters."""
    max_lora_rank: int
    chat_template_tools: bool
    """Whether the chat template has a place for tools; otherwise their list is added to the conversation."""
    images: ImagesJson | None
    """Limits of images; null for a model that reads only text."""
    sampling_defaults: dict[str, float]
    """The defaults of sampling parameters in the model's generation_config.json."""
    resume_grace: float
    """Seconds that a request with an `Idempotency-Key` outlives its connection."""
    num_shard: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None


def info_json(services: Services, *, costs: bool = False) -> InfoJson:
    """Describe the server; with `costs`, also what its steps cost."""
    shard = services.shard
    measured: CostsJson = _costs(services) if costs else {}
    return {
        **_limits(services),
        **_scheduler(services),
        "tasks": sorted(services.limits.tasks),
        "hidden_size": shard.hidden_size,
        **measured,
        "attention": shard.attention,
        "operators": list(shard.operators),
        "kv_cache_dtype": shard.kv_cache_dtype,
        "quantize_activations": shard.quantize_activations,
        "int8_activation_gain": shard.int8_gain,
        "deterministic": shard.deterministic,
        "speculate": shard.max_draft_tokens,
        "grammars": services.limits.grammars,
        "adapters": services.adapters is not None,
        "max_loras": 0 if services.adapters is None else services.config.max_adapters,
        "max_lora_rank": services.config.max_lora_rank,
        "chat_template_tools": services.template.lists_tools,
        "images": _images(services),
        "sampling_defaults": services.validator.defaults.given(),
        "resume_grace": services.config.resume_grace,
        "num_shard": shard.world_size,
        "router": "text-generation-router",
        "version": VERSION,
        "sha": None,
        "docker_label": None,
    }


def _limits(services: Services) -> LimitsJson:
    config, shard, limits = services.config, services.shard, services.limits
    return {
        "model_id": config.model_id,
        "model_sha": config.revision,
        "model_dtype": shard.dtype,
        "quantize": shard.quantization,
        "model_device_type": shard.device_type,
        "model_pipeline_tag": _pipeline_tag(limits.tasks),
        "max_concurrent_requests": limits.max_concurrent_requests,
        "max_best_of": limits.max_best_of,
        "max_n": limits.max_n,
        "max_stop_sequences": limits.max_stop_sequences,
        "max_top_n_tokens": limits.max_top_n_tokens,
        "max_input_tokens": limits.max_input_tokens,
        "max_input_length": limits.max_input_tokens,
        "max_total_tokens": limits.max_total_tokens,
        "default_max_new_tokens": limits.default_max_new_tokens,
        "max_new_tokens_limit": limits.max_new_tokens_limit,
        "waiting_served_ratio": config.waiting_served_ratio,
        "max_batch_prefill_tokens": services.max_batch_prefill_tokens,
        "max_batch_total_tokens": services.capacity.max_batch_total_tokens,
        "max_waiting_tokens": config.max_waiting_tokens,
        "max_batch_size": config.max_batch_size,
        "validation_workers": config.validation_workers,
        "max_client_batch_size": limits.max_client_batch_size,
    }


def _images(services: Services) -> ImagesJson | None:
    config, store = services.config, services.images.store
    if store is None:
        return None
    return {
        "max_bytes": int(config.max_image_bytes),
        "max_pixels": config.max_image_pixels,
        "max_per_request": store.max_images,
        "tokens_per_tile": store.most_rows_per_tile,
        "max_tiles": store.max_tiles,
    }


def _pipeline_tag(tasks: frozenset[Task]) -> str:
    """The hub's name of the first task."""
    if Task.GENERATE in tasks:
        return "text-generation"
    return "feature-extraction" if Task.EMBED in tasks else "text-ranking"


def _scheduler(services: Services) -> SchedulerJson:
    config, loading = services.config, services.loading
    return {
        "prefill_chunking": "on",
        "prefill_order": config.prefill_order,
        "prefix_caching": config.prefix_caching,
        "kv_reservation": config.kv_reservation,
        "target_inter_token_latency": config.target_inter_token_latency,
        "fairness": config.fairness,
        "priority_ageing": config.priority_ageing,
        "max_queue_size": config.max_queue_size,
        "max_queue_wait": config.max_queue_wait,
        "steps_in_flight": config.steps_in_flight,
        "late_planning": config.late_planning,
        "late_planning_share": 0.0 if services.late is None else round(services.late.share, 4),
        "max_active_adapters": config.max_adapters,
        "adapter_cycle_time_s": config.adapter_cycle_time_s,
        "adapter_memory_pages": services.capacity.adapter_pages,
        "adapter_load_seconds": FIRST_LOAD_SECONDS
        if loading is None
        else loading.mean_load_seconds,
        "block_size": services.shard.block_size,
        "num_blocks": services.capacity.num_blocks,
        "window_groups": [
            {
                "num_blocks": group.num_blocks,
                "window": group.window,
                "reach": group.reach,
                "num_layers": group.num_layers,
                "bytes_per_token": group.bytes_per_token,
            }
            for group in services.capacity.window_groups
        ],
    }


def _costs(services: Services) -> CostsJson:
    cost = services.cost
    return {
        "cost_model": {} if cost is None else cost.to_json(),
        "step_ratios": [] if cost is None else [round(r, 4) for r in cost.jitter.ratios()],
        "entry_seconds": 0.0 if cost is None else round(cost.overhead.entry_seconds, 6),
        "turn_seconds": 0.0 if cost is None else round(cost.overhead.turn_seconds, 6),
    }
