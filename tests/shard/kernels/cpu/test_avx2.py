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


PRINT_DIGEST = """
import hashlib, torch
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.packed_weight import packed_codes
from millrace_shard.kernels.quantized import CodeFormat
load_operators()
torch.ops.millrace.use_amx(False)
torch.manual_seed(0)
digest = hashlib.sha256()
for values in (range(16), range(-8, 8), range(-128, 128)):
    for group in (16, 32, 96, 128, None):
        form = CodeFormat(values=tuple(values), group_size=group, has_offsets=group == 32)
        packed = packed_codes([form.random(80, 704, torch.device("cpu"))], integer=True)
        for rows in (1, 21):
            y, x = torch.empty(rows, 80), torch.randn(rows, 704).bfloat16()
            torch.ops.millrace.panel_linear(y, x, packed, torch.empty(0))
            digest.update(y.numpy().tobytes())
print("digest", digest.hexdigest())
"""


@pytest.mark.ecosystem
def test_integer_products_have_the_same_bits_with_every_instruction_set() -> None:
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        pytest.skip("this CPU has no AVX512")
    digests = [
        subprocess.run(
            [sys.executable, "-c", PRINT_DIGEST],
            env=os.environ | changes,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("digest")[1]
        for changes in ({}, WITHOUT_AVX512)
    ]
    assert digests[0] == digests[1]


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
