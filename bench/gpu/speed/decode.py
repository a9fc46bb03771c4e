"""Steps of decodes at every batch size, what the device does in them, then a whole load."""

from __future__ import annotations

from dataclasses import replace

from bench.gpu import goals
from bench.gpu.engine.measure import measure_decode, measure_load
from bench.gpu.engine.profile import measure_activity
from bench.gpu.engine.session import opened
from bench.gpu.setting import Emit, Setting

SECONDS = 6.0
"""Time for one more run of the load."""


def run(setting: Setting, emit: Emit) -> None:
    """Emit each batch size, then what a step does, then the rate of the load."""
    scale = setting.scale
    with opened(scale.model, scale, setting.device, setting.flags) as model:
        session = model.session(max_rows=max(*scale.batches, scale.load.streams))
        for rows in scale.batches:
            session.admit(rows - session.num_rows, scale.context, room=scale.room)
            figure = measure_decode(
                session,
                scale.model,
                rows,
                num_warm_ups=scale.num_warm_ups,
                num_steps=scale.num_steps,
            )
            emit(replace(figure, kind=goals.DECODE))
        for rows in scale.batches:
            activity = measure_activity(session, rows, num_steps=scale.num_profiled)
            if activity is not None:
                emit(activity)
        for figure in measure_load(session, scale.load, repeats=scale.repeats):
            emit(replace(figure, kind=goals.ENGINE))
            if not setting.has_time_for(SECONDS):
                break
