"""Compiles the Triton kernels without a GPU, as they are launched, and prints a line of JSON for each.

Without arguments, it compiles each kernel at a few shapes. With `served`, it compiles the kernels with matrix products
for every shape that models are served with, in the process that `served I N` names: each N-th shape from the I-th on.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from millrace_shard.kernels.cuda import (
    grouped_experts,
    linear_tilings,
    triton_attention,
    triton_choice,
    triton_experts,
    triton_linear,
    triton_quantized,
    triton_rope,
    triton_rows,
)
from millrace_shard.kernels.cuda.cuda_attention import (
    Tiling,
    fixed_tiling,
    span_tiling,
    tile_tiling,
)
from millrace_shard.kernels.cuda.linear_tilings import RowTiling
from millrace_shard.kernels.cuda.quantized_linear import SUM_STEPS, step_length
from millrace_shard.kernels.lora import triton_lora

SHARED_BYTES = {80: 166912, 86: 101376, 90: 232448}
"""The maximal shared memory of a thread block by compute capability."""
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FLOATS = ("scale", "softcap", "eps", "alpha", "limit")
INTEGERS = {"tables": "i32", "starts": "i32", "contexts": "i32"} | {
    "positions": "i64",
    "cache_rows": "i64",
    "blocks": "i32",
    "spans": "i32",
    "table": "i64",
    "order": "i32",
    "chosen": "i32",
    "codes": "u8",
    "scales": "fp16",
    "offsets": "fp32",
}
ALWAYS_FLOAT32 = (
    *("partials", "tops", "totals", "rope", "sinks", "lookup", "sums"),
    *("logits", "correction", "shares", "results"),
)
POINTERS = (
    *("attended", "queries", "key_pages", "value_pages", "out", "x", "residual", "weight"),
    *("gate_up", "qkv", "keys", "values", "new_keys", "new_values", "bias"),
    *("query_norm", "key_norm"),
)
_SIZES = ("stride", "num_inputs", "num_outputs", "padded_inputs", "part", "group_size")
"""Ends of the names of integers that are multiples of 16 in common models."""
_ENCODING = re.compile(r"^(#\w+) = (.+)$", re.MULTILINE)
_DOT = re.compile(r"(?:warp_group_dot|tt\.dot) .*-> tensor<([\dx]+)xf32, (#\w+)>")
_REDUCTION = re.compile(r"\}\) : \(tensor<([\dx]+)xf32, (#\w+)>\) -> tensor")
_STACK = re.compile(r"STACK:(\d+)")


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code."""

    name: str
    capability: int
    shared: int
    """Bytes of shared memory."""
    stack: int
    """Bytes of local memory per thread, in which registers are spilled."""
    products: tuple[str, ...]
    """Shapes and layouts of the results of matrix products, each once."""
    reductions: tuple[str, ...]
    """Shapes and layouts of the operands of reductions, each once."""

    @property
    def fits(self) -> bool:
        """Whether a thread block has enough shared memory."""
        return self.shared <= SHARED_BYTES[self.capability]


def compile_kernel(
    kernel: Any,
    dtype: torch.dtype,
    capability: int,
    *,
    num_warps: int,
    num_stages: int = 3,
    out_dtype: torch.dtype | None = None,
    **constants: object,
) -> Compiled:
    """Compile `kernel` with tensors of `dtype`; a parameter named `out` has `out_dtype`, if given."""
    signature, attributes = {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        kind = _kind(name, dtype, constants)
        if name == "out" and out_dtype is not None:
            kind = f"*{NAMES[out_dtype]}"
        signature[name] = kind
        aligned = kind.startswith("*") and not parameter.do_not_specialize_on_alignment
        sized = name.endswith(_SIZES) and kind == "i32" and not parameter.do_not_specialize
        if aligned or sized:
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    layouts = compiled.asm["ttgir"]
    return Compiled(
        kernel.__name__,
        capability,
        compiled.metadata.shared,
        _stack(compiled.asm["cubin"]),
        _laid_out(_DOT, layouts),
        _laid_out(_REDUCTION, layouts),
    )


def _kind(name: str, dtype: torch.dtype, constants: dict[str, object]) -> str:
    if name in constants:
        return "constexpr"
    if name in FLOATS:
        return "fp32"
    if name in INTEGERS:
        return f"*{INTEGERS[name]}"
    if name in ALWAYS_FLOAT32:
        return "*fp32"
    return f"*{NAMES[dtype]}" if name in POINTERS else "i32"


def _laid_out(pattern: re.Pattern[str], code: str) -> tuple[str, ...]:
    encodings = dict(_ENCODING.findall(code))
    return tuple(sorted({f"{shape} {encodings[name]}" for shape, name in pattern.findall(code)}))


def _stack(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.check_output(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name], text=True
        )
    return max(map(int, _STACK.findall(usage)))


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
HEAD_DIMS = (64, 72, 80, 96, 128, 160, 192, 256)
CAPABILITIES = (80, 90)
CODES: dict[str, tuple[dict[str, Any], int | None]] = {
    name: (
        {
            "bits": 8 if name in ("int8", "e4m3") else 4,
            "least": -8,
            "has_lookup": not name.startswith("int"),
            "has_remainder": name == "nf4",
            "has_offsets": name == "int4 with zeros",
        },
        group_size,
    )
    for name, group_size in (
        *(("int4", 128), ("int4 with zeros", 128), ("nf4", 64), ("e2m1", 32), ("nvfp4", 16)),
        *(("int8", None), ("e4m3", 128)),
    )
}
"""The constants of the linear over codes for each format, and the size of its groups; None: all inputs."""
MANY_INPUTS = 4096
SUMS: dict[str, Any] = {"group_steps": 2, "inputs": 64, "steps": SUM_STEPS}
"""The constants of the sums of inputs."""
Heads = tuple[int, int]
"""Query heads per key-value head, and head_dim."""


def attention(
    heads: Heads,
    dtype: torch.dtype,
    capability: int,
    *,
    fixed: bool,
    rule: tuple[bool, bool, bool] = (False, False, False),
) -> Iterator[Compiled]:
    """Compile attention of prompts, then of single queries, as `PagedAttention` launches it."""
    group, head_dim = heads
    has_window, has_cap, has_sinks = rule
    constants: dict[str, Any] = {"num_heads": 4 * group, "group": group, "head_dim": head_dim}
    constants |= {"has_window": has_window, "has_cap": has_cap, "page": 16, "precision": "ieee"}

    def fitted(tiling: Tiling) -> dict[str, Any]:
        head_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
        return dataclasses.asdict(tiling.fitted(group, head_bytes, SHARED_BYTES[capability]))

    tiles = fitted((fixed_tiling if fixed else tile_tiling)(dtype, head_dim))
    spans = fitted((fixed_tiling if fixed else span_tiling)(dtype, head_dim))
    prompts, singles = triton_attention.attend_tiles, triton_attention.attend_spans
    yield compile_kernel(
        prompts, dtype, capability, in_spans=fixed, has_sinks=has_sinks, **constants, **tiles
    )
    yield compile_kernel(singles, dtype, capability, **constants, **spans)


def linear(dtype: torch.dtype, capability: int) -> Iterator[Compiled]:
    """Compile the linear of deterministic mode: in one program with bias and in parts, with each tile of rows."""
    tilings: tuple[RowTiling, ...] = linear_tilings.TENSOR_CORES
    for tiling in (linear_tilings.FLOAT32,) if dtype == FP32 else tilings:
        for parts, out_dtype in ((4, dtype), (1, FP32)):
            yield compile_kernel(
                triton_linear._multiply,
                dtype,
                capability,
                out_dtype=out_dtype,
                parts=parts,
                has_bias=parts > 1,
                whole_blocks=True,
                **dataclasses.asdict(tiling),
            )


def codes(
    dtype: torch.dtype, capability: int, kinds: Sequence[str] = tuple(CODES)
) -> Iterator[Compiled]:
    """Compile the linear over codes: in one program with bias for many rows, else in parts, with each tile of rows."""
    tilings = (linear_tilings.FLOAT32,) if dtype == FP32 else linear_tilings.TENSOR_CORES
    for kind, tiling in itertools.product(kinds, tilings):
        facts, group_size = CODES[kind]
        step = step_length(group_size or MANY_INPUTS, dtype)
        is_last = tiling is tilings[-1]
        yield compile_kernel(
            triton_quantized._multiply_codes,
            dtype,
            capability,
            out_dtype=dtype if is_last else FP32,
            parts=4 if is_last else 1,
            has_bias=is_last,
            whole_steps=True,
            group_steps=0 if group_size is None else group_size // step,
            **facts | {"has_remainder": facts["has_remainder"] and dtype != FP32},
            **dataclasses.asdict(tiling) | {"inputs": step},
        )


def adapters(dtype: torch.dtype, capability: int) -> Iterator[Compiled]:
    """Compile shrink and expand as they are launched: with a program for each part, and with one for all; of a head."""
    shrink, expand = triton_lora._shrink, triton_lora._expand
    for parts, in_grid in ((1, 8), (8, 1)):
        yield compile_kernel(
            shrink,
            dtype,
            capability,
            parts=parts,
            inputs=triton_lora.INPUTS,
            num_warps=4,
            num_stages=4,
        )
        for modules, out_dtype in ((3, dtype), (1, FP32)):
            yield compile_kernel(
                expand,
                dtype,
                capability,
                out_dtype=out_dtype,
                modules=modules,
                parts=in_grid,
                outputs=triton_lora.OUTPUTS,
                num_warps=4,
                num_stages=2,
            )


def experts(dtype: torch.dtype, capability: int) -> Iterator[Compiled]:
    """Compile the products of experts with each tile of rows, and the kernels around them."""
    tilings: tuple[RowTiling, ...] = linear_tilings.TENSOR_CORES
    for tiling in (linear_tilings.FLOAT32,) if dtype == FP32 else tilings:
        for out_dtype, pairs_per_row in ((dtype, 8), (FP32, 1)):
            yield compile_kernel(
                triton_experts.multiply_experts,
                dtype,
                capability,
                out_dtype=out_dtype,
                pairs_per_row=pairs_per_row,
                has_bias=pairs_per_row > 1,
                **dataclasses.asdict(tiling),
            )
    columns: dict[str, Any] = {"columns": grouped_experts.COLUMNS}
    choice: dict[str, Any] = {"experts": 128, "top_k": 8, "renormalise": True, "has_bias": True}
    for scoring, groups in enumerate((1, 1, 8)):
        rule: dict[str, Any] = {"scoring": scoring, "groups": groups, "top_groups": -(-groups // 2)}
        has_correction = groups > 1
        yield compile_kernel(
            triton_choice.choose,
            FP32,
            capability,
            num_warps=1,
            has_correction=has_correction,
            **choice,
            **rule,
        )
    yield compile_kernel(triton_choice.group_pairs, dtype, capability, num_warps=4)
    yield compile_kernel(triton_experts.clamped_swiglu, dtype, capability, num_warps=4, **columns)
    add = triton_experts.add_experts
    yield compile_kernel(add, dtype, capability, num_warps=4, top_k=8, **columns)


def rows(capability: int) -> Iterator[Compiled]:
    """Compile the kernels without matrix products at the widths of a common model."""
    rule = {"has_window": True, "has_sinks": True}
    shared: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "heads": 8}
    for kernel, num_warps, constants in (
        (triton_attention.fold_spans, 1, {"num_heads": 32, "head_dim": 128, "chunk": 64, **rule}),
        (triton_linear._add_parts, 4, {"parts": 4, "has_bias": True, "columns": triton_linear.COLUMNS}),
        (triton_rows._rms_norm, 2, {"inner_rows": 8, "width": 80, "rows": 8}),
        (triton_rows._add_rms_norm, 8, {"width": 4096}),
        (triton_rows._silu_mul, 4, {"width": 14336, "columns": 1024}),
        *(
            (triton_rope._rope_store, 4, {"num_heads": 32, "half": half, "has_norms": norms, **shared})
            for half, norms in ((32, False), (64, True), (32, True))
        ),
        (triton_rope._store, 4, shared),
    ):  # fmt: skip
        yield compile_kernel(kernel, BF16, capability, num_warps=num_warps, **constants)


def a_few() -> Iterator[Compiled]:
    """Every kernel, at a few shapes."""
    yield from rows(90)
    yield from linear(BF16, 90)
    yield from linear(FP32, 90)
    yield from experts(BF16, 90)
    yield from experts(FP32, 80)
    yield from codes(BF16, 90, ("int4 with zeros", "nf4"))
    yield compile_kernel(triton_quantized._sum_steps, BF16, 90, num_warps=4, **SUMS)
    yield from adapters(BF16, 90)
    yield from adapters(FP32, 80)
    for heads, dtype, capability in (((4, 128), BF16, 90), ((3, 64), FP32, 90), ((2, 256), BF16, 86)):  # fmt: skip
        for fixed in (False, True):
            yield from attention(heads, dtype, capability, fixed=fixed)
    yield from attention((4, 128), BF16, 90, fixed=False, rule=(True, True, True))


def served_attention() -> Iterator[tuple[torch.dtype, int, int, tuple[bool, bool, bool]]]:
    """Dtype, head_dim, group, and whether there are a window, a soft cap and sinks.

    Every group comes with bfloat16 alone, whose layouts float16 shares; the others come with one group.
    """
    for head_dim in HEAD_DIMS:
        for group in GROUPS:
            yield BF16, head_dim, group, (False, False, False)
        for dtype in (FP16, FP32):
            yield dtype, head_dim, 4, (False, False, False)
        for rule in ((True, False, False), (False, True, False), (True, True, False), (True, False, True)):  # fmt: skip
            yield BF16, head_dim, 4, rule


def served(first: int, step: int) -> Iterator[tuple[dict[str, object], Compiled]]:
    """Each combination and its kernels."""
    dtypes = itertools.product(CAPABILITIES, (BF16, FP16, FP32))
    for capability, dtype in itertools.islice(dtypes, first, None, step):
        for compiled in linear(dtype, capability):
            yield {"dtype": str(dtype)}, compiled
        for compiled in codes(dtype, capability):
            yield {"dtype": str(dtype)}, compiled
        for compiled in (*adapters(dtype, capability), *experts(dtype, capability)):
            yield {"dtype": str(dtype)}, compiled
    shapes = itertools.product(CAPABILITIES, served_attention(), (True, False))
    for capability, shape, fixed in itertools.islice(shapes, first, None, step):
        dtype, head_dim, group, rule = shape
        case = {"dtype": str(dtype), "head_dim": head_dim, "group": group, "rule": rule}
        heads = group, head_dim
        for compiled in attention(heads, dtype, capability, fixed=fixed, rule=rule):
            yield case | {"fixed": fixed}, compiled


def main() -> None:
    """Compile, and print a line for each kernel."""
    if sys.argv[1:2] == ["served"]:
        found = served(int(sys.argv[2]), int(sys.argv[3]))
    else:
        found = (({}, compiled) for compiled in a_few())
    for case, compiled in found:
        facts = dataclasses.asdict(compiled) | {"fits": compiled.fits}
        print(json.dumps(case | facts), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
