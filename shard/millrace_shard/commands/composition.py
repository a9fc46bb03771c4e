"""Builds what `serve` runs from the flags: the engine, the loaded model, and the export of traces."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.commands.chosen_kernels import chosen_kernels
from millrace_shard.commands.device_settings import (
    choose_cache_dtype,
    choose_dtype,
    graph_settings,
    is_deterministic,
)
from millrace_shard.config import ShardConfig
from millrace_shard.device.one_shot import SymmetricMemory
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.device.resources import usable_cores
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.loaded_model import AdapterMemory, LoadedModel
from millrace_shard.engine.warmup import MemoryLimits
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.kv_cache import cache_dtype_name, is_coded
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.models.interface import ModelInfo
from millrace_shard.models.load import load_model
from millrace_shard.models.rope import RopeOverride
from millrace_shard.process import START_AGAIN, end_process
from millrace_shard.sampling.watermark import Watermark
from millrace_shard.speculation.checkpoints import Checkpoints, find_draft, is_medusa
from millrace_shard.speculation.loading import SpeculationLoader
from millrace_shard.structured_output.grammar_compiler import GrammarCompiler
from millrace_shard.structured_output.manager import GrammarManager
from millrace_shard.variables import Variables
from millrace_shard.weights.hub import HubSettings
from millrace_shard.weights.read_ahead import readable_size
from millrace_shard.weights.weights import checkpoint_bytes

if TYPE_CHECKING:
    from millrace_shard.server.tracing import TracingInterceptor

logger = logging.getLogger(__name__)


def build_engine(config: ShardConfig, device: torch.device) -> Engine:
    """The engine, without a model yet."""
    threads = config.cpu_threads or max(1, usable_cores() // config.world_size)
    return Engine(
        limits=MemoryLimits(
            kv_memory=config.kv_memory,
            cuda_memory_fraction=config.cuda_memory_fraction,
            adapters=AdapterMemory(
                bytes=config.adapter_memory, fraction=config.adapter_memory_fraction
            ),
        ),
        device=device,
        cpu_threads=threads if device.type == "cpu" else None,
        overlap=device.type == "cuda",
        graphs=graph_settings(config, device),
    )


def load(config: ShardConfig, device: torch.device) -> LoadedModel:
    config = with_folders(config)
    group = _connect(config, device)
    dtype = choose_dtype(config, device)
    cache_dtype = choose_cache_dtype(config, device, dtype)
    kernels = chosen_kernels(config, device, dtype)
    adapters = AdapterTable(device) if config.enable_lora else None
    started = time.monotonic()
    model = load_model(
        config.model_folder,
        dtype=dtype,
        kernels=kernels,
        group=group,
        device=device,
        rope_override=_rope_override(config),
        max_total_tokens=config.max_total_tokens,
        adapters=adapters,
        quantize=config.quantize,
        allow_unlisted=config.allow_unlisted_model,
    )
    draft_folder = None if config.draft_model is None else Path(config.draft_model)
    loader = SpeculationLoader(
        folder=config.model_folder,
        dtype=dtype,
        kernels=kernels,
        group=group,
        device=device,
        max_total_tokens=config.max_total_tokens,
        allow_unlisted=config.allow_unlisted_model,
    )
    model, speculation = loader.load(
        model, draft_folder=draft_folder, max_draft_tokens=config.speculate
    )
    size = readable_size(checkpoint_bytes(config.model_folder))
    logger.info("weights loaded in %.2f s, %s", time.monotonic() - started, size)
    if is_coded(cache_dtype):
        logger.info("keys and values are kept in %s", cache_dtype_name(cache_dtype))
    return LoadedModel(
        model=model,
        kernels=kernels,
        group=group,
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        grammars=_grammars(config, model.info, device),
        speculation=speculation,
        watermark=Watermark(config.watermark_gamma, config.watermark_delta),
        adapters=_adapter_store(config, adapters, dtype),
    )


def with_folders(config: ShardConfig) -> ShardConfig:
    """`config` with local folders of model and draft model, either of which may be on the hub. Raises ModelError."""
    settings = HubSettings.of(Variables())
    folder = config.model_folder
    if folder.is_dir() and config.draft_model is not None:
        draft = find_draft(config.draft_model, settings)
        return config.model_copy(update={"draft_model": str(draft)})
    if folder.is_dir() and not is_medusa(folder):
        return config
    checkpoints = Checkpoints.find(
        str(folder), draft_model=config.draft_model, revision=config.revision, settings=settings
    )
    draft_model = None if checkpoints.draft is None else str(checkpoints.draft)
    return config.model_copy(update={"model_folder": checkpoints.model, "draft_model": draft_model})


def _connect(config: ShardConfig, device: torch.device) -> ProcessGroup:
    group = ProcessGroup.connect(
        config.rank,
        config.world_size,
        master_addr=config.master_addr,
        master_port=config.master_port,
        device=device,
        # On one host the launcher restarts all ranks together.
        when_broken=_leave if config.address else None,
    )
    if is_deterministic(config, device):
        group.add_in_rank_order()
    if config.one_shot_all_reduce and config.world_size > 1 and device.type == "cuda":
        group.use_one_shot(SymmetricMemory(device))
    return group


def _leave(reason: str) -> None:
    logger.warning("this rank ends, so that its supervisor starts it anew: %s", reason)
    end_process(START_AGAIN)


def _grammars(config: ShardConfig, info: ModelInfo, device: torch.device) -> GrammarManager:
    compiler = GrammarCompiler.load(
        config.model_folder,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        timeout=config.grammar_timeout,
        max_source_bytes=config.max_grammar_bytes,
    )
    return GrammarManager(compiler, info.vocab_size, overlap=device.type != "cpu")


def _adapter_store(
    config: ShardConfig, table: AdapterTable | None, dtype: torch.dtype
) -> AdapterStore | None:
    if table is None:
        return None
    if config.adapter_cache is None:
        raise UnsupportedModel("--enable-lora needs --adapter-cache")
    return AdapterStore(table, config.adapter_cache, dtype)


def _rope_override(config: ShardConfig) -> RopeOverride | None:
    if config.rope_scaling is None and config.rope_factor is None:
        return None
    return RopeOverride(config.rope_scaling or "linear", config.rope_factor or 1.0)


class TracingError(RuntimeError):
    """Traces are requested, but OpenTelemetry is not installed."""


def open_tracing(config: ShardConfig) -> TracingInterceptor | None:
    """Make the interceptor of --otlp-endpoint; None without the flag. Raises TracingError."""
    if config.otlp_endpoint is None:
        return None
    try:
        from millrace_shard.server.tracing import interceptor_to  # noqa: PLC0415

        return interceptor_to(config.otlp_endpoint, config)
    except ImportError:
        raise TracingError(
            "--otlp-endpoint needs OpenTelemetry: pip install opentelemetry-sdk"
            " opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http"
        ) from None
