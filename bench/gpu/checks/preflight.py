"""Whether the stages can work here: versions, the GPU's state, its other processes, the disk; then its measured limits.

A host on which later stages cannot work ends the run with one line.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.comparison.roofline import cache_bytes
from bench.gpu import goals, smi
from bench.gpu.engine.checkpoint import num_bytes
from bench.gpu.engine.clock import copy_rate, matrix_rate, read_rate
from bench.gpu.engine.scale import Scale
from bench.gpu.figures import Figure
from bench.gpu.setting import Emit, Setting, UnusableError
from bench.harness.paths import ROOT
from millrace_shard.commands.device_settings import PLAIN
from millrace_shard.device.gpus import report
from millrace_shard.kernels.build import missing_for_triton

PACKAGES = ("torch", "triton", "transformers", "vllm", "grpcio", "aiohttp", "pydantic")
GIT_SECONDS = 20.0
STEP_BYTES = 2 << 30
"""The context, the libraries and the largest step, beside weights and keys."""
CACHE_BYTES = 1 << 30
"""More than some 500 compiled kernels take on disk."""
CACHE = "TRITON_CACHE_DIR"
SHARED_MODES = ("Default", None)
"""Compute modes in which several processes may use the GPU; None: not reported."""

State = Mapping[str, str | None]
"""A GPU's smi.STATE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts of this host that decide which stages can run."""

    state: State
    """Empty where nvidia-smi does not answer."""
    others: tuple[str, ...]
    """Processes that use the GPU."""
    free_memory: int
    """Bytes of the GPU."""
    free_disk: int
    """Bytes for compiled kernels."""
    cache: Path
    missing: str | None
    """A program or header that Triton needs and this host does not have; None if it has all."""


def run(setting: Setting, emit: Emit) -> None:
    """Emit the facts first, then each limit; raises UnusableError where later stages cannot work."""
    device, scale = setting.device, setting.scale
    cores = float(os.cpu_count() or 0)
    if setting.is_cuda:
        problem = report(plain=PLAIN in setting.shard_flags).problem
        if problem is not None:
            emit(Figure(name="machine", value=cores, unit="cores", detail=versions()))
            raise UnusableError(problem)
        host, links = look()
        detail = versions() | properties() | shown(host, links)
        detail["notes"] = "; ".join(notes(host, scale)) or "none"
        emit(Figure(name="machine", value=cores, unit="cores", detail=detail))
        if (problem := obstacle(host, scale)) is not None:
            raise UnusableError(problem)
    else:
        emit(Figure(name="machine", value=cores, unit="cores", detail=versions()))
    limits: dict[str, Callable[[], float]] = {
        goals.READ_RATE: lambda: read_rate(device, scale.buffer_bytes),
        goals.COPY_RATE: lambda: copy_rate(device, scale.buffer_bytes),
        goals.MATRIX_RATE: lambda: matrix_rate(device, scale.matrix_size),
    }
    for kind, measure in limits.items():
        value = measure() / goals.PREFIX[kind]
        emit(Figure(name=kind, value=value, unit=goals.UNIT[kind], kind=kind))


def obstacle(host: Host, scale: Scale) -> str | None:
    """Why later stages cannot work; None if they can."""
    mode = host.state.get("compute_mode")
    if mode not in SHARED_MODES:
        return (
            f"the GPU's compute mode is {mode}, and stages use it from several processes:"
            " nvidia-smi --compute-mode=DEFAULT"
        )
    if host.missing is not None:
        return host.missing
    needed = num_bytes(scale.model) + STEP_BYTES
    if host.free_memory < needed:
        others = f", by {', '.join(host.others)}" if host.others else ""
        return (
            f"the model needs {_gib(needed)}, and {_gib(host.free_memory)} of the GPU are free,"
            f" the rest is used{others}: end these processes, or take --shape=tiny"
        )
    if host.free_disk < CACHE_BYTES:
        return (
            f"compiled kernels need up to {_gib(CACHE_BYTES)}, and {host.cache} has"
            f" {_gib(host.free_disk)} free: {CACHE} names another folder"
        )
    return None


def notes(host: Host, scale: Scale) -> Iterator[str]:
    """Yield warnings: the run can go on, with worse figures or failing stages."""
    state = host.state
    if not state:
        yield "nvidia-smi does not answer: no clocks, and nothing says whether figures are throttled"
    if state.get("persistence_mode") == "Disabled":
        yield "persistence mode is off: each first process waits for the driver"
    if state.get("mig.mode.current") == "Enabled":
        yield "MIG is on: data sheets are of whole GPUs"
    if host.others:
        yield f"other processes use the GPU: {', '.join(host.others)}"
    width, most = state.get("pcie.link.width.current"), state.get("pcie.link.width.max")
    if width != most and None not in (width, most):
        yield f"PCIe has {width} of {most} lanes"
    largest = num_bytes(scale.model) + STEP_BYTES
    largest += int(cache_bytes(scale.model) * max(scale.batches) * scale.longest)
    if host.free_memory < largest:
        yield (
            f"the largest batches need {_gib(largest)}, of which {_gib(host.free_memory)} are free:"
            " stages with them fail"
        )


def versions() -> dict[str, str]:
    """Versions of packages and the commit."""
    seen = {
        "commit": _commit() or "unknown",
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for name in PACKAGES:
        try:
            seen[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            seen[name] = "not installed"
    seen["CUDA of torch"] = torch.version.cuda or "none"
    seen["FlashAttention-3"] = "there" if find_spec("flash_attn_interface") else "not there"
    seen["compute-sanitizer"] = shutil.which("compute-sanitizer") or "not there"
    return seen


def properties() -> dict[str, str]:
    """Return the properties of the GPU as torch reports them."""
    device = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu": device.name,
        "uuid": f"GPU-{getattr(device, 'uuid', '')}",
        "compute capability": f"{device.major}.{device.minor}",
        "memory": f"{_gib(free)} of {_gib(total)} free",
        "multiprocessors": str(device.multi_processor_count),
        # The tilings of attention are fitted to it.
        "shared memory": str(getattr(device, "shared_memory_per_block_optin", "unknown")),
    }


def look() -> tuple[Host, dict[str, str]]:
    """The host, and the links from its first GPU to the others."""
    uuid, cache = properties()["uuid"], Path(os.environ[CACHE])
    cache.mkdir(parents=True, exist_ok=True)
    states = smi.states()
    state = next((row for row in states if row["uuid"] == uuid), states[0] if states else {})
    text = smi.query(f"--query-compute-apps={','.join(smi.PROCESS)}", smi.FORMAT) or ""
    missing = "Triton is not installed" if find_spec("triton") is None else missing_for_triton()
    host = Host(
        state=state,
        others=tuple(other_processes(text, uuid)),
        free_memory=torch.cuda.mem_get_info()[0],
        free_disk=shutil.disk_usage(cache).free,
        cache=cache,
        missing=missing,
    )
    links = smi.read_links(smi.query("topo", "-m") or "", int(state.get("index") or 0))
    return host, links


def other_processes(text: str, uuid: str) -> Iterator[str]:
    """The processes on the GPU `uuid` in a list of smi.PROCESS, except this one."""
    for row in smi.read_rows(text, smi.PROCESS):
        if row["gpu_uuid"] == uuid and row["pid"] != str(os.getpid()):
            used = "" if row["used_memory"] is None else f", {row['used_memory']} MiB"
            yield f"{Path(row['process_name'] or 'unknown').name} (pid {row['pid']}{used})"


def shown(host: Host, links: Mapping[str, str]) -> dict[str, str]:
    """The host's facts by name."""
    state = {key: "not reported" if value is None else value for key, value in host.state.items()}
    seen = {
        "links": ", ".join(f"{gpu} by {link}" for gpu, link in links.items()) or "no other GPU",
        "free for kernels": _gib(host.free_disk),
    }
    if state:
        seen |= {
            "driver": state["driver_version"],
            "persistence mode": state["persistence_mode"],
            "ECC": state["ecc.mode.current"],
            "compute mode": state["compute_mode"],
            "MIG": state["mig.mode.current"],
            "PCIe": f"gen {state['pcie.link.gen.current']} of {state['pcie.link.gen.max']},"
            f" x{state['pcie.link.width.current']} of x{state['pcie.link.width.max']}",
            "highest clocks": f"{state['clocks.max.sm']} and {state['clocks.max.memory']} MHz",
            "power limit": f"{state['power.limit']} W",
        }
    return seen


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _commit() -> str | None:
    command = ("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
