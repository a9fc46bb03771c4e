"""Steps of decodes at every batch size, what the device does in them, then a whole load."""

from __future__ import annotations

from dataclasses import replace

from bench.gpu import goals
from bench.gpu.engine.measure import measure_decode, measure_load
from bench.gpu.engine.profile import measure_activity, write_trace
from bench.gpu.engine.session import Session, opened
from bench.gpu.figures import Figure
from bench.gpu.setting import Emit, Setting

TRACE = "trace.json.gz"
SECONDS = 6.0
"""Time for one more run of the load."""


def run(setting: Setting, emit: Emit) -> None:
    """Emit each batch size, then what a step does, a trace, and the rate of the load."""
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
        emit(traced(session, setting))
        for figure in measure_load(session, scale.load, repeats=scale.repeats):
            emit(replace(figure, kind=goals.ENGINE))
            if not setting.has_time_for(SECONDS):
                break


def traced(session: Session, setting: Setting) -> Figure:
    """A trace in the folder of the page, of the second batch size, whose sequences begin anew."""
    scale = setting.scale
    rows = scale.batches[1]
    session.clear()
    session.admit(rows, scale.context, room=scale.num_profiled)
    return write_trace(session, setting.out / TRACE, rows, scale.context)
