"""The command `serve`: loads the model, listens, and ends in order."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn

import torch

from millrace_shard.adapters.adapter_store import AdapterStore
from millrace_shard.commands.chosen_kernels import chosen_kernels
from millrace_shard.commands.device_settings import (
    choose_cache_dtype,
    choose_device,
    choose_dtype,
    graph_settings,
    is_deterministic,
)
from millrace_shard.commands.tgi_flags import notices
from millrace_shard.commands.trace_export import open_tracing
from millrace_shard.config import ShardConfig
from millrace_shard.device.one_shot import SymmetricMemory
from millrace_shard.device.process_group import GroupError, ProcessGroup, RanksMissing
from millrace_shard.device.resources import usable_cores
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.loaded_model import AdapterMemory, LoadedModel
from millrace_shard.engine.warmup import MemoryLimits
from millrace_shard.errors import EngineEnded, ModelError, UnsupportedModel
from millrace_shard.kernels.kv_cache import cache_dtype_name, is_coded
from millrace_shard.kernels.lora.adapter_table import AdapterTable
from millrace_shard.logs import configure
from millrace_shard.models.interface import ModelInfo
from millrace_shard.models.load import load_model
from millrace_shard.models.rope import RopeOverride
from millrace_shard.process import die_with_parent, end_in
from millrace_shard.sampling.watermark import Watermark
from millrace_shard.server.address import SocketFile, for_this_user_only, server_credentials
from millrace_shard.server.service import ShardService, new_server
from millrace_shard.speculation.checkpoints import Checkpoints, find_draft, is_medusa
from millrace_shard.speculation.loading import SpeculationLoader
from millrace_shard.structured_output.grammar_compiler import GrammarCompiler
from millrace_shard.structured_output.manager import GrammarManager
from millrace_shard.variables import Variables
from millrace_shard.weights.hub import HubSettings
from millrace_shard.weights.read_ahead import readable_size
from millrace_shard.weights.weights import checkpoint_bytes

STOP_SECONDS = 5.0
"""Time for running calls, a step among them, to finish after a signal."""
ENDED_SECONDS = 1.0
"""The same time when the engine has ended, and calls cannot be answered."""
END_SECONDS = 0.9
"""Time after the router ends this rank, whose answer needs some of it."""
START_AGAIN = 75
"""Exit code of a rank whose group has to meet anew: EX_TEMPFAIL."""
ABORT_SECONDS = 1.0
"""Further time to stop before the process is killed."""
WAKE_SECONDS = 0.5
STDERR = 2

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve until SIGTERM or SIGINT; exit with 1 and a message after an error, or when the engine ends by itself."""
    config = ShardConfig.from_args(sys.argv[1:] if argv is None else argv)
    configure(config.threshold, json_output=config.json_output)
    try:
        die_with_parent()
        # During loading nothing needs an orderly stop.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        serve(config)
    except (ModelError, GroupError, EngineEnded, RuntimeError) as error:
        logger.error("%s", error)  # noqa: TRY400
        sys.stderr.write(f"Error: {error}\n")
        # On one host the launcher restarts all ranks together.
        is_to_meet = config.address is not None and isinstance(error, RanksMissing)
        end_process(START_AGAIN if is_to_meet else 1)
    end_process(0)


def end_process(status: int) -> NoReturn:
    """Exit at once: torch's teardown takes seconds, and a normal exit would wait for blocked threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def serve(config: ShardConfig) -> None:
    """Load the model, then listen, wait for a signal, and stop.

    Raises EngineEnded if the engine ends by itself, RanksMissing if it ended because another rank is gone, and the
    errors of loading.
    """
    for notice in notices(config):
        logger.info("%s", notice)
    credentials, tracing = server_credentials(config), open_tracing(config)
    socket = None if config.address else SocketFile(config.socket_path)
    if socket is not None:
        socket.check_free()
    device = choose_device(config)
    engine = _engine(config, device)
    engine.start()
    loaded = engine.submit(lambda: load(config, device)).result()
    engine.attach(loaded)
    service = ShardService(
        engine,
        deterministic=is_deterministic(config, device),
        prefill_logprobs=config.enable_prefill_logprobs,
        end=lambda: end_in(END_SECONDS, START_AGAIN),
    )
    stops: SimpleQueue[int | None] = SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stops.put(received))
    engine.when_ended(lambda: stops.put(None))
    target = f"unix:{socket.private}" if socket else config.listen_target
    with for_this_user_only():
        server = new_server(service, target, credentials, () if tracing is None else (tracing,))
    server.start()
    if socket is not None:
        socket.publish()
    shown = config.address or f"unix://{config.socket_path}"
    logger.info("Server started at %s", shown)
    received = _first_of(stops)
    if received is not None:
        logger.info("Stopping after %s", signal.Signals(received).name)
    grace = ENDED_SECONDS if received is None else STOP_SECONDS
    # If stopping hangs, a C thread, which does not need the interpreter lock, prints all stacks and ends the process.
    faulthandler.dump_traceback_later(grace + ABORT_SECONDS, exit=True, file=STDERR)
    service.end_streams()
    server.stop(grace=grace).wait()
    faulthandler.cancel_dump_traceback_later()
    if tracing is not None:
        tracing.close()
    if socket is not None:
        socket.remove()
    if received is None:
        raise _end_of(engine)


def _end_of(engine: Engine) -> EngineEnded | RanksMissing:
    if engine.group_is_lost:
        return RanksMissing("the engine has ended: another rank is gone")
    return EngineEnded("the engine has ended")


def _engine(config: ShardConfig, device: torch.device) -> Engine:
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


def _first_of(stops: SimpleQueue[int | None]) -> int | None:
    while True:
        # The timeout lets this thread run signal handlers: a signal delivered to another thread does not end its wait.
        with suppress(Empty):
            return stops.get(timeout=WAKE_SECONDS)


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


def load(config: ShardConfig, device: torch.device) -> LoadedModel:
    """Connect the ranks, then read this rank's weights."""
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
    found = Checkpoints.find(
        str(folder), draft_model=config.draft_model, revision=config.revision, settings=settings
    )
    draft_model = None if found.draft is None else str(found.draft)
    return config.model_copy(update={"model_folder": found.model, "draft_model": draft_model})


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
