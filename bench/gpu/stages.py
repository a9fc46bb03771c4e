"""The stages: each runs in a process of its own, and emits each figure as soon as it is known."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from bench.gpu import goals
from bench.gpu.checkpoint import temporary_checkpoint
from bench.gpu.figures import Figure
from bench.gpu.limits import copy_rate, matrix_rate, read_rate
from bench.gpu.measure import load_figure, measure_decode, measure_load, measure_prefill
from bench.gpu.scale import GRAPH_SIZES, Load, Scale
from bench.gpu.session import Session, load, shard_flags, start
from bench.harness.checkpoints import Shape
from bench.harness.paths import ROOT
from millrace_shard.config import ShardConfig

if TYPE_CHECKING:
    from bench.harness.measurement import Measurement

Emit = Callable[[Figure], None]
GPU_TESTS = (
    "tests/shard/kernels/cuda/test_cuda_*.py",
    "tests/shard/model_runner/test_decode_graphs.py",
    "tests/shard/model_runner/test_no_waiting.py",
    "tests/shard/device/test_transfers.py",
)
OUTCOME = re.compile(r"::\S.* (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
"""The outcome in pytest's line of a finished test."""
PEER_RUNS = 3
PACKAGES = ("torch", "triton", "transformers", "grpcio", "aiohttp", "pydantic")


@dataclass(frozen=True, slots=True)
class Setting:
    """The device, the sizes and the flags of a stage."""

    device: torch.device
    scale: Scale
    out: Path
    shard_flags: tuple[str, ...] = ()
    """More flags for the shard."""


def machine(setting: Setting, emit: Emit) -> None:
    """The machine and its limits."""
    device, scale = setting.device, setting.scale
    emit(Figure(name="machine", value=float(os.cpu_count() or 0), unit="cores", detail=_facts()))
    limits: dict[str, Callable[[], float]] = {
        goals.READ_RATE: lambda: read_rate(device, scale.buffer_bytes),
        goals.COPY_RATE: lambda: copy_rate(device, scale.buffer_bytes),
        goals.MATRIX_RATE: lambda: matrix_rate(device, scale.matrix_size),
    }
    for kind, measure in limits.items():
        value = measure() / goals.PREFIX[kind]
        emit(Figure(name=kind, value=value, unit=goals.UNIT[kind], kind=kind))


def decode(setting: Setting, emit: Emit) -> None:
    """Steps of decodes at every batch size, then a whole load."""
    scale = setting.scale
    with _session(setting, scale.model, max(*scale.batches, scale.load.streams)) as session:
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
        figure = measure_load(session, scale.load, repeats=scale.repeats)
        emit(replace(figure, kind=goals.ENGINE))


def prefill(setting: Setting, emit: Emit) -> None:
    """One step of whole prompts."""
    scale = setting.scale
    rows, length = scale.prefill
    with _session(setting, scale.model, rows, graph_sizes=()) as session:
        figure = measure_prefill(session, scale.model, rows, length, repeats=scale.repeats)
        emit(replace(figure, kind=goals.PREFILL))


def small(setting: Setting, emit: Emit) -> None:
    """Steps of a small model, in which the CPU work around them shows."""
    scale = setting.scale
    with _session(setting, scale.small, scale.small_batch) as session:
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


def server(setting: Setting, emit: Emit) -> None:
    """The same load over HTTP: launcher, router and shard."""
    # They need packages that the machine may lack; then this stage alone fails.
    from bench.harness.levels import closed  # noqa: PLC0415
    from bench.harness.server import WARM_UP, measure, serving  # noqa: PLC0415

    scale, load_ = setting.scale, setting.scale.load
    level = closed(load_.streams, load_.prompt_tokens, load_.new_tokens, rounds=1)
    flags = (
        *shard_flags(setting.device),
        *setting.shard_flags,
        f"--max-total-tokens={scale.max_tokens}",
        f"--max-input-tokens={scale.max_tokens - 1}",
        f"--max-batch-prefill-tokens={scale.max_prefill_tokens}",
    )
    log = setting.out / "server.log"
    found: list[Measurement] = []
    with temporary_checkpoint(scale.model, setting.device) as folder, shown_on_exit(log):
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"checkpoint written to {folder}", flush=True)
        with serving(folder, log=log, flags=flags) as running:
            print("the server is ready", flush=True)
            measure(running, replace(WARM_UP, prompt_tokens=load_.prompt_tokens))
            measure(running, level)
            for seed in range(1, scale.repeats + 1):
                found.append(measure(running, replace(level, seed=seed)))
                if found[-1].failures:
                    raise RuntimeError(f"requests failed: {'; '.join(found[-1].failures[:3])}")
                emit(_served(load_, found))


def _served(load_: Load, found: Sequence[Measurement]) -> Figure:
    """The figure over all runs so far."""
    detail = {
        "first_token_ms": median(each.first_token_ms.p50 for each in found),
        "between_tokens_ms": median(each.between_tokens_ms.p50 for each in found),
        "between_tokens_p99_ms": median(each.between_tokens_ms.p99 for each in found),
        "client_cores": median(each.client_cores for each in found),
    }
    rates = [each.tokens_per_second for each in found]
    return replace(load_figure("server", load_, rates, detail), kind=goals.SERVER)


@contextmanager
def shown_on_exit(log: Path) -> Iterator[None]:
    """Print the end of `log` if the block ends with an exception, a timeout included."""
    try:
        yield
    except BaseException:
        if log.exists():
            lines = log.read_text(errors="replace").splitlines()
            print("\n".join(["the end of the server's log:", *lines[-20:]]), flush=True)
        raise


def transformers(setting: Setting, emit: Emit) -> None:
    """The same load on `transformers`' continuous batching, without a server."""
    from bench.gpu import peer  # noqa: PLC0415

    shape, load_ = setting.scale.model, setting.scale.load
    with tempfile.TemporaryDirectory() as folder:
        # Never closed: its thread may not end on request, and ends with this process.
        engine = peer.load(Path(folder), shape, setting.device, ExitStack())
    requests = peer.requests(shape, load_)
    engine.run(requests[:4], 4)
    rates: list[float] = []
    for _ in range(PEER_RUNS):
        rates.append(peer.rate(engine.run(requests, len(requests))))
        # The first run may still warm up; it counts only without another.
        emit(replace(load_figure("transformers", load_, rates[1:] or rates), kind=goals.PEER))


def tests(setting: Setting, emit: Emit) -> None:
    """The tests that need a GPU; at the time limit the finished tests count."""
    del setting
    if find_spec("pytest") is None:
        print("pytest is not installed", flush=True)
        return
    paths = sorted(str(path) for pattern in GPU_TESTS for path in ROOT.glob(pattern))
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *paths],
        cwd=ROOT,
        # Installed plugins may warn, and warnings are errors.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    outcomes: Counter[str] = Counter()
    status: int | None = None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            outcome = OUTCOME.search(line)
            if outcome:
                outcomes[outcome[1].lower()] += 1
            if not outcome or outcome[1] in ("FAILED", "ERROR"):
                print(line, end="", flush=True)
        status = process.wait()
    finally:
        summary = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
        emit(
            Figure(
                name="GPU tests",
                value=float(goals.STOPPED if status is None else status),
                unit="exit status",
                kind=goals.TESTS,
                detail={
                    "summary": summary or "none ran",
                    "failed": outcomes["failed"] + outcomes["error"],
                    "skipped": outcomes["skipped"],
                },
            )
        )


STAGES: dict[str, Callable[[Setting, Emit], None]] = {
    "machine": machine,
    "decode": decode,
    "prefill": prefill,
    "small": small,
    "server": server,
    "transformers": transformers,
    "tests": tests,
}


@contextmanager
def _session(
    setting: Setting, shape: Shape, max_rows: int, *, graph_sizes: Iterable[int] = GRAPH_SIZES
) -> Iterator[Session]:
    """An engine of random weights, warmed up."""
    with tempfile.TemporaryDirectory() as path:
        flags = (*shard_flags(setting.device, graph_sizes), *setting.shard_flags)
        config = ShardConfig.from_args([*flags, path])
        loaded = load(shape, config, setting.device, setting.scale.max_tokens)
        print(f"weights made, {loaded.kernels.name} kernels", flush=True)
        yield start(loaded, config, setting.scale, max_rows=max_rows)


def _facts() -> dict[str, str]:
    facts = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["memory"] = f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB"
    return facts
