"""Compiles the Triton kernels of sampling without a GPU; prints the name and compute capability of each."""

from __future__ import annotations

from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from millrace_shard.kernels.cuda import triton_penalties, triton_thresholds
from millrace_shard.kernels.cuda.triton_thresholds import KEYS_PER_PROGRAM, LEVELS

CAPABILITIES = (80, 90)
SHARED_BYTES = {80: 166912, 90: 232448}
INT64, FLOAT32 = "*i64", "*fp32"
POINTERS = {
    "sums": INT64,
    "keys": FLOAT32,
    "probabilities": FLOAT32,
    "prefixes": INT64,
    "budgets": INT64,
    "thresholds": FLOAT32,
    "counts": INT64,
    "table": "*i32",
    "spans": INT64,
    "scores": FLOAT32,
    "rows": INT64,
    "penalties": FLOAT32,
}


def compile_kernel(
    kernel: Any, capability: int, options: dict[str, object], **constants: object
) -> None:
    """Compile with aligned pointers, and sizes that are multiples of 16."""
    kinds = POINTERS | {"limits": FLOAT32 if constants.get("is_share") else INT64}
    signature, attributes = {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        signature[name] = "constexpr" if name in constants else kinds.get(name, "i32")
        if name not in constants and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    assert compiled.metadata.shared <= SHARED_BYTES[capability]
    print(kernel.__name__, capability)  # noqa: T201


def compile_thresholds(capability: int, *, has_probabilities: bool) -> None:
    """Every level."""
    for level, (low, num_bits) in enumerate(LEVELS):
        compile_kernel(
            triton_thresholds.weigh,
            capability,
            {"num_warps": 8},
            low=low,
            high=low + num_bits,
            num_buckets=1 << num_bits,
            has_probabilities=has_probabilities,
            chunk=KEYS_PER_PROGRAM,
        )
        compile_kernel(
            triton_thresholds.choose,
            capability,
            {"num_warps": 4},
            num_buckets=1 << num_bits,
            is_first=level == 0,
            is_last=level == len(LEVELS) - 1,
            is_share=has_probabilities,
        )


def compile_penalties(capability: int) -> None:
    """Counts and penalties."""
    chunk = triton_penalties.TOKENS_PER_PROGRAM
    compile_kernel(triton_penalties.count, capability, {"num_warps": 4}, chunk=chunk)
    compile_kernel(
        triton_penalties.penalise_rows,
        capability,
        {"num_warps": 8, "enable_fp_fusion": False},
        chunk=triton_penalties.SCORES_PER_PROGRAM,
    )


if __name__ == "__main__":
    for target, is_weighed in product(CAPABILITIES, (False, True)):
        compile_thresholds(target, has_probabilities=is_weighed)
    for target in CAPABILITIES:
        compile_penalties(target)
