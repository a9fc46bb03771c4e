"""The engine's load on vLLM, without a server, where it is installed beside torch with CUDA."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from bench.gpu import goals
from bench.gpu.engine.checkpoint import temporary_checkpoint
from bench.gpu.engine.measure import load_figure
from bench.gpu.engine.peer import rate, requests
from bench.gpu.figures import unchecked
from bench.gpu.setting import Emit, Setting
from bench.peers.worker import Limits
from millrace_proto.cores import usable_cores

RUNS = 3
SECONDS = 8.0
"""Time for one more run of the load."""


def run(setting: Setting, emit: Emit) -> None:
    """Emit the median rate over all runs so far; where vLLM is missing, one line that says so."""
    if find_spec("vllm") is None:
        emit(unchecked("the load on vLLM", "vLLM is not installed here"))
        return
    # vLLM's modules are imported with its engine.
    from bench.peers import vllm_engine  # noqa: PLC0415

    shape, load = setting.scale.model, setting.scale.load
    length = load.prompt_tokens + load.new_tokens
    limits = Limits(
        max_streams=load.streams,
        max_tokens=length,
        kv_tokens=load.streams * length,
        threads=usable_cores(),
    )
    with temporary_checkpoint(shape, setting.device) as folder:
        # On a GPU with its defaults: graphs and compiled layers.
        engine = vllm_engine.load(folder, limits, enforce_eager=not setting.is_cuda)
        wanted = requests(shape, load)
        engine.run(wanted[:4], 4)
        rates: list[float] = []
        for _ in range(RUNS):
            rates.append(rate(engine.run(wanted, len(wanted))))
            # The first run may still warm up; it counts only without another.
            emit(replace(load_figure("vLLM", load, rates[1:] or rates), kind=goals.VLLM))
            if not setting.has_time_for(SECONDS):
                break
