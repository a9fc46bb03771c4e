"""The engine's load on `transformers`' continuous batching, without a server."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.gpu import goals
from bench.gpu.engine import peer
from bench.gpu.engine.measure import load_figure
from bench.gpu.setting import Emit, Setting

RUNS = 3
SECONDS = 15.0
"""Time for one more run of the load."""


def run(setting: Setting, emit: Emit) -> None:
    """Emit the median rate over all runs so far."""
    shape, load = setting.scale.model, setting.scale.load
    with tempfile.TemporaryDirectory() as folder:
        # Never closed: its thread may not end on request, and ends with this process.
        engine = peer.load(Path(folder), shape, setting.device, ExitStack())
    requests = peer.requests(shape, load)
    engine.run(requests[:4], 4)
    rates: list[float] = []
    for _ in range(RUNS):
        rates.append(peer.rate(engine.run(requests, len(requests))))
        # The first run may still warm up; it counts only without another.
        emit(replace(load_figure("transformers", load, rates[1:] or rates), kind=goals.PEER))
        if not setting.has_time_for(SECONDS):
            break
