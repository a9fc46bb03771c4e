"""`python -m bench.profile --rows 32`: the operators of one decode step, by their own time.

It runs the shard's own step in this process, with the environment of a shard. Operators are timed by torch's profiler;
the time of a step is measured without it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench.harness.checkpoints import SHAPES, ensure_checkpoint
from bench.harness.repeats import figure
from bench.harness.tables import markdown
from bench.peers.engines import launch_environment
from millrace.load.measurement import quantile
from millrace_proto.cores import usable_cores
from millrace_shard.batch.sequence import Sequence as ShardSequence
from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.commands.composition import load
from millrace_shard.config import ShardConfig
from millrace_shard.engine.kv_capacity import WarmupRequest
from millrace_shard.engine.warmup import MemoryLimits, warm_up
from millrace_shard.model_runner.runner import StepRunner

READY = "MILLRACE_BENCH_PROFILE"
"""Environment variable that marks the environment of a shard."""
MOST_SHOWN = 25


def new_runner(model: Path, *, rows: int, tokens: int, flags: Sequence[str]) -> StepRunner:
    """A warmed-up shard with room for `rows` sequences of `tokens` tokens."""
    config = ShardConfig.from_args([*flags, str(model)])
    loaded = load(config, torch.device("cpu"))
    request = WarmupRequest(
        max_batch_prefill_tokens=4096,
        max_batch_size=rows,
        max_concurrent_requests=rows,
        max_total_tokens=tokens + 1,
    )
    return warm_up(loaded, request, MemoryLimits(kv_memory=config.kv_memory)).runner


def admit(runner: StepRunner, *, rows: int, context: int, tokens: int) -> Callable[[], None]:
    """Compute the prompts of a batch; returns a function that decodes one step of it."""
    size = runner.batch.limits.block_size
    per_row = -(-tokens // size)
    generator = np.random.default_rng(0)
    slots = np.arange(rows, dtype=np.int64)
    vocab_size = runner.batch.limits.vocab_size
    admitted = tuple(
        ShardSequence(
            slot=row, request_id=row, input_ids=generator.integers(1, vocab_size, context)
        )
        for row in range(rows)
    )
    change = BatchChange(
        admitted=admitted,
        grown_slots=np.repeat(slots, per_row),
        grown_blocks=np.arange(1, 1 + rows * per_row, dtype=np.int64),
    )
    chunks = np.full(rows, context, dtype=np.int64)
    runner.launch(Forward(change=change, chunk_slots=slots, chunk_tokens=chunks)).finish()

    def step() -> None:
        runner.launch(Forward(decode_slots=slots)).finish()

    return step


def timed(step: Callable[[], None], count: int) -> list[float]:
    """Microseconds of each step, without the profiler."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        found.append(1e6 * (time.perf_counter() - start))
    return found


def operators(step: Callable[[], None], count: int) -> dict[str, float]:
    """Microseconds of each operator in a step, its own time, longest first; sizes of matrices tell ours apart."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(count):
            step()
    found: dict[str, float] = {}
    for event in profiler.key_averages(group_by_input_shape=True):
        name = label(event.key, event.input_shapes)
        found[name] = found.get(name, 0.0) + event.self_cpu_time_total / count
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def label(name: str, sizes: Sequence[Sequence[int]]) -> str:
    """An operator of ours with the sizes of its first matrices, because one serves many layers; else the name."""
    if name.startswith("aten::"):
        return name
    matrices = ["x".join(map(str, size)) for size in sizes if len(size) >= 2]
    return " ".join([name, ", ".join(matrices[:2])]).strip()


def table(own: dict[str, float], step_us: float) -> str:
    """Operators by own time, and the time between them."""
    rest = step_us - sum(own.values())
    shown = [*list(own.items())[:MOST_SHOWN], ("between operators (Python, numpy)", rest)]
    lines = [(name, figure(us), f"{100 * us / step_us:.1f} %") for name, us in shown]
    return markdown(("operator", "µs a step", "share"), lines)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--model", default="135m", choices=SHAPES)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--flags", default="", help="more flags for the shard, in one string")
    options = parser.parse_args()
    if READY not in os.environ:
        environment = {**os.environ, **launch_environment(), READY: "1"}
        command = [sys.executable, "-m", "bench.profile", *sys.argv[1:]]
        os.execve(sys.executable, command, environment)
    torch.set_num_threads(usable_cores())
    model, tokens = ensure_checkpoint(options.model), options.context + 4 * options.steps + 8
    with torch.inference_mode():
        runner = new_runner(model, rows=options.rows, tokens=tokens, flags=options.flags.split())
        step = admit(runner, rows=options.rows, context=options.context, tokens=tokens)
        timed(step, 3)
        steps = sorted(timed(step, options.steps))
        own = operators(step, options.steps)
    step_us, p99 = statistics.median(steps), quantile(steps, 0.99)
    title = f"One decode step, {options.model}, {options.rows} rows at context {options.context}"
    spread = f"p99 {p99:.0f} µs, {p99 / step_us:.2f} of the median"
    print(f"{title}: {step_us:.0f} µs; {spread}\n\n{table(own, step_us)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
