"""Compiles the Triton kernels without a GPU, as they are launched, and prints a line of JSON for each.

Without arguments, it compiles each kernel at a few shapes. With `served`, it compiles the kernels with matrix products
for every shape that models are served with and the capabilities C, in the process that `served I N C…` names: each
N-th shape from the I-th on.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton

from millrace_shard.kernels.cuda import (
    cuda_latents,
    grouped_experts,
    linear_tilings,
    triton_attention,
    triton_choice,
    triton_experts,
    triton_heads,
    triton_latents,
    triton_linear,
    triton_pages,
    triton_quantized,
    triton_rope,
    triton_rows,
    triton_states,
)
from millrace_shard.kernels.cuda.cuda_attention import (
    SharedMemory,
    Tiling,
    coded_tile_tiling,
    fixed_tiling,
    span_tiling,
    tile_tiling,
)
from millrace_shard.kernels.cuda.linear_tilings import RowTiling
from millrace_shard.kernels.cuda.packed_codes import step_length
from millrace_shard.kernels.cuda.quantized_linear import EXPANDED_OUTPUTS, SUM_STEPS
from millrace_shard.kernels.cuda.scaled_products import COLUMNS
from millrace_shard.kernels.cuda.triton_codes import (
    CONVERTS_E4M3,
    E2M1,
    E4M3,
    E4M3_BY_DEVICE,
    E5M2,
    INT8,
    NO_CODES,
    code_rows,
)
from millrace_shard.kernels.cuda.triton_pages import WORDS
from millrace_shard.kernels.lora import triton_lora
from millrace_testing.engines.machine_code import SHARED_BYTES, Compiled, compile_kernel

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
NO_RULE = (False, False, False)
CODED_HEAD_DIMS = (64, 128, 256)
"""Those that KV in codes is compiled for."""
LATENT_WIDTHS = (512, 64)
"""Channels of latents and of rotated keys, of all published models."""
LATENT_HEADS = (8, 16, 20, 32, 128)
"""Of DeepSeek V3 on 16 and on 8 GPUs, GLM-4.7-Flash, Kimi Linear, and DeepSeek V3 as a whole."""
HEAD_DIMS = (64, 72, 80, 96, 128, 160, 192, 256)
CAPABILITIES = tuple(SHARED_BYTES)
CODES: dict[str, tuple[int, int, int | None]] = {
    "int4": (4, triton_quantized.INTEGERS, 128),
    "int4 with zeros": (4, triton_quantized.INTEGERS, 128),
    "nf4": (4, triton_quantized.SUMS, 64),
    "fp4": (4, triton_quantized.SIXTHS, 64),
    "e2m1": (4, E2M1, 32),
    "nvfp4": (4, E2M1, 16),
    "int8": (8, triton_quantized.INTEGERS, None),
    "e4m3": (8, E4M3, 128),
}
"""Bits and kinds of codes by formats, and the sizes of groups; None: all inputs."""
MANY_INPUTS = 4096
SUMS: dict[str, Any] = {"group_steps": 2, "inputs": 64, "steps": SUM_STEPS}
"""The constants of the sums of inputs."""
NORMS: tuple[dict[str, Any], ...] = tuple(
    {"centred": centred, "plus_one": plus_one, "wide": wide}
    for centred, plus_one, wide in (
        (False, False, False),
        (True, False, True),
        (False, True, True),
        (False, True, False),
    )
)
"""The flags of the norms of Llama, Cohere, Gemma, and one more."""
LLAMA_HEADS = {"plus_one": False, "wide": False, "after_rope": False, "interleaved": False}
LLAMA_ROPE = {"num_heads": 32, "half": 32, "has_norms": True, **LLAMA_HEADS}
GEMMA_HEADS = {**LLAMA_HEADS, "plus_one": True, "wide": True, "after_rope": True}
Heads = tuple[int, int]
"""Query heads per key-value head, and head_dim."""


def attention(
    heads: Heads,
    dtype: torch.dtype,
    capability: int,
    *,
    fixed: bool,
    rule: tuple[bool, bool, bool] = (False, False, False),
    codes: int = NO_CODES,
    has_ends: bool = False,
) -> Iterator[Compiled]:
    """Compile attention of prompts, then of single queries, as `PagedAttention` launches it."""
    if codes == E4M3 and divmod(capability, 10) >= CONVERTS_E4M3:
        codes = E4M3_BY_DEVICE
    group, head_dim = heads
    has_window, has_cap, has_sinks = rule
    constants: dict[str, Any] = {"num_heads": 4 * group, "group": group, "head_dim": head_dim}
    constants |= {"has_window": has_window, "has_cap": has_cap, "page": 16}
    constants["codes"] = codes

    def fitted(tiling: Tiling) -> dict[str, Any]:
        head_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
        memory = SharedMemory(SHARED_BYTES[capability], divmod(capability, 10))
        return dataclasses.asdict(tiling.fitted(group, head_bytes, memory))

    fast = coded_tile_tiling if codes else tile_tiling
    always = fixed_tiling(dtype, head_dim, is_coded=codes != NO_CODES)
    tiles = fitted(always if fixed else fast(dtype, head_dim))
    spans = fitted(always if fixed else span_tiling(dtype, head_dim))
    prompts, singles = triton_attention.attend_tiles, triton_attention.attend_spans
    ends: dict[str, Any] = {"has_sinks": has_sinks, "has_ends": has_ends}
    yield compile_kernel(prompts, dtype, capability, in_spans=fixed, **ends, **constants, **tiles)
    yield compile_kernel(singles, dtype, capability, **constants, **spans)


def latents(
    num_heads: int, dtype: torch.dtype, capability: int, *, fixed: bool
) -> Iterator[Compiled]:
    """Compile attention over latents of prompts, then of single queries, as `PagedLatentAttention` launches it."""
    widths = LATENT_WIDTHS
    constants: dict[str, Any] = {"num_heads": num_heads, "page": 16}
    constants |= {"latent_dim": widths[0], "rope_dim": widths[1]}
    memory = SharedMemory(SHARED_BYTES[capability], divmod(capability, 10))

    def fitted(tiling: Tiling) -> dict[str, Any]:
        return dataclasses.asdict(cuda_latents.fitted(tiling, widths, dtype, memory))

    usual = cuda_latents.fixed_tiling(dtype)
    tiles = fitted(usual if fixed else cuda_latents.tile_tiling(dtype))
    spans = fitted(usual if fixed else cuda_latents.span_tiling(dtype, num_heads))
    prompts, singles = triton_latents.attend_latent_tiles, triton_latents.attend_latent_spans
    yield compile_kernel(prompts, dtype, capability, in_spans=fixed, **constants, **tiles)
    yield compile_kernel(singles, dtype, capability, **constants, **spans)


def linears_of_heads(dtype: torch.dtype, capability: int) -> Iterator[Compiled]:
    """Compile the linear of each head with each tile of rows, and the storage of latents."""
    tilings = (*linear_tilings.TENSOR_CORES, linear_tilings.PROMPTS)
    for tiling in (linear_tilings.FLOAT32,) if dtype == FP32 else tilings:
        facts = {"whole_blocks": True, **dataclasses.asdict(tiling)}
        yield compile_kernel(triton_heads.multiply_heads, dtype, capability, **facts)
    widths = {"num_heads": 20, "latent_dim": LATENT_WIDTHS[0], "rope_dim": LATENT_WIDTHS[1]}
    norm = {"plus_one": False, "wide": False, "rotates": True, "interleaved": True}
    store: dict[str, Any] = {**widths, **norm, "num_warps": 4}
    yield compile_kernel(triton_heads.store_latents, dtype, capability, **store)


def linear(dtype: torch.dtype, capability: int) -> Iterator[Compiled]:
    """Compile the linear of deterministic mode: in one program with bias and in parts, with each tile of rows."""
    tilings = (*linear_tilings.TENSOR_CORES, linear_tilings.PROMPTS)
    for tiling in (linear_tilings.FLOAT32,) if dtype == FP32 else tilings:
        whole = (1, dtype) if tiling is linear_tilings.PROMPTS else (4, dtype)
        for parts, out_dtype in (whole, (1, FP32)):
            yield compile_kernel(
                triton_linear._multiply,
                dtype,
                capability,
                out_dtype=out_dtype,
                parts=parts,
                has_bias=out_dtype == dtype,
                whole_blocks=True,
                **dataclasses.asdict(tiling),
            )


def codes(
    dtype: torch.dtype, capability: int, kinds: Sequence[str] = tuple(CODES)
) -> Iterator[Compiled]:
    """Compile the linear over codes: in one program with bias for many rows, else in parts, with each tile of rows."""
    tilings = (linear_tilings.FLOAT32,) if dtype == FP32 else linear_tilings.TENSOR_CORES
    for kind, tiling in itertools.product(kinds, tilings):
        form = _form(kind, dtype, capability)
        is_last = tiling is tilings[-1]
        shape = {key: each for key, each in dataclasses.asdict(tiling).items() if key != "inputs"}
        yield compile_kernel(
            triton_quantized._multiply_codes,
            dtype,
            capability,
            out_dtype=dtype if is_last else FP32,
            parts=4 if is_last else 1,
            has_bias=is_last,
            form=form,
            **shape,
        )
        if is_last:
            yield compile_kernel(
                triton_quantized.expand_codes,
                dtype,
                capability,
                num_warps=4,
                form=form._replace(kind=min(form.kind, triton_quantized.TABLE)),
                outputs=EXPANDED_OUTPUTS,
            )
        yield compile_kernel(
            triton_quantized.multiply_expert_codes,
            dtype,
            capability,
            pairs_per_row=8,
            has_bias=True,
            form=form,
            **shape,
        )


def _form(name: str, dtype: torch.dtype, capability: int) -> triton_quantized.Form:
    """As `PackedCodes` has it."""
    bits, kind, group_size = CODES[name]
    if kind in (triton_quantized.SIXTHS, triton_quantized.SUMS) and dtype == FP32:
        kind = triton_quantized.TABLE
    if kind == E4M3 and divmod(capability, 10) >= CONVERTS_E4M3 and dtype != FP32:
        kind = E4M3_BY_DEVICE
    step = step_length(group_size or MANY_INPUTS, dtype)
    return triton_quantized.Form(
        bits=bits,
        kind=kind,
        least=-128 if bits == 8 else -8,
        has_offsets=name == "int4 with zeros",
        whole_steps=True,
        group_steps=0 if group_size is None else group_size // step,
        inputs=step,
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
    for each in dict.fromkeys((dtype, FP32)):
        yield compile_kernel(
            add, each, capability, out_dtype=dtype, num_warps=4, top_k=8, **columns
        )


def rows(capability: int) -> Iterator[Compiled]:
    """Compile the kernels without matrix products at the widths of a common model."""
    rule = {"has_window": True, "has_sinks": True}
    shared: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "heads": 8, "codes": NO_CODES}
    for kernel, num_warps, constants in (
        (triton_attention.fold_spans, 1, {"num_heads": 32, "head_dim": 128, "chunk": 64, **rule}),
        (triton_linear._add_parts, 4, {"parts": 4, "has_bias": True, "columns": triton_linear.COLUMNS}),
        *(
            (triton_rows._rms_norm, 2, {"inner_rows": 8, "width": 80, "rows": 8, "by_head": flag, **norm})
            for flag, norm in zip((False, True, False, False), NORMS, strict=True)
        ),
        *((triton_rows._add_rms_norm, 8, {"width": 4096, **norm}) for norm in NORMS),
        *(
            (triton_rows._gated, 4, {"width": 14336, "columns": 1024, "is_gelu": flag})
            for flag in (False, True)
        ),
        *(
            (triton_rope._rope_store, 4, {"num_heads": 32, "half": half, "has_norms": norms, **heads, **shared})
            for half, norms, heads in (
                (32, False, LLAMA_HEADS),
                (64, True, LLAMA_HEADS),
                (32, True, GEMMA_HEADS),
                (32, False, {**LLAMA_HEADS, "interleaved": True}),
            )
        ),
        (triton_rope._store, 4, shared),
        (code_rows, 4, {"columns": COLUMNS}),
        *(
            each
            for codes in (INT8, E5M2, E4M3)
            for each in (
                (triton_rope._rope_store, 4, {**LLAMA_ROPE, **shared, "codes": codes}),
                (triton_rope._store, 4, {**shared, "codes": codes}),
            )
        ),
    ):  # fmt: skip
        yield compile_kernel(kernel, BF16, capability, num_warps=num_warps, **constants)


def states(dtype: torch.dtype, capability: int) -> Iterator[Compiled]:
    """Compile the kernels of recurrent layers at the widths of Qwen3-Next, Kimi Linear, Granite 4 and Falcon Mamba."""
    heads = {"value_dim": 128, "key_dim": 128}
    for saves in (False, True):
        for kernel, num_warps, constants in (
            (triton_states.convolve, 4, {"sequences": 32, "has_bias": saves, "has_silu": True}),
            (triton_states.delta, 4, heads | {"num_keys": 16, "num_values": 32, "by_channel": False}),
            (triton_states.delta, 4, heads | {"num_keys": 32, "num_values": 32, "by_channel": True}),
            (triton_states.scan, 4, {"num_heads": 128, "num_groups": 1, "state_dim": 128, "head_dim": 64}),
            (triton_states.scan_channels, 4, {"state_dim": 16}),
        ):  # fmt: skip
            is_conv = kernel is triton_states.convolve
            columns = triton_states.CHANNELS if is_conv else triton_states.COLUMNS
            if is_conv:
                constants |= {"earlier": 3}
            facts: dict[str, Any] = {"columns": columns, "has_saved": saves, **constants}
            is_scan = kernel is triton_states.scan or kernel is triton_states.scan_channels
            out_dtype = FP32 if is_scan else dtype
            yield compile_kernel(
                kernel, dtype, capability, num_warps=num_warps, out_dtype=out_dtype, **facts
            )
    columns = triton_states.CHANNELS
    yield compile_kernel(
        triton_states.shift, dtype, capability, num_warps=4, earlier=3, columns=columns
    )
    for wide in (False, True):
        yield compile_kernel(
            triton_states.gated_norm, dtype, capability, num_warps=1, value_dim=128, wide=wide
        )


def a_few() -> Iterator[Compiled]:
    """Every kernel, at a few shapes."""
    yield from rows(90)
    yield from states(BF16, 90)
    yield from states(FP32, 80)
    yield from linear(BF16, 90)
    yield from linear(FP32, 90)
    yield from experts(BF16, 90)
    yield from experts(FP32, 80)
    yield from codes(BF16, 90, ("int4 with zeros", "nf4", "fp4"))
    yield compile_kernel(triton_quantized._sum_steps, BF16, 90, num_warps=4, **SUMS)
    yield compile_kernel(triton_pages._zero_pages, BF16, 90, num_warps=4, columns=WORDS)
    yield from adapters(BF16, 90)
    yield from adapters(FP32, 80)
    for heads, dtype, capability in (((4, 128), BF16, 90), ((3, 64), FP32, 90), ((2, 256), BF16, 86)):  # fmt: skip
        for fixed in (False, True):
            yield from attention(heads, dtype, capability, fixed=fixed)
    yield from attention((4, 128), BF16, 90, fixed=False, rule=(True, True, True))
    for capability in (80, 90):
        yield from attention((1, 256), BF16, capability, fixed=True, has_ends=True)
    for capability, fixed in ((80, False), (90, False), (90, True)):
        for kind in (INT8, E5M2, E4M3):
            yield from attention((4, 128), BF16, capability, fixed=fixed, codes=kind)
    for capability in sorted({*CAPABILITIES} - {80, 90}):
        for kind in (NO_CODES, E4M3):
            yield from attention((4, 128), BF16, capability, fixed=False, codes=kind)
        formats = {86: ("int8",), 89: ("e4m3",), 120: ("e2m1", "fp4")}.get(capability, ("int4",))
        yield from codes(BF16, capability, formats)
    for capability, dtype, fixed in itertools.product(CAPABILITIES, (BF16, FP32), (False, True)):
        if dtype == BF16 or capability == 86:
            yield from latents(16, dtype, capability, fixed=fixed)
    yield from linears_of_heads(BF16, 90)


def served_attention() -> Iterator[tuple[torch.dtype, int, int, tuple[bool, bool, bool], int]]:
    """Dtype, head_dim, group, whether there are a window, a soft cap and sinks, and the kind of codes.

    Every group comes with bfloat16 alone, whose layouts float16 shares; the others come with one group.
    """
    for head_dim in HEAD_DIMS:
        for group in GROUPS:
            yield BF16, head_dim, group, NO_RULE, NO_CODES
        for dtype in (FP16, FP32):
            yield dtype, head_dim, 4, NO_RULE, NO_CODES
        for rule in ((True, False, False), (False, True, False), (True, True, False), (True, False, True)):  # fmt: skip
            yield BF16, head_dim, 4, rule, NO_CODES
    for head_dim, kind in itertools.product(CODED_HEAD_DIMS, (INT8, E5M2, E4M3)):
        yield BF16, head_dim, 4, NO_RULE, kind
    # float16 multiplies values of int8 by their scales, in place of weights.
    yield FP16, 128, 4, NO_RULE, INT8


def served(
    first: int, step: int, capabilities: Sequence[int]
) -> Iterator[tuple[dict[str, object], Compiled]]:
    """Each combination and its kernels."""
    dtypes = itertools.product(capabilities, (BF16, FP16, FP32))
    for capability, dtype in itertools.islice(dtypes, first, None, step):
        for compiled in linear(dtype, capability):
            yield {"dtype": str(dtype)}, compiled
        for compiled in linears_of_heads(dtype, capability):
            yield {"dtype": str(dtype)}, compiled
        for compiled in codes(dtype, capability):
            yield {"dtype": str(dtype)}, compiled
        for compiled in (*adapters(dtype, capability), *experts(dtype, capability)):
            yield {"dtype": str(dtype)}, compiled
    shapes = itertools.product(capabilities, served_attention(), (True, False))
    for capability, shape, fixed in itertools.islice(shapes, first, None, step):
        dtype, head_dim, group, rule, kind = shape
        case = {"dtype": str(dtype), "head_dim": head_dim, "group": group, "rule": rule}
        case |= {"codes": kind}
        heads = group, head_dim
        for compiled in attention(heads, dtype, capability, fixed=fixed, rule=rule, codes=kind):
            yield case | {"fixed": fixed}, compiled
    over_latents = itertools.product(capabilities, (BF16, FP16, FP32), LATENT_HEADS, (True, False))
    for capability, dtype, num_heads, fixed in itertools.islice(over_latents, first, None, step):
        for compiled in latents(num_heads, dtype, capability, fixed=fixed):
            yield {"dtype": str(dtype), "heads": num_heads, "fixed": fixed}, compiled


def main() -> None:
    """Compile, and print a line for each kernel."""
    if sys.argv[1:2] == ["served"]:
        first, step, *capabilities = map(int, sys.argv[2:])
        found = served(first, step, capabilities)
    else:
        found = (({}, compiled) for compiled in a_few())
    for case, compiled in found:
        facts = dataclasses.asdict(compiled) | {"fits": compiled.fits}
        del facts["cubin"]
        if not case:
            facts["conversions"] = compiled.conversions
        print(json.dumps(case | facts), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
