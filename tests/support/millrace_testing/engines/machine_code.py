"""Compiles one Triton kernel for a GPU that need not be here, and reads facts of its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from millrace_shard.kernels.cuda.triton_quantized import SUMS

SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""The maximal shared memory of a thread block by compute capability."""
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FLOATS = ("scale", "softcap", "eps", "epsilon", "alpha", "limit", "least", "most")
INTEGERS = {"tables": "i32", "starts": "i32", "contexts": "i32"} | {
    "positions": "i64",
    "key_ends": "i32",
    "cache_rows": "i64",
    "blocks": "i32",
    "spans": "i32",
    "table": "i64",
    "order": "i32",
    "chosen": "i32",
    "pages": "i64",
    "query_starts": "i32",
    "saved": "i64",
    "codes": "u8",
    "addresses": "i64",
    "scales": "fp16",
    "offsets": "fp32",
}
ALWAYS_FLOAT32 = (
    *("partials", "tops", "totals", "rope", "sinks", "lookup", "sums"),
    *("logits", "correction", "shares"),
    *("state", "rates", "dt_bias", "skip"),
    *("key_scales", "value_scales", "row_scales"),
)
PAGES = ("key_pages", "value_pages", "keys", "values")
"""Tensors of uint8 where they hold codes."""
POINTERS = (
    *("attended", "queries", "key_pages", "value_pages", "out", "x", "residual", "weight"),
    *("gate_up", "qkv", "keys", "values", "new_keys", "new_values", "bias"),
    *("query_norm", "key_norm", "results"),
    *("conv", "mixed", "z", "a", "b", "dt", "matrices"),
)
_SIZES = ("stride", "num_inputs", "num_outputs", "padded_inputs", "part", "group_size")
"""Ends of the names of integers that are multiples of 16 in common models."""
_ENCODING = re.compile(r"^(#\w+) = (.+)$", re.MULTILINE)
_DOT = re.compile(
    r"(?:(?:warp_group_dot|tt\.dot) .*-> tensor|tc_gen5_mma .*memdesc)<([\dx]+)xf32, (#\w+)[>,]"
)
_REDUCTION = re.compile(r"\}\) : \(tensor<([\dx]+)xf32, (#\w+)>\) -> tensor")
_STACK = re.compile(r"STACK:(\d+)")
_CONVERSION = re.compile(r"\bI2FP?\b")


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
    seconds: float
    """That the compiler took."""
    cubin: bytes

    @property
    def conversions(self) -> int:
        """Instructions that convert integers to floats; to read them takes as long as to compile them."""
        return len(_CONVERSION.findall(_dumped(self.cubin, "--dump-sass")))

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
    began = time.perf_counter()
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    seconds = time.perf_counter() - began
    layouts = compiled.asm["ttgir"]
    return Compiled(
        kernel.__name__,
        capability,
        compiled.metadata.shared,
        max(map(int, _STACK.findall(_dumped(compiled.asm["cubin"], "--dump-resource-usage")))),
        _laid_out(_DOT, layouts),
        _laid_out(_REDUCTION, layouts),
        round(seconds, 3),
        compiled.asm["cubin"],
    )


def _kind(name: str, dtype: torch.dtype, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name == "lookup" and constants["form"].kind == SUMS:
        return "*i32"
    if name in PAGES and constants.get("codes"):
        return "*u8"
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


def _dumped(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True)
