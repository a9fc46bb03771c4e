"""`millrace env`: the facts that a bug report needs, without secrets and without paths."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from millrace.commands.parser import Parser
from millrace_launcher.host.runtime import output_of, version_of
from millrace_launcher.host.threads import find_intel_openmp
from millrace_proto.cores import usable_cores
from millrace_proto.gpus import query_gpus
from millrace_proto.version import VERSION

PROGRAM = "millrace env"
LIBRARIES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub"),
    *("llguidance", "numpy", "intel-openmp", "grpcio", "protobuf", "aiohttp", "uvloop"),
    *("pydantic", "orjson", "jinja2"),
)
FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("avx_vnni", "amx_tile", "amx_int8", "amx_bf16", "asimd", "sve", "bf16", "i8mm"),
)
"""Instructions that matter to kernels, as Linux names them."""
MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Files of cgroups 2 and 1."""
UNLIMITED = 2**60


def main(argv: Sequence[str]) -> int:
    """Print the facts, one a line."""
    parser = Parser(
        PROGRAM,
        usage="[--json]",
        description="Prints versions, processor, memory, GPUs and kernels, for a bug report.\n"
        "It has no host name, no user name, no path and no value of a variable.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    report = dict(facts())
    if arguments.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        width = max(map(len, report))
        sys.stdout.writelines(f"{name:{width}}  {value}\n" for name, value in report.items())
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """(name, value) of every fact, in the order of the output."""
    yield "millrace", VERSION
    yield "python", f"{platform.python_implementation()} {platform.python_version()}"
    libc = " ".join(platform.libc_ver())
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()} {libc}".strip()
    yield from processor(Path("/proc/cpuinfo"))
    yield "cores", f"{usable_cores()} usable, {os.cpu_count()} in all"
    yield "memory", memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))
    gpus = query_gpus("name,memory.total,driver_version")
    yield "GPUs", "; ".join(gpus) or "none that nvidia-smi shows"
    yield from ((name, version_of(name)) for name in LIBRARIES)
    compiler = output_of(os.environ.get("CXX") or "g++", "--version")
    yield "C++ compiler", compiler.splitlines()[0] if compiler else "none"
    yield "Intel OpenMP", "found" if find_intel_openmp() else "not found"
    yield from torch_facts()


def processor(cpuinfo: Path) -> Iterator[tuple[str, str]]:
    """The name of the CPU, and its features that matter to kernels."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    rows: Mapping[str, str] = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    yield "CPU", rows.get("model name") or platform.processor() or platform.machine()
    words = set((rows.get("flags") or rows.get("Features") or "").split())
    yield "CPU features", " ".join(name for name in FEATURES if name in words) or "unknown"


def memory(meminfo: Path, cgroup: Path) -> str:
    """Memory of the machine, and the limit of the container."""
    sizes = {}
    for line in meminfo.read_text().splitlines() if meminfo.exists() else []:
        name, _, value = line.partition(":")
        sizes[name] = int(value.split()[0]) * 1024
    text = f"{_gib(sizes.get('MemTotal', 0))}, {_gib(sizes.get('MemAvailable', 0))} available"
    for name in MEMORY_LIMITS:
        limit = cgroup / name
        if limit.exists() and (words := limit.read_text().strip()).isdecimal():
            if int(words) < UNLIMITED:
                text += f", limited to {_gib(int(words))}"
            break
    return text


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def torch_facts() -> Iterator[tuple[str, str]]:
    """How torch was built, and which kernels can run here."""
    if find_spec("torch") is None:
        yield "kernels", "torch is not installed"
        return
    import torch  # noqa: PLC0415

    from millrace_shard.kernels import build  # noqa: PLC0415

    yield (
        "torch on CPU",
        f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
    )
    yield (
        "torch CUDA",
        f"{torch.version.cuda or 'not built in'}, {torch.cuda.device_count()} device(s)",
    )
    try:
        best = build.toolchains()[0]
        if build.packaged_library(best):
            source = "in this package"
        elif best.compiler:
            source = "compiled once"
        else:
            source = "compiled before, else plain torch"
        yield "CPU kernels", f"{best.name}, {source}"
    except build.BuildError as error:
        yield "CPU kernels", f"plain torch: {error}"
    has_triton = find_spec("triton") is not None
    yield "CUDA kernels", "Triton" if has_triton and torch.cuda.is_available() else "none"
