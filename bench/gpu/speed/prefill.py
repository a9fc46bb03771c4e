"""One step of whole prompts."""

from __future__ import annotations

from dataclasses import replace

from bench.gpu import goals
from bench.gpu.engine.measure import measure_prefill
from bench.gpu.engine.session import opened
from bench.gpu.setting import Emit, Setting


def run(setting: Setting, emit: Emit) -> None:
    """Emit the time of the step; it needs no graphs."""
    scale = setting.scale
    rows, length = scale.prefill
    flags = (*setting.flags, "--cuda-graphs=0")
    with opened(scale.model, scale, setting.device, flags) as model:
        session = model.session(max_rows=rows)
        figure = measure_prefill(session, scale.model, rows, length, repeats=scale.repeats)
        emit(replace(figure, kind=goals.PREFILL))
