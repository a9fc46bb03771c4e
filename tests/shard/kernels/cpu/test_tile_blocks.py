"""Halves of a layer by tiles against float64, and against themselves: alone, in batches, in chunks and threaded."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.device.pulse import PULSE
from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Layer, LayerCache
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.cpu.tile_blocks import (
    PanelLinear,
    TiledAttention,
    TiledLayers,
    TiledMlp,
)
from millrace_shard.kernels.layer_blocks import ComposedLayers
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    LinearWeights,
    MlpWeights,
    NormWeights,
)
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_testing.engines.layer_blocks import (
    apply,
    attention_of_one,
    norm,
    norm_of,
    rotation_of,
)

BF16 = torch.bfloat16
CONTEXTS = [300, 65, 191, 1, 129, 64]
QUERIES = [300, 1, 91, 1, 2, 1]
TOLERANCE = 0.05


pytestmark = pytest.mark.usefixtures("unit", "seed")


@dataclass(frozen=True, kw_only=True)
class Shape:
    hidden: int = 96
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    inter: int = 144
    bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    gpt_oss: bool = False
    """With sinks, and norms whose weights are multiplied before the result is rounded."""
    qwen3_5: bool = False
    """With such norms, to whose weights 1 is added."""

    def norm(self, size: int) -> NormWeights:
        norm = norm_of(size)
        if self.qwen3_5:
            return replace(norm, weight=norm.weight - 1, plus_one=True, wide=True)
        return replace(norm, wide=self.gpt_oss)

    def weights(self) -> AttentionWeights:
        width = (self.heads + 2 * self.kv_heads) * self.dim
        return AttentionWeights(
            norm=self.norm(self.hidden),
            qkv=linear(width, self.hidden, bias=self.bias),
            head_norms=HeadNorms(query=self.norm(self.dim), key=self.norm(self.dim))
            if self.qk_norm
            else None,
            out=linear(self.hidden, self.heads * self.dim, bias=self.bias),
            rotation=rotation_of(self.dim),
            scale=self.dim**-0.5,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            window=self.window,
            sinks=3 * torch.randn(self.heads) if self.gpt_oss else None,
        )

    def mlp(self) -> MlpWeights:
        return MlpWeights(
            norm=self.norm(self.hidden),
            gate_up=linear(2 * self.inter, self.hidden, bias=self.bias),
            down=linear(self.hidden, self.inter, bias=self.bias),
        )

    def cache(self, num_blocks: int = 64) -> LayerCache:
        kernels = CpuKernels(deterministic=True)
        cache = kernels.new_cache(
            num_blocks=num_blocks,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            dtype=BF16,
            device=torch.device("cpu"),
        )
        kernels.zero_blocks(cache, torch.arange(num_blocks))
        return cache


SHAPES = [
    Shape(),
    Shape(dim=32, heads=4, kv_heads=4, hidden=32, bias=True),
    Shape(dim=128, heads=8, kv_heads=1, qk_norm=True, window=70),
    Shape(dim=96, heads=71, kv_heads=1, hidden=160, bias=True, window=1),
    Shape(hidden=1600, inter=2064, heads=3, kv_heads=3),
    Shape(bias=True, window=70, gpt_oss=True),
    Shape(qk_norm=True, qwen3_5=True),
]


def linear(out: int, inputs: int, *, bias: bool) -> LinearWeights:
    weight = (torch.randn(out, inputs) / math.sqrt(inputs)).to(BF16)
    return LinearWeights(StoredWeight.of(weight), torch.randn(out).to(BF16) if bias else None)


def run(
    weights: AttentionWeights, shape: Shape, x: Tensor | None, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the first parts of all sequences, then a step of their last `QUERIES`; return its output and residual."""
    block, cache = TiledAttention(weights), shape.cache()
    firsts = [c - q for c, q in zip(CONTEXTS, QUERIES, strict=True)]
    rows = torch.split(torch.arange(sum(CONTEXTS)), CONTEXTS)
    early = torch.cat([r[:f] for r, f in zip(rows, firsts, strict=True)])
    late = torch.cat([r[f:] for r, f in zip(rows, firsts, strict=True)])

    def step(rows: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        some = residual[rows].clone()
        return block(None if x is None else x[rows].clone(), some, batch, cache), some

    step(early, tables_of(firsts, firsts))
    return step(late, tables_of(QUERIES, CONTEXTS))


def tables_of(num_queries: Sequence[int], num_context: Sequence[int]) -> RaggedBatch:
    """Steps of one run share their block tables."""
    batch = ragged_batch(num_queries, num_context, block_size=64)
    whole = ragged_batch(CONTEXTS, CONTEXTS, block_size=64)
    spans = [torch.arange(e - n, e) for n, e in zip(num_queries, num_context, strict=True)]
    rows = [
        table[span // 64].long() * 64 + span % 64
        for table, span in zip(whole.block_tables, spans, strict=True)
    ]
    return replace(batch, block_tables=whole.block_tables, cache_rows=torch.cat(rows))


@pytest.mark.parametrize("with_x", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_matches_its_definition(shape: Shape, with_x: bool) -> None:
    weights = shape.weights()
    residual = torch.randn(sum(CONTEXTS), shape.hidden).to(BF16)
    x = torch.randn_like(residual) if with_x else None
    y, changed = run(weights, shape, x, residual)
    summed = residual if x is None else residual + x
    parts = [attention_of_one(weights, each.double()) for each in torch.split(summed, CONTEXTS)]
    expected = torch.cat([p[-q:] for p, q in zip(parts, QUERIES, strict=True)])
    distance = (y.double() - expected).abs() / (1 + expected.abs())
    assert float(distance.max()) < TOLERANCE
    late = [each[-q:] for each, q in zip(torch.split(summed, CONTEXTS), QUERIES, strict=True)]
    assert torch.equal(changed, torch.cat(late))


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_a_row_has_the_same_bits_for_any_cuts_and_batch(shape: Shape) -> None:
    weights = shape.weights()
    residual = torch.randn(300, shape.hidden).to(BF16)
    block = TiledAttention(weights)
    whole = block(None, residual.clone(), ragged_batch([300], [300], block_size=64), shape.cache())
    for threads, cuts in ((1, (1, 20, 64, 256)), (2, (33, 150)), (3, (299,))):
        torch.set_num_threads(threads)
        cache, parts = shape.cache(), []
        for begin, end in zip((0, *cuts), (*cuts, 300), strict=True):
            batch = ragged_batch([end - begin], [end], block_size=64)
            table = ragged_batch([300], [300], block_size=64).block_tables[:, : -(-end // 64)]
            at = torch.arange(begin, end)
            rows = table[0, at // 64].long() * 64 + at % 64
            batch = replace(batch, block_tables=table, cache_rows=rows)
            parts.append(block(None, residual[begin:end].clone(), batch, cache))
        assert torch.equal(torch.cat(parts), whole)
    torch.set_num_threads(2)


@pytest.mark.parametrize("shape", SHAPES)
def test_mlp_equals_its_definition_and_is_independent_of_the_batch(shape: Shape) -> None:
    weights = shape.mlp()
    block = TiledMlp(weights)
    residual, x = (torch.randn(600, shape.hidden).to(BF16) for _ in range(2))
    changed = residual.clone()
    whole = block(x.clone(), changed)
    assert torch.equal(changed, residual + x)
    gate, up = apply(weights.gate_up, norm(changed.double(), weights.norm)).chunk(2, dim=-1)
    expected = apply(weights.down, F.silu(gate) * up)
    assert float(((whole.double() - expected).abs() / (1 + expected.abs())).max()) < TOLERANCE
    for rows in (1, 16, 17, 32, 33, 64, 511, 513):
        for start in (0, 600 - rows):
            part = slice(start, start + rows)
            torch.set_num_threads(1 + rows % 3)
            assert torch.equal(block(x[part].clone(), residual[part].clone()), whole[part])
    torch.set_num_threads(2)


@pytest.mark.parametrize("wide", [False, True])
def test_blocks_agree_with_those_put_together_from_plain_operations(wide: bool) -> None:
    shape = Shape(bias=True, qk_norm=True, window=90, qwen3_5=wide)
    plain = PlainKernels(deterministic=True, block_size=64)
    residual, x = (torch.randn(91, shape.hidden).to(BF16) for _ in range(2))
    weights, mlp = shape.weights(), shape.mlp()
    batch = ragged_batch([90, 1], [90, 1], block_size=64)
    cache = plain.new_cache(
        num_blocks=8, num_kv_heads=2, head_dim=64, dtype=BF16, device=torch.device("cpu")
    )
    outs = []
    for kernels, each in ((plain, cache), (CpuKernels(deterministic=True), shape.cache(8))):
        rows = residual.clone()
        y = kernels.attention(weights)(x.clone(), rows, batch, each)
        outs.append(kernels.mlp(mlp)(y, rows).double())
    assert float(((outs[0] - outs[1]).abs() / (1 + outs[0].abs())).max()) < TOLERANCE


LAYERS = [
    [Shape()] * 3,
    [Shape(hidden=64, inter=48, bias=True, qk_norm=True)] * 2,
    [Shape(window=70), Shape(), Shape(window=1)],
    [Shape(qwen3_5=True), Shape()],
]


@pytest.mark.parametrize("shapes", LAYERS)
@pytest.mark.parametrize(
    "counts", [(300, 1, 91, 1, 2, 1), (1, 1, 1, 1, 1, 1), (298, 60, 150, 1, 100, 60)]
)
def test_all_layers_at_once_are_one_after_the_other(
    shapes: list[Shape], counts: tuple[int, ...]
) -> None:
    """To the bit, caches included; the halves themselves are held to their definitions above."""
    kernels = CpuKernels(deterministic=True)
    rotation = shapes[0].weights().rotation
    layers = [
        Layer(
            kernels.attention(replace(shape.weights(), rotation=rotation)), kernels.mlp(shape.mlp())
        )
        for shape in shapes
    ]
    together = kernels.layers(layers, None)
    assert isinstance(together, TiledLayers)
    apart = kernels.layers(layers, lambda x: x)
    assert isinstance(apart, ComposedLayers)
    residual = torch.randn(sum(CONTEXTS), shapes[0].hidden).to(BF16)
    result = []
    for run_layers in (together, apart):
        caches = [shape.cache() for shape in shapes]
        firsts = [c - q for c, q in zip(CONTEXTS, counts, strict=True)]
        rows = torch.split(torch.arange(sum(CONTEXTS)), CONTEXTS)
        early = torch.cat([row[:first] for row, first in zip(rows, firsts, strict=True)])
        late = torch.cat([row[first:] for row, first in zip(rows, firsts, strict=True)])
        run_layers(residual[early], tables_of(firsts, firsts), caches)
        changed = residual[late]
        y = run_layers(changed, tables_of(counts, CONTEXTS), caches)
        pages = [each for cache in caches for each in (cache.keys, cache.values)]
        result.append([y, changed, *pages])
    for left, right in zip(*result, strict=True):
        assert torch.equal(left, right)


def test_each_layer_of_the_operator_over_all_layers_is_a_sign_of_life() -> None:
    """It takes units of work in each of its phases, and more for more rows."""
    kernels, shape = CpuKernels(deterministic=True), Shape()
    weights = shape.weights()
    layer = Layer(kernels.attention(weights), kernels.mlp(shape.mlp()))

    def count_of(num_layers: int, counts: Sequence[int]) -> int:
        run_layers = kernels.layers([layer] * num_layers, None)
        assert isinstance(run_layers, TiledLayers)
        residual = torch.randn(sum(counts), shape.hidden).to(BF16)
        before = PULSE.value
        run_layers(residual, tables_of(counts, CONTEXTS), [shape.cache()] * num_layers)
        return PULSE.value - before

    few = [1] * len(CONTEXTS)
    one, two, many = count_of(1, few), count_of(2, few), count_of(1, CONTEXTS)
    assert one > 4
    assert two == 2 * one
    assert many > one


def test_each_half_of_a_layer_of_plain_operations_is_a_sign_of_life() -> None:
    kernels, shape = PlainKernels(deterministic=True, block_size=64), Shape()
    layer = Layer(kernels.attention(shape.weights()), kernels.mlp(shape.mlp()))
    batch = ragged_batch([90, 1], [90, 1], block_size=64)
    cache = kernels.new_cache(
        num_blocks=8, num_kv_heads=2, head_dim=64, dtype=BF16, device=torch.device("cpu")
    )
    residual = torch.randn(91, shape.hidden).to(BF16)
    before = PULSE.value
    kernels.layers([layer] * 3, None)(residual, batch, [cache] * 3)
    assert PULSE.value - before == 6


FIRST_CALL = """
import sys, torch
from millrace_shard.kernels.agreement import largest_difference
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import AttentionWeights, LinearWeights, MlpWeights
from millrace_shard.kernels.layer_weights import HeadNorms, NormWeights
from millrace_shard.kernels.plain import PlainKernels
load_operators()
torch.ops.millrace.use_amx(sys.argv[1] == "amx")
kernels, plain = CpuKernels(deterministic=True), PlainKernels(deterministic=False)
shape = LayerShape.small(32)
print(largest_difference(kernels, plain, dtype=torch.bfloat16, shape=shape))
"""


def test_threads_that_do_not_yet_agree_on_their_number_share_work_alike(unit: str) -> None:
    """ATen finds it out in each thread by itself, in the first call there."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, unit], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < TOLERANCE


def test_layers_of_several_sizes_are_run_one_after_the_other() -> None:
    kernels = CpuKernels(deterministic=True)
    rotation = Shape().weights().rotation
    layers = [
        Layer(
            kernels.attention(replace(shape.weights(), rotation=rotation)), kernels.mlp(shape.mlp())
        )
        for shape in (Shape(), Shape(inter=176))
    ]
    assert isinstance(kernels.layers(layers, None), ComposedLayers)
    assert isinstance(kernels.layers(layers[:1], None), TiledLayers)


def test_a_sequence_that_is_not_finite_spoils_no_other() -> None:
    shape = Shape()
    weights, mlp = shape.weights(), shape.mlp()
    residual = torch.randn(sum(CONTEXTS), shape.hidden).to(BF16)
    whole, _ = run(weights, shape, None, residual)
    spoilt = residual.clone()
    spoilt[10] = math.nan  # of the first sequence
    y, _ = run(weights, shape, None, spoilt)
    assert torch.equal(y[300:], whole[300:])
    assert bool(y[10:300].isnan().all())
    block = TiledMlp(mlp)
    out = block(torch.zeros_like(residual), spoilt.clone())
    good = torch.arange(len(residual)) != 10
    expected = block(torch.zeros_like(residual), residual.clone())
    assert torch.equal(out[good], expected[good])
    assert bool(out[10].isnan().all())


def test_a_head_does_not_round_its_logits() -> None:
    weight = torch.randn(1003, 576).to(BF16) / 24
    x = torch.randn(5, 576).to(BF16)
    logits = PanelLinear(LinearWeights(StoredWeight.of(weight)), dtype=torch.float32)(x)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(
        logits.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("out", "inputs"), [(96, 64), (70, 50), (160, 33)])
@pytest.mark.parametrize("cuts", [(), (32,), (1, 17), (5, 5, 33, 69)])
def test_parts_are_packed_as_the_whole(out: int, inputs: int, cuts: tuple[int, ...]) -> None:
    weight = torch.randn(out, inputs + 7).to(BF16)[:, :inputs]
    ends = [*cuts, out]
    parts = [weight[begin:end] for begin, end in zip([0, *cuts], ends, strict=True)]
    for gated in (False,) if out % 32 else (False, True):
        whole = torch.ops.millrace.pack_panels([weight.contiguous()], gated)
        assert torch.equal(torch.ops.millrace.pack_panels(parts, gated), whole)


@pytest.mark.parametrize(
    "parts",
    [
        [torch.zeros(32, 64)],
        [torch.zeros(32, 64, dtype=BF16), torch.zeros(32, 32, dtype=BF16)],
        [torch.zeros(64, 32, dtype=BF16).T],
    ],
)
def test_parts_that_are_not_a_weight_are_refused(parts: list[Tensor]) -> None:
    with pytest.raises(RuntimeError, match="Expected"):
        torch.ops.millrace.pack_panels(parts, False)


def test_weights_outlive_others_packed_with_them_and_then_free_their_memory() -> None:
    before = resident_bytes()
    x = torch.randn(2, 256).to(BF16)
    weights = [torch.randn(rows, 256).to(BF16) for rows in (33, 70_000, 1, 70_000, 500)]
    copied = [PanelLinear(LinearWeights(StoredWeight.of(weight))) for weight in weights]
    expected = [linear(x) for linear in copied]
    del copied[3], expected[3]
    others = [PanelLinear(LinearWeights(StoredWeight.of(weight))) for weight in weights]
    assert all(torch.equal(each(x), y) for each, y in zip(copied, expected, strict=True))
    packed = 3 * 2 * 256 * 70_000
    assert resident_bytes() > before + packed
    del copied, others
    assert resident_bytes() < before + packed


def resident_bytes() -> int:
    """The resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
