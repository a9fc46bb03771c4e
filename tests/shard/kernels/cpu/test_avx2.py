"""Tests of the operators over tiles once more, in a process that takes this CPU for one without AVX512.

It compiles the operators for such a CPU, and so needs a C++ compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from millrace_shard.kernels.build import BuildError, load_operators

ROOT = Path(__file__).parents[4]
TESTS = (
    "kernels/cpu/test_quantized_layers.py",
    "kernels/cpu/test_quantized_weights.py",
    "kernels/cpu/test_cpu_kernels.py",
    "kernels/cpu/test_int8_linear.py",
    "kernels/cpu/test_lora_tiles.py",
    "kernels/cpu/test_operator_edges.py",
    "kernels/cpu/test_tile_blocks.py",
    "invariance/test_invariance.py",
)
ELSEWHERE = (
    "threads_that_do_not_yet_agree",
    "running_out_of_memory",
    "weights_outlive",
)
"""Parts of tests' names that are about threads and memory, which do not differ, and take seconds."""
WITHOUT_AVX512 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.mark.ecosystem
def test_tiles_are_multiplied_exactly_without_avx512() -> None:
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        pytest.skip("these tests run by AVX2 anyway")
    try:
        load_operators()
    except BuildError as error:
        pytest.skip(str(error))
    chosen = " and not ".join(("avx2", *ELSEWHERE))
    files = [str(ROOT / "tests" / "shard" / name) for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files],
        cwd=ROOT,
        env=os.environ | WITHOUT_AVX512,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "not by avx2" not in done.stdout, "skipped for another unit"
