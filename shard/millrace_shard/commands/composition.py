"""Builds what `serve` runs from the flags: the engine, the loaded model, and the export of traces."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from millrace_proto.cores import usable_cores
from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.commands.chosen_kernels import chosen_kernels
from millrace_shard.commands.device_settings import (
    choose_cache_dtype,
    choose_dtype,
    graph_settings,
    is_deterministic,
    machine,
    too_large,
)
from millrace_shard.config import LogFlags, ShardConfig, json_object
from millrace_shard.device.failures import is_out_of_memory
from millrace_shard.device.one_shot import SymmetricMemory
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.loaded_model import AdapterMemory, LoadedModel
from millrace_shard.engine.warmup import MemoryLimits
from millrace_shard.errors import ModelError, UnsupportedModel
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.build import BuildError, cache_folder, load_operators
from millrace_shard.kernels.choose import sum_of_ranks
from millrace_shard.kernels.cpu.int8_linear import TiledInt8Kernels
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.kv_cache import cache_dtype_name, is_coded
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.models.config_overrides import folder_with
from millrace_shard.models.description import ModelDescription
from millrace_shard.models.interface import CausalModel
from millrace_shard.models.load import check_model, load_model
from millrace_shard.models.rope import RopeOverride
from millrace_shard.models.split import check_split
from millrace_shard.process import START_AGAIN, Stages, end_process
from millrace_shard.sampling.watermark import Watermark
from millrace_shard.speculation.checkpoints import (
    MTP,
    Checkpoints,
    find_draft,
    is_eagle,
    is_medusa,
)
from millrace_shard.speculation.head_spec import read_head
from millrace_shard.speculation.loading import SpeculationLoader, check_draft_tokens
from millrace_shard.structured_output.grammar_compiler import GrammarCompiler
from millrace_shard.structured_output.manager import GrammarManager
from millrace_shard.structured_output.vocabulary import Vocabulary, load_vocabulary
from millrace_shard.variables import Variables
from millrace_shard.vision.encoder import Vision, load_vision
from millrace_shard.vision.registry import read_vision
from millrace_shard.weights.checkpoint_files import file_state
from millrace_shard.weights.hub import HubSettings
from millrace_shard.weights.packed_weights import PackedWeights
from millrace_shard.weights.quantized.quantization_config import read_quantization
from millrace_shard.weights.read_ahead import readable_size
from millrace_shard.weights.weights import checkpoint_bytes, open_files

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


def load(config: ShardConfig, device: torch.device, stages: Stages | None = None) -> LoadedModel:
    """The model of the flags, ready for the warm-up; `stages` gets its parts. Raises the errors of loading."""
    config = with_folders(config)
    check_files(config)
    group = ProcessGroup(config.rank, config.world_size, device)
    connect(config, group)
    return with_grammars(config, *load_parts(config, device, group, stages or Stages()))


def load_parts(
    config: ShardConfig, device: torch.device, group: ProcessGroup, stages: Stages
) -> tuple[LoadedModel, Vocabulary | None]:
    """The model without the threads of grammars, and what those match; `with_grammars` joins them.

    `group` need not have met, unless all ranks choose or check something together. Raises ModelError.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="vocabulary") as pool:
        # Weights are read outside of the interpreter.
        reading = pool.submit(_read_vocabulary, config)
        loaded = _load_model(config, device, group, stages)
        vocabulary = reading.result()
    logger.info("loaded in %s", stages.done("vocabulary"))
    return loaded, vocabulary


def _load_model(
    config: ShardConfig, device: torch.device, group: ProcessGroup, stages: Stages
) -> LoadedModel:
    dtype = choose_dtype(config, device)
    cache_dtype = choose_cache_dtype(config, dtype)
    chosen = chosen_kernels(config, device, dtype, group)
    kernels, activations = chosen.kernels, chosen.activations
    stages.done("kernels")
    adapters = AdapterTable(device) if config.enable_lora else None
    model = _model(config, device, dtype, kernels, group, adapters)
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
    vision = _vision(config, device, dtype, kernels)
    stages.done("weights")
    logger.info("%s", machine(config, device, kernels))
    if is_coded(cache_dtype):
        logger.info("keys and values are kept in %s", cache_dtype_name(cache_dtype))
        if model.geometry.states:
            logger.info("--kv-cache-dtype is for layers with attention: states stay in float32")
    return LoadedModel(
        model=model,
        kernels=kernels,
        group=group,
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        activations=None if activations is None else activations.name,
        int8_gain=None if activations is None else activations.gain,
        speculation=speculation,
        watermark=Watermark(config.watermark_gamma, config.watermark_delta),
        adapters=_adapter_store(config, adapters, dtype),
        identity=_identity(config, kernels),
        kv_groups=config.kv_groups == "auto",
        vision=vision,
    )


def _vision(
    config: ShardConfig, device: torch.device, dtype: torch.dtype, kernels: Kernels
) -> Vision | None:
    """The encoder of a model that reads images with our own decoder; None for others."""
    spec = read_vision(config.model_folder)
    if spec is None or ModelDescription.read(config.model_folder).spec is None:
        return None
    return load_vision(spec, config.model_folder, dtype=dtype, kernels=kernels, device=device)


WIRING = {"uds_path", "address", "master_addr", "master_port", "packed_weights_size"}
"""Flags that change nothing of a step; neither do flags of logs."""


def _identity(config: ShardConfig, kernels: Kernels) -> str:
    """A digest of the flags, the kernels, and the state of the files in the model's folders; empty if files vanish."""
    flags = config.model_dump(mode="json", exclude={*WIRING, *LogFlags.model_fields})
    parts = [json.dumps(flags, sort_keys=True), f"{kernels.name} {getattr(kernels, 'integer', '')}"]
    try:
        for folder in (config.model_folder, config.draft_model):
            files = [] if folder in {None, str(MTP)} else sorted(Path(folder).iterdir())
            parts += [f"{path.name} {file_state(path)}" for path in files]
    except OSError:
        return ""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def check_files(config: ShardConfig) -> None:
    """Refuse what the files contradict, before kernels are compiled and weights read, which takes up to minutes.

    Raises ModelError.
    """
    folder, draft = config.model_folder, config.draft_model
    model = ModelDescription.read(folder).with_rope(_rope_override(config))
    check_model(model, allow_unlisted=config.allow_unlisted_model)
    if model.spec is not None:
        check_split(model.spec, config.world_size)
    read_quantization(folder, config.quantize)
    read_vision(folder)
    most, positions = config.max_total_tokens, model.info().max_position_embeddings
    if most is not None and most > positions:
        raise UnsupportedModel(
            f"`max_total_tokens`={most} is more than the model's {positions} positions"
        )
    if draft is None or config.speculate == 0:
        return
    if Path(draft) == MTP or is_eagle(Path(draft)):
        if model.spec is None:
            raise UnsupportedModel(f"{model.model_type} runs without heads that draft")
        read_head(Path(draft), folder, model.spec, config.world_size)
    elif not is_medusa(Path(draft)):
        check_draft_tokens(folder, Path(draft))
        drafts = ModelDescription.read(Path(draft))
        if drafts.spec is not None and drafts.spec.is_recurrent:
            raise UnsupportedModel(
                f"the draft model in {draft} is of the type {drafts.model_type}, which has recurrent layers:"
                " choose one whose layers all have attention"
            )


def _model(
    config: ShardConfig,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels,
    group: ProcessGroup,
    adapters: AdapterTable | None,
) -> CausalModel:
    """The model, whose packed weights are kept for later starts."""
    started = time.monotonic()
    packed = _packed_weights(config, kernels, dtype)
    try:
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
            packed=packed,
        )
    except RuntimeError as error:
        if device.type != "cuda" or not is_out_of_memory(error):
            raise
        raise too_large(config, device, dtype) from error
    if packed is not None:
        packed.keep()
    size = readable_size(checkpoint_bytes(config.model_folder))
    logger.info("weights loaded in %.2f s, %s", time.monotonic() - started, size)
    return model


def _packed_weights(
    config: ShardConfig, kernels: Kernels, dtype: torch.dtype
) -> PackedWeights | None:
    """The packed weights of earlier starts; None where none are kept."""
    if not isinstance(kernels, CpuKernels | TiledInt8Kernels) or not config.packed_weights_size:
        return None
    folder, sources = config.model_folder, open_files(config.model_folder)
    paths = sources.paths()
    sources.close()
    settings = [f"{file.name} {file.read_text()}" for file in sorted(folder.glob("*config.json"))]
    ranks = f"{config.rank} of {config.world_size}"
    try:
        cache, library = cache_folder("packed"), load_operators()
    except BuildError:
        return None
    return PackedWeights(
        cache,
        paths,
        [library, f"{dtype} {config.quantize} {kernels.integer}", ranks, *settings],
        limit=config.packed_weights_size,
    )


def with_folders(config: ShardConfig) -> ShardConfig:
    """`config` with local folders of model and draft model, either of which may be on the hub. Raises ModelError.

    The model's folder has the changes of its config.json that flags request.
    """
    config = _with_local_folders(config)
    if config.hf_overrides is None and config.rope_parameters is None:
        return config
    try:
        root = cache_folder("configs")
    except BuildError as error:
        raise ModelError(f"--hf-overrides and --rope-scaling: {error}") from error
    overrides = {} if config.hf_overrides is None else json_object(config.hf_overrides)
    folder = folder_with(config.model_folder, overrides, config.rope_parameters, root)
    return config.model_copy(update={"model_folder": folder})


def _with_local_folders(config: ShardConfig) -> ShardConfig:
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


def connect(config: ShardConfig, group: ProcessGroup) -> None:
    """Meet the other ranks. Raises GroupError."""
    group.join(
        config.master_addr,
        config.master_port,
        # On one host the launcher restarts all ranks together.
        when_broken=_leave if config.address else None,
    )
    if is_deterministic(config, group.device):
        group.add_in_rank_order(sum_of_ranks(group.device))
    by_memory = config.one_shot_all_reduce
    if by_memory != "off" and config.world_size > 1 and group.device.type == "cuda":
        group.use_one_shot(SymmetricMemory(group.device), is_requested=by_memory == "on")


def _leave(reason: str) -> None:
    logger.warning("this rank ends, so that its supervisor starts it anew: %s", reason)
    end_process(START_AGAIN)


def _read_vocabulary(config: ShardConfig) -> Vocabulary | None:
    info = ModelDescription.read(config.model_folder).info()
    return load_vocabulary(
        config.model_folder, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids
    )


def with_grammars(
    config: ShardConfig, loaded: LoadedModel, vocabulary: Vocabulary | None
) -> LoadedModel:
    """`loaded` with the threads that follow grammars, which a fork would not have; without a vocabulary none match."""
    compiler = None
    if vocabulary is not None:
        compiler = GrammarCompiler(
            vocabulary,
            config.model_folder,
            timeout=config.grammar_timeout,
            max_source_bytes=config.max_grammar_bytes,
        )
    overlap = loaded.device.type != "cpu"
    manager = GrammarManager(compiler, loaded.model.info.vocab_size, overlap=overlap)
    return replace(loaded, grammars=manager)


def _adapter_store(
    config: ShardConfig, table: AdapterTable | None, dtype: torch.dtype
) -> AdapterStore | None:
    if table is None:
        return None
    if config.adapter_cache is None:
        raise UnsupportedModel("--enable-lora needs --adapter-cache")
    return AdapterStore(table, config.adapter_cache, dtype)


def _rope_override(config: ShardConfig) -> RopeOverride | None:
    if config.rope_parameters is not None:
        return None
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
