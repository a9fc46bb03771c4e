"""Figures of the engine: decodes, prefill, and a whole load without a server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

from bench.comparison.roofline import BYTES, attention_flops, cache_bytes, layer_weights
from bench.gpu.engine.scale import Load
from bench.gpu.engine.session import Session, StepTimes
from bench.gpu.figures import Figure
from bench.harness.checkpoints import Shape


def decode_bytes(shape: Shape, context: float) -> float:
    """Bytes that a step reads: every weight once, head included, and the keys and values of `context` tokens."""
    weights = layer_weights(shape) + shape.hidden_size * shape.vocab_size
    return BYTES * weights + cache_bytes(shape) * context


def prefill_flops(shape: Shape, lengths: Sequence[int]) -> float:
    """Operations of a step over whole prompts; half of each square of attention is masked."""
    head = shape.hidden_size * shape.vocab_size
    flops = 2.0 * (layer_weights(shape) * sum(lengths) + head * len(lengths))
    return flops + sum(attention_flops(shape, n * (n + 1) // 2) for n in lengths)


def measure_decode(
    session: Session, shape: Shape, rows: int, *, num_warm_ups: int, num_steps: int
) -> Figure:
    """Median time of a step over the first `rows` sequences, which must exist."""
    session.decode(rows, num_warm_ups)
    before = session.context(rows)
    times = session.decode(rows, num_steps)
    context = (before + session.context(rows)) / 2
    return Figure(
        name=f"decode, batch {rows}, context {round(context / rows)}",
        value=statistics.median(times.step),
        unit="ms",
        detail={
            "rows": rows,
            "bytes": decode_bytes(shape, context),
            **_parts(times),
        },
    )


def measure_prefill(
    session: Session, shape: Shape, rows: int, length: int, *, repeats: int
) -> Figure:
    """Median time of the one step that computes all the prompts, on the device."""
    found: list[float] = []
    walls: list[float] = []
    for _ in range(repeats + 1):
        session.clear()
        began = time.perf_counter()
        results = session.admit(rows, length, room=1)
        walls.append(1000 * (time.perf_counter() - began))
        found.append(sum(r.timings.forward_ns + r.timings.decode_ns for r in results) / 1e6)
    session.clear()
    return Figure(
        name=f"prefill, {rows} x {length}",
        value=statistics.median(found[1:]),
        unit="ms",
        detail={
            "flops": prefill_flops(shape, [length] * rows),
            "wall_ms": statistics.median(walls[1:]),
        },
    )


def measure_load(session: Session, load: Load, *, repeats: int) -> Iterator[Figure]:
    """Output tokens a second of requests that all arrive at once, from submission to the last token.

    There is a figure after each run, over the runs so far. The first run may warm up, and counts only alone.
    """
    rates: list[float] = []
    for _ in range(repeats + 1):
        session.clear()
        began = time.perf_counter()
        session.admit(load.streams, load.prompt_tokens, room=load.new_tokens)
        session.decode(load.streams, load.new_tokens - 1)
        rates.append(load.streams * load.new_tokens / (time.perf_counter() - began))
        session.clear()
        yield load_figure("engine", load, rates[1:] or rates)


def load_figure(
    who: str, load: Load, rates: Sequence[float], detail: dict[str, float] | None = None
) -> Figure:
    """The median rate of one load."""
    return Figure(
        name=f"{who}, {load.streams} x ({load.prompt_tokens} in, {load.new_tokens} out)",
        value=statistics.median(rates),
        unit="tok/s",
        detail={"least": min(rates), "most": max(rates), **(detail or {})},
    )


def _parts(times: StepTimes) -> dict[str, float]:
    return {
        "forward_ms": statistics.median(times.forward),
        "sampling_ms": statistics.median(times.sampling),
        "host_ms": statistics.median(times.host),
        "worst_ms": max(times.step),
    }
