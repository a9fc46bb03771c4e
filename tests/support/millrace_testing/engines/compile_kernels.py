"""Compiles the Triton kernels without a GPU, for the two kinds of code that tensor cores take.

Prints a line a kernel: its name, the compute capability, the shared memory it takes and the memory there is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from millrace_shard.kernels.cuda import triton_attention, triton_linear, triton_rope, triton_rows
from millrace_shard.kernels.cuda.cuda_attention import (
    Tiling,
    fixed_tiling,
    span_tiling,
    tile_tiling,
)

SHARED_BYTES = {86: 101376, 90: 232448}
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
FLOATS = ("scale", "softcap", "eps")
INTEGERS = {"tables": "i32", "starts": "i32", "contexts": "i32"} | {
    "positions": "i64",
    "cache_rows": "i64",
}
ALWAYS_FLOAT32 = ("partials", "tops", "totals", "rope")
POINTERS = (
    *("attended", "queries", "key_pages", "value_pages", "out", "x", "residual", "weight"),
    *("gate_up", "qkv", "keys", "values", "new_keys", "new_values", "bias"),
    *("query_norm", "key_norm"),
)


def compile_kernel(
    kernel: Any,
    dtype: torch.dtype,
    capability: int,
    *,
    num_warps: int,
    num_stages: int = 3,
    **constants: object,
) -> None:
    signature, attributes = {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        kind = "i32"
        if name in constants:
            kind = "constexpr"
        elif name in FLOATS:
            kind = "fp32"
        elif name in INTEGERS:
            kind = f"*{INTEGERS[name]}"
        elif name in ALWAYS_FLOAT32:
            kind = "*fp32"
        elif name in POINTERS:
            kind = f"*{NAMES[dtype]}"
        signature[name] = kind
        aligned = kind.startswith("*") and not parameter.do_not_specialize_on_alignment
        if aligned or (name.endswith("stride") and not parameter.do_not_specialize):
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    shared = compiled.metadata.shared
    print(kernel.__name__, capability, shared, SHARED_BYTES[capability])  # noqa: T201


def compile_attention(heads: tuple[int, int], dtype: torch.dtype, capability: int) -> None:
    """Compile the attention kernel as `PagedAttention` launches it; `heads` is (group, head_dim)."""
    group, head_dim = heads
    constants = {"num_heads": 4 * group, "group": group, "head_dim": head_dim, "page": 16}

    def fitted(tiling: Tiling) -> dict[str, Any]:
        head_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
        tiling = tiling.fitted(group, head_bytes, SHARED_BYTES[capability])
        return {
            "rows": tiling.rows,
            "chunk": tiling.chunk,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
            "has_window": False,
            "has_cap": False,
            "precision": "ieee",
        }

    fixed = fitted(fixed_tiling(dtype, head_dim))
    spans = fitted(span_tiling(dtype, head_dim))
    tiles = fitted(tile_tiling(dtype, head_dim))
    for in_spans, tiling in ((True, fixed), (False, tiles)):
        compile_kernel(
            triton_attention.attend_tiles,
            dtype,
            capability,
            in_spans=in_spans,
            **constants,
            **tiling,
        )
    compile_kernel(triton_attention.attend_spans, dtype, capability, **constants, **spans)
    if (head_dim, dtype) == (128, torch.bfloat16):
        windowed = tiles | {"has_window": True, "has_cap": True}
        compile_kernel(
            triton_attention.attend_tiles,
            dtype,
            capability,
            in_spans=False,
            **constants,
            **windowed,
        )


def compile_rows(capability: int) -> None:
    """The others, at the widths of a common model."""
    dtype = torch.bfloat16
    compile_kernel(
        triton_attention.fold_spans,
        dtype,
        capability,
        num_warps=1,
        num_heads=32,
        head_dim=128,
        chunk=64,
        has_window=True,
    )
    compile_kernel(
        triton_rows._rms_norm, dtype, capability, num_warps=2, inner_rows=8, width=80, rows=8
    )
    compile_kernel(triton_rows._add_rms_norm, dtype, capability, num_warps=8, width=4096)
    compile_kernel(triton_rows._silu_mul, dtype, capability, num_warps=4, width=14336, columns=1024)
    heads = {"num_kv_heads": 8, "head_dim": 128, "heads": 8}
    for half, has_norms in ((32, False), (64, True), (32, True)):
        compile_kernel(
            triton_rope._rope_store,
            dtype,
            capability,
            num_warps=4,
            num_heads=32,
            half=half,
            has_norms=has_norms,
            **heads,
        )
    compile_kernel(triton_rope._store, dtype, capability, num_warps=4, **heads)
    for each, tiling in (
        (dtype, triton_linear._TENSOR_CORES),
        (torch.float32, triton_linear._FLOAT32),
    ):
        compile_kernel(
            triton_linear._multiply,
            each,
            capability,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            num_outputs=1000,
            num_inputs=4096,
            has_bias=True,
            rows=tiling.rows,
            outputs=tiling.outputs,
            inputs=tiling.inputs,
        )


if __name__ == "__main__":
    compile_rows(90)
    for heads, element, target in (
        ((4, 128), torch.bfloat16, 90),
        ((3, 64), torch.float32, 90),
        ((2, 256), torch.bfloat16, 86),
    ):
        compile_attention(heads, element, target)
