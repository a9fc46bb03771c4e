"""The engine's load over HTTP: launcher, router and shard; and the time until they are ready, by the kernel cache."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from bench.gpu import goals
from bench.gpu.engine.checkpoint import temporary_checkpoint
from bench.gpu.engine.measure import load_figure
from bench.gpu.engine.scale import Load
from bench.gpu.figures import Figure, unchecked
from bench.gpu.setting import Emit, Setting, shown_on_exit
from bench.harness.server import WARM_UP, ServerError, measure, serving
from millrace.load.levels import closed
from millrace.load.measurement import Measurement

SECONDS = 8.0
"""Time for one more run of the load."""
STOP_SECONDS = 6.0
"""Time for a server to end."""
READY, CACHE = "ready, {} kernel cache", "TRITON_CACHE_DIR"


def run(setting: Setting, emit: Emit) -> None:
    """Emit the time to ready with the kernels of earlier stages, the median rate of runs so far, and a cold start."""
    scale, load = setting.scale, setting.scale.load
    level = closed(load.streams, load.prompt_tokens, load.new_tokens, rounds=1)
    flags = (
        *setting.flags,
        # The default on a GPU.
        *(() if setting.is_cuda else ("--deterministic=off",)),
        f"--max-total-tokens={scale.max_tokens}",
        f"--max-input-tokens={scale.max_tokens - 1}",
        f"--max-batch-prefill-tokens={scale.max_prefill_tokens}",
    )
    log = setting.out / "server.log"
    found: list[Measurement] = []
    with temporary_checkpoint(scale.model, setting.device) as folder, shown_on_exit(log):
        if setting.is_cuda:
            torch.cuda.empty_cache()
        print(f"checkpoint written to {folder}", flush=True)
        began = time.monotonic()
        with serving(folder, log=log, flags=flags) as running:
            emit(ready("filled", time.monotonic() - began))
            warm_up = replace(WARM_UP, prompt_tokens=load.prompt_tokens)
            measure(running, warm_up if setting.is_cuda else level)
            for seed in range(scale.repeats + 1):
                found.append(measure(running, replace(level, seed=seed)))
                if found[-1].failures:
                    raise RuntimeError(f"requests failed: {'; '.join(found[-1].failures[:3])}")
                # The first run may still warm up; it counts only without another.
                emit(served(load, found[1:] or found))
                if not setting.has_time_for(SECONDS + STOP_SECONDS):
                    break
        emit(cold_start(setting, folder, flags))


def cold_start(setting: Setting, model: Path, flags: Sequence[str]) -> Figure:
    """The time to ready of a server that has no compiled kernels, as far as the stage has time for it."""
    seconds, began = setting.seconds_left() - STOP_SECONDS, time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        try:
            with serving(
                model,
                log=setting.out / "cold-start.log",
                flags=flags,
                environment={CACHE: cache},
                ready_seconds=seconds,
            ):
                return ready("empty", time.monotonic() - began)
        except ServerError as error:
            return unchecked(READY.format("empty"), str(error).partition("\n")[0].rstrip(":"))


def ready(cache: str, seconds: float) -> Figure:
    """The time from the launcher's start until `/health` answers with 200."""
    return Figure(name=READY.format(cache), kind=goals.READY, value=seconds, unit="s")


def served(load: Load, found: Sequence[Measurement]) -> Figure:
    """The figure of these runs."""
    detail = {
        "first_token_ms": median(each.first_token_ms.p50 for each in found),
        "between_tokens_ms": median(each.between_tokens_ms.p50 for each in found),
        "between_tokens_p99_ms": median(each.between_tokens_ms.p99 for each in found),
        "client_cores": median(each.client_cores for each in found),
    }
    rates = [each.tokens_per_second for each in found]
    return replace(load_figure("server", load, rates, detail), kind=goals.SERVER)
