"""`python -m bench.profile --rows 32`: a flame graph of one decode step.

It runs the shard's own step in this process, with the environment of a shard. The times come from torch's
profiler with Python frames, and include its cost; the chart states the time of a step without it. Operators
are blue. `--apart` calls each half of a layer separately where one operator computes all layers, so that
the chart shows them apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench.harness.checkpoints import SHAPES, ensure_checkpoint
from bench.harness.paths import MODELS_FOLDER, OUT
from bench.harness.repeats import figure
from bench.harness.tables import markdown
from bench.peers.engines import launch_environment
from bench.profile.flames import Event, Frame, flame_graph, own_times, tree
from millrace.load.measurement import quantile
from millrace_launcher.host.threads import usable_cores
from millrace_shard.batch.sequence import Sequence as ShardSequence
from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.commands.composition import load
from millrace_shard.config import ShardConfig
from millrace_shard.engine.kv_capacity import WarmupRequest
from millrace_shard.engine.warmup import MemoryLimits, warm_up
from millrace_shard.kernels.base import Layer, Layers, Reduce
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.layer_blocks import ComposedBlocks
from millrace_shard.model_runner.runner import StepRunner

READY = "MILLRACE_BENCH_PROFILE"
"""Environment variable that marks the environment of a shard."""
OPERATOR = "cpu_op"
CATEGORIES = (OPERATOR, "python_function", "user_annotation")
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
    return lambda: void(runner.launch(Forward(decode_slots=slots)).finish())


class BothWays:
    """All layers by one operator, or each half by its own; switchable between steps."""

    def __init__(self, *, apart: bool) -> None:
        self.apart = apart

    @classmethod
    def installed(cls, *, apart: bool) -> BothWays:
        """Install itself in place of the CPU kernels' layers."""
        ways, as_one = cls(apart=apart), CpuKernels.layers

        def both(kernels: CpuKernels, layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
            by_half = ComposedBlocks.layers(kernels, layers, reduce)
            by_one = as_one(kernels, layers, reduce)
            return lambda *step: by_half(*step) if ways.apart else by_one(*step)

        CpuKernels.layers = both  # type: ignore[method-assign, assignment]
        return ways

    def compared(self, step: Callable[[], None], count: int) -> str:
        """Time both ways in turn, `count` times."""
        taken: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * count):
            self.apart = number % 2 == 1
            taken[self.apart] += timed(step, 1)
        pairs = zip(taken[False], taken[True], strict=True)
        ratio = statistics.median(one / halves for one, halves in pairs)
        one, halves = (statistics.median(each) for each in taken.values())
        return f"{one:.0f} µs by one operator, {halves:.0f} by halves; median ratio of {count} pairs {ratio:.3f}"


def void(_: object) -> None:
    """Do nothing."""


def timed(step: Callable[[], None], count: int) -> list[float]:
    """Microseconds of each step, without the profiler."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        found.append(1e6 * (time.perf_counter() - start))
    return found


def traced(step: Callable[[], None], count: int, *, python: bool) -> Frame:
    """The tree of `count` steps with Python frames or without, as microseconds of one."""
    with profile(
        activities=[ProfilerActivity.CPU], with_stack=python, record_shapes=True
    ) as profiler:
        for _ in range(count):
            step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return tree("step", events_of(trace["traceEvents"])).scaled(1 / count)


def events_of(trace: Sequence[dict[str, Any]]) -> list[Event]:
    """The calls of the busiest thread."""
    calls = [e for e in trace if e.get("ph") == "X" and e.get("cat") in CATEGORIES]
    threads = [e["tid"] for e in calls]
    busiest = max(set(threads), key=threads.count)
    return [
        Event(label(e), e["ts"], e["dur"], is_operator=e["cat"] == OPERATOR)
        for e in calls
        if e["tid"] == busiest
    ]


def label(call: dict[str, Any]) -> str:
    """An operator of ours with the sizes of its matrices, because one serves many layers; else the name."""
    name = str(call["name"])
    if call["cat"] != OPERATOR or name.startswith("aten::"):
        return short_name(name)
    sizes = call.get("args", {}).get("Input Dims", [])
    matrices = ["x".join(map(str, size)) for size in sizes if len(size) >= 2]
    return " ".join([name, ", ".join(matrices[:2])]).strip()


def short_name(name: str) -> str:
    """`package/file.py(12): call` for a Python frame, anything else as it is."""
    path, separator, call = name.rpartition("): ")
    return f"{'/'.join(path.split('/')[-2:])}{separator}{call}" if separator else name


def table(operators: Frame, step_us: float) -> str:
    """Operators by own time, and the time between them."""
    own = own_times(operators)
    own.pop(operators.name)
    rest = step_us - sum(own.values())
    shown = [*list(own.items())[:MOST_SHOWN], ("between operators (Python, numpy)", rest)]
    lines = [(name, figure(us), f"{100 * us / step_us:.1f} %") for name, us in shown]
    return markdown(("operator", "µs a step", "share"), lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--model", default="135m", choices=SHAPES)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--flags", default="", help="more flags for the shard, in one string")
    parser.add_argument("--out", type=Path, help="the chart; bench/out/profile-ROWS.svg by default")
    parser.add_argument("--apart", action="store_true", help="call each half of a layer by itself")
    parser.add_argument("--compare", action="store_true", help="only time both ways in turn")
    options = parser.parse_args()
    if READY not in os.environ:
        environment = {**os.environ, **launch_environment(), READY: "1"}
        os.execve(
            sys.executable, [sys.executable, "-m", "bench.profile", *sys.argv[1:]], environment
        )
    torch.set_num_threads(usable_cores())
    ways = BothWays.installed(apart=options.apart)
    model = ensure_checkpoint(options.model, folder=MODELS_FOLDER)
    tokens = options.context + 4 * options.steps + 8
    with torch.inference_mode():
        runner = new_runner(model, rows=options.rows, tokens=tokens, flags=options.flags.split())
        step = admit(runner, rows=options.rows, context=options.context, tokens=tokens)
        timed(step, 3)
        if options.compare:
            print(ways.compared(step, options.steps))
            return 0
        steps = timed(step, options.steps)
        step_us = statistics.median(steps)
        operators = traced(step, options.steps, python=False)
        calls = traced(step, options.steps, python=True)
    title = f"One decode step, {options.model}, {options.rows} rows at context {options.context}"
    notes = [
        f"{step_us:.0f} µs without the profiler, {calls.total:.0f} µs with it; blue: operators",
        f"operators take {operators.total:.0f} µs when Python is not traced",
    ]
    target = options.out or OUT / f"profile-{options.rows}.svg"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(flame_graph(title, calls, notes))
    p99 = quantile(sorted(steps), 0.99)
    spread = f"p99 {p99:.0f} µs, {p99 / step_us:.2f} of the median"
    print(f"{title}: {notes[0]}; {spread}\n\n{table(operators, step_us)}\n\n{target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
