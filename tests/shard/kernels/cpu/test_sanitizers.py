"""The tests of the CPU kernels over odd shapes, with each variant compiled for AddressSanitizer.

A variant that this CPU does not run is skipped. AVX-VNNI has a substitute: AVX-512 has its instruction on vectors of
256 bits. AMX is compiled, and runs where the system grants it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from millrace_shard.kernels import toolchain as builds
from millrace_shard.kernels.toolchain import SOURCES, Toolchain, TorchPackage, compile_library
from millrace_shard.kernels.variants import AVX2, VARIANTS, Variant, cpu_features

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
CACHE = ROOT / "build" / "sanitized"
"""Not the cache of servers: one without a compiler takes any compiler's library from that."""
SANITIZERS = (
    "-fsanitize=address",
    # Calls in place of inline checks, which take the compiler several times as long.
    "--param=asan-instrumentation-with-call-threshold=0",
    "-g1",
)
FLAGS = tuple("-O1" if flag == "-O2" else flag for flag in builds.COMMON_FLAGS)
"""With -O2, a compiler takes half an hour for the checked accesses of a variant, and two minutes without."""
RUNTIMES = ("libasan.so", "libstdc++.so.6")
OPTIONS = "detect_leaks=0:alloc_dealloc_mismatch=0"
"""Python and torch leave memory to the end of the process."""
TESTS = (
    "test_cpu_kernels.py",
    "test_int8_linear.py",
    "test_latent_attention.py",
    "test_lora_tiles.py",
    "test_operator_edges.py",
    "test_quantized_experts.py",
    "test_quantized_layers.py",
    "test_quantized_weights.py",
    "test_tile_blocks.py",
    "test_tile_experts.py",
)
LEFT_OUT = (
    # A sanitizer takes terabytes of address space, and keeps what was freed.
    "running_out_of_memory",
    "then_free_their_memory",
    # It starts a process, which would compile a library of its own, for half an hour.
    "threads_that_do_not_yet_agree",
)
RUN = """
import json, sys, pytest
from millrace_shard.kernels import toolchain, variants
fields = json.loads(sys.argv[1])
toolchain.COMMON_FLAGS = tuple(fields.pop("flags"))
fields["instructions"] = tuple(fields["instructions"])
variants.VARIANTS = (variants.Variant(**fields),)
sys.exit(pytest.main(sys.argv[2:]))
"""


def runnable(variant: Variant) -> Variant | None:
    """The variant, or its substitute, as this CPU runs it; None if it does not."""
    if variant.name == "avx2-vnni" and "avx_vnni" not in cpu_features():
        avx2 = VARIANTS[-1].instructions
        variant = replace(variant, instructions=(*avx2, "avx512f", "avx512vl", "avx512vnni"))
    return variant if variant.features <= cpu_features() else None


def runtimes(compiler: str) -> str:
    """The libraries that a process with a sanitized library loads first."""
    found = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in RUNTIMES
    ]
    if missing := [name for name, file in zip(RUNTIMES, found, strict=True) if name == file]:
        pytest.skip(f"the compiler lacks {', '.join(missing)}")
    return " ".join(found)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_kernels_access_only_their_own_memory(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, like = shutil.which("g++"), runnable(variant)
    if compiler is None or like is None:
        pytest.skip("no g++" if compiler is None else f"this CPU does not run {variant.name}")
    preloaded = runtimes(compiler)
    monkeypatch.setattr(builds, "COMMON_FLAGS", FLAGS)
    package = TorchPackage(Path(torch.__file__).parent, torch.__version__)
    toolchain = Toolchain.of(like, package, (compiler, *SANITIZERS))
    library = compile_library(SOURCES, CACHE / "kernels", toolchain)
    assert b"__asan_load" in library.read_bytes()
    changes = {
        "CXX": shlex.join((compiler, *SANITIZERS)),
        "MILLRACE_CACHE": str(CACHE),
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": OPTIONS,
        "ATEN_CPU_CAPABILITY": "avx2" if like.capability == AVX2 else "avx512",
    }
    arguments = ["-q", "-p", "no:cacheprovider", "-k", f"not ({' or '.join(LEFT_OUT)})"]
    files = [str(HERE / name) for name in TESTS]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            RUN,
            json.dumps(asdict(like) | {"flags": FLAGS}),
            *arguments,
            *files,
        ],
        cwd=ROOT,
        env=os.environ | changes,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert " passed" in done.stdout
