"""Steps of a small model, in which the CPU work around them shows."""

from __future__ import annotations

from dataclasses import replace

from bench.gpu import goals
from bench.gpu.engine.measure import measure_decode
from bench.gpu.engine.session import opened
from bench.gpu.setting import Emit, Setting


def run(setting: Setting, emit: Emit) -> None:
    """Emit the time of a step at each context."""
    scale = setting.scale
    with opened(scale.small, scale, setting.device, setting.flags) as model:
        session = model.session(max_rows=scale.small_batch)
        for context in scale.small_contexts:
            session.clear()
            session.admit(scale.small_batch, context, room=scale.room)
            figure = measure_decode(
                session,
                scale.small,
                scale.small_batch,
                num_warm_ups=scale.num_warm_ups,
                num_steps=scale.num_steps,
            )
            emit(replace(figure, name=f"small model, {figure.name}", kind=goals.SMALL))
