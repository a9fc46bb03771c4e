"""Adapters in the operators over tiles against float64, and each row against itself alone and without an adapter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Layer, LayerCache
from millrace_shard.kernels.cpu import tile_blocks
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
    LinearWeights,
    MlpWeights,
)
from millrace_shard.kernels.lora.adapted_linear import AdaptedLinear
from millrace_shard.kernels.lora.adapter_table import (
    AdapterRows,
    AdapterTable,
    LoraPart,
    LoraSite,
    PackedAdapter,
    PackedPart,
    running,
)
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_testing.engines.layer_blocks import (
    EPS,
    apply,
    attention_of_one,
    norm,
    norm_of,
    rotation_of,
)

BF16 = torch.bfloat16
CPU = torch.device("cpu")
RANKS = (1, 4, 8, 16, 17, 64)
TOLERANCE = 0.08
HIDDEN, HEADS, KV_HEADS, DIM, INTER = 96, 6, 2, 64, 144
CONTEXTS = [300, 65, 191, 1, 40]


pytestmark = pytest.mark.usefixtures("unit", "seed")


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The weights of an adapter for one module, as its file has them."""

    a: Tensor
    b: Tensor
    scales: Tensor
    bias: Tensor | None = None

    @classmethod
    def random(cls, outputs: int, inputs: int, rank: int, *, bias: bool = False) -> Lora:
        return cls(
            a=(torch.randn(rank, inputs) / math.sqrt(inputs)).to(BF16),
            b=(torch.randn(outputs, rank) / math.sqrt(rank)).to(BF16),
            scales=torch.rand(rank) + 0.5,
            bias=torch.randn(outputs) if bias else None,
        )

    def delta(self, x: Tensor) -> Tensor:
        """By definition, in float64."""
        delta = F.linear(F.linear(x, self.a.double()) * self.scales.double(), self.b.double())
        return delta if self.bias is None else delta + self.bias.double()

    def packed(self) -> PackedPart:
        rank, outputs = len(self.a), len(self.b)
        bias = None if self.bias is None else F.pad(self.bias, (0, -outputs % 16))
        return PackedPart(
            a=torch.ops.millrace.pack_lora_a(self.a),
            b=torch.ops.millrace.pack_lora_b(self.b),
            factors=F.pad(self.scales, (0, -rank % 16)),
            bias=bias,
            num_slices=-(-rank // 16),
        )


@dataclass(kw_only=True)
class Model:
    """Sites and adapters of some linears."""

    table: AdapterTable = field(default_factory=lambda: AdapterTable(CPU))
    loras: dict[int, dict[int, Lora]] = field(default_factory=dict)
    """By slot and module."""

    def linear(
        self, outputs: Sequence[int], inputs: int, *, bias: bool = False, is_head: bool = False
    ) -> LinearWeights:
        starts = [sum(outputs[:i]) for i in range(len(outputs))]
        parts = [
            LoraPart(
                name=f"module{len(self.table.parts) + i}",
                inputs=inputs,
                outputs=count,
                input_range=(0, inputs),
                output_range=(0, count),
                first_output=start,
            )
            for i, (count, start) in enumerate(zip(outputs, starts, strict=True))
        ]
        weight = (torch.randn(sum(outputs), inputs) / math.sqrt(inputs)).to(BF16)
        return LinearWeights(
            StoredWeight.of(weight),
            torch.randn(sum(outputs)).to(BF16) if bias else None,
            self.table.add_site(parts, is_head=is_head),
        )

    def load(self, ranks: Sequence[Mapping[int, int]], *, bias: bool = False) -> None:
        """Slot i + 1 gets an adapter with the rank `ranks[i][module]` for each of its modules."""
        self.table.resize(len(ranks))
        for slot, of_modules in enumerate(ranks, start=1):
            self.loras[slot] = {
                module: Lora.random(
                    self.table.parts[module].num_outputs,
                    self.table.parts[module].num_inputs,
                    rank,
                    bias=bias and (slot + module) % 2 == 0,
                )
                for module, rank in of_modules.items()
            }
            parts = {module: lora.packed() for module, lora in self.loras[slot].items()}
            self.table.put(slot, PackedAdapter(digest=str(slot), parts=parts, num_pages=1))

    def apply(self, weights: LinearWeights, x: Tensor, slots: Tensor) -> Tensor:
        """A linear by its definition, in float64."""
        y = apply(weights, x)
        site = weights.lora
        assert site is not None
        for slot, loras in self.loras.items():
            own = slots == slot
            for offset, part in enumerate(site.parts):
                if (lora := loras.get(site.first + offset)) is not None:
                    end = part.first_output + part.num_outputs
                    y[own, part.first_output : end] += lora.delta(x[own])
        return y

    def mlp(self, *, bias: bool = False) -> MlpWeights:
        return MlpWeights(
            norm=norm_of(HIDDEN),
            gate_up=self.linear([INTER, INTER], HIDDEN, bias=bias),
            down=self.linear([HIDDEN], INTER, bias=bias),
        )

    def attention(self, *, bias: bool = False) -> AttentionWeights:
        return AttentionWeights(
            norm=norm_of(HIDDEN),
            qkv=self.linear([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], HIDDEN, bias=bias),
            out=self.linear([HIDDEN], HEADS * DIM, bias=bias),
            rotation=rotation_of(DIM),
            scale=DIM**-0.5,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
        )


def random_slots(rows: int, slots: int) -> Tensor:
    """Long runs of one adapter, of none, and a mixture with rows of the base model."""
    chosen = torch.randint(0, slots + 1, (rows,))
    chosen[64:112] = 1
    chosen[160:200] = 2
    chosen[200:240] = 0
    return chosen


def of_slots(slots: Tensor) -> AdapterRows | None:
    return AdapterRows.of(slots.numpy().astype(np.int64), CPU)


def mixed_ranks(modules: Sequence[int]) -> list[dict[int, int]]:
    """A rank of RANKS for all modules, then adapters with other ranks for other modules, which leave some out."""
    same = [dict.fromkeys(modules, rank) for rank in RANKS]
    mixed = [{m: RANKS[(m + i) % len(RANKS)] for m in modules if (m + i) % 3} for i in range(3)]
    return same + mixed


def distance(y: Tensor, expected: Tensor) -> float:
    return float(((y.double() - expected).abs() / (1 + expected.abs())).max())


LINEARS = [([1003], 70, torch.float32), ([96, 32, 48], 576, BF16), ([40], 1600, BF16)]


def in_codes(weights: LinearWeights, outputs: Sequence[int]) -> LinearWeights:
    """The same linear over codes of 4 bits, whose values bfloat16 holds, in parts whose groups differ in size."""
    inputs = weights.weight.shape[1]
    parts = [
        QuantizedTensor(
            codes=torch.randint(16, (count, inputs), dtype=torch.uint8),
            values=torch.arange(16.0) - 8,
            scales=2.0 ** -torch.randint(4, 9, (count, -(-inputs // group))),
            group_size=group,
        )
        for count, group in zip(outputs, itertools.cycle((32, 64)), strict=False)
    ]
    return replace(weights, weight=StoredWeight(parts, BF16, CPU))


@pytest.mark.parametrize(
    ("kind", "bias"), [("plain", False), ("plain", True), ("coded", True), ("integer", False)]
)
@pytest.mark.parametrize(("outputs", "inputs", "dtype"), LINEARS)
def test_a_linear_adds_each_rows_own_adapter(
    outputs: list[int], inputs: int, dtype: torch.dtype, kind: str, bias: bool
) -> None:
    model = Model()
    weights = model.linear(outputs, inputs, bias=bias)
    if kind != "plain":
        weights = in_codes(weights, outputs)
    linear, base = (
        PanelLinear(each, dtype=dtype, integer=kind == "integer")
        for each in (weights, replace(weights, lora=None))
    )
    model.load(mixed_ranks(range(len(outputs))), bias=bias)
    x, slots = torch.randn(600, inputs).to(BF16), random_slots(600, len(model.loras))
    with running(model.table, tokens=of_slots(slots)):
        whole = linear(x)
    assert torch.equal(linear(x), base(x))
    assert torch.equal(whole[slots == 0], base(x)[slots == 0])
    error = distance(whole, model.apply(weights, x.double(), slots))
    assert error < (0.2 if kind == "integer" else 0.02)
    for rows in (1, 2, 16, 17, 31, 33, 64, 513):
        for start in (0, 64, 161, 600 - rows):
            part = slice(start, start + rows)
            torch.set_num_threads(1 + rows % 3)
            with running(model.table, tokens=of_slots(slots[part])):
                assert torch.equal(linear(x[part]), whole[part])
    torch.set_num_threads(2)


def test_rows_have_the_same_bits_in_any_order() -> None:
    """Not rounded to bfloat16, which would hide another order of sums; rows are of very different sizes."""
    model = Model()
    weights = model.linear([64], 64)
    linear, base = (
        PanelLinear(each, dtype=torch.float32) for each in (weights, replace(weights, lora=None))
    )
    model.load([{0: 16}, {0: 33}])
    x = (torch.randn(48, 64) * 2.0 ** torch.randint(-60, 3, (48, 1))).to(BF16)
    slots = torch.tensor([1] * 48)
    with running(model.table, tokens=of_slots(slots)):
        alike = linear(x)
    mixed = torch.where(torch.arange(48) % 3 == 0, slots, torch.randint(0, 3, (48,)))
    with running(model.table, tokens=of_slots(mixed)):
        company = linear(x)
    same = mixed == 1
    assert same.sum() > 16
    assert torch.equal(company[same], alike[same])
    none = mixed == 0
    assert torch.equal(company[none], base(x)[none])


@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_adds_adapters_before_its_activation(bias: bool) -> None:
    model = Model()
    weights = model.mlp(bias=bias)
    block = TiledMlp(weights)
    model.load(mixed_ranks(range(3)), bias=bias)
    residual, x = (torch.randn(600, HIDDEN).to(BF16) for _ in range(2))
    slots = random_slots(600, len(model.loras))

    def run(part: slice) -> Tensor:
        with running(model.table, tokens=of_slots(slots[part])):
            return block(x[part].clone(), residual[part].clone())

    whole, base = run(slice(600)), block(x.clone(), residual.clone())
    assert torch.equal(whole[slots == 0], base[slots == 0])
    h = (residual + x).double()
    normed = norm(h, weights.norm)
    gate, up = model.apply(weights.gate_up, normed, slots).chunk(2, dim=-1)
    expected = model.apply(weights.down, F.silu(gate) * up, slots)
    assert distance(whole, expected) < TOLERANCE
    for rows in (1, 16, 17, 33, 511, 513):
        for start in (0, 70, 600 - rows):
            part = slice(start, min(600, start + rows))
            torch.set_num_threads(1 + rows % 3)
            assert torch.equal(run(part), whole[part])
    torch.set_num_threads(2)


def new_cache() -> LayerCache:
    kernels = CpuKernels(deterministic=True)
    cache = kernels.new_cache(
        num_blocks=64, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=BF16, device=CPU
    )
    kernels.zero_blocks(cache, torch.arange(64))
    return cache


@pytest.mark.parametrize("bias", [False, True])
def test_attention_adds_each_sequences_own_adapter(bias: bool) -> None:
    model = Model()
    weights = model.attention(bias=bias)
    block = TiledAttention(weights)
    model.load(mixed_ranks(range(4)), bias=bias)
    residual = torch.randn(sum(CONTEXTS), HIDDEN).to(BF16)
    of_sequences = [5, 0, 6, 2, 8]
    slots = torch.tensor(of_sequences).repeat_interleave(torch.tensor(CONTEXTS))
    whole = ragged_batch(CONTEXTS, CONTEXTS, block_size=64)
    with running(model.table, tokens=of_slots(slots)):
        y = block(None, residual.clone(), whole, new_cache())
    base = block(None, residual.clone(), whole, new_cache())
    assert torch.equal(y[slots == 0], base[slots == 0])
    parts = torch.split(residual, CONTEXTS)
    expected = torch.cat(
        [
            attention_of_one(weights, part.double(), partial(model.apply, slots=each))
            for part, each in zip(parts, torch.split(slots, CONTEXTS), strict=True)
        ]
    )
    assert distance(y, expected) < TOLERANCE
    for part, slot, result in zip(parts, of_sequences, torch.split(y, CONTEXTS), strict=True):
        count = len(part)
        batch = ragged_batch([count], [count], block_size=64)
        with running(model.table, tokens=of_slots(torch.full((count,), slot))):
            assert torch.equal(block(None, part.clone(), batch, new_cache()), result)


def test_all_layers_at_once_are_one_after_the_other() -> None:
    model, kernels = Model(), CpuKernels(deterministic=True)
    layers, rotation = [], None
    for _ in range(3):
        attention = model.attention()
        rotation = rotation or attention.rotation
        layers.append(
            Layer(
                kernels.attention(replace(attention, rotation=rotation)), kernels.mlp(model.mlp())
            )
        )
    model.load(mixed_ranks(range(21)))
    together, apart = kernels.layers(layers, None), kernels.layers(layers, lambda x: x)
    assert isinstance(together, TiledLayers)
    assert isinstance(apart, ComposedLayers)
    assert isinstance(kernels.layers([layers[0], layers[2]], None), ComposedLayers)
    residual = torch.randn(sum(CONTEXTS), HIDDEN).to(BF16)
    slots = torch.tensor([5, 0, 6, 2, 8]).repeat_interleave(torch.tensor(CONTEXTS))
    batch, result = ragged_batch(CONTEXTS, CONTEXTS, block_size=64), []
    for run_layers in (together, apart):
        caches, changed = [new_cache() for _ in range(3)], residual.clone()
        with running(model.table, tokens=of_slots(slots)):
            y = run_layers(changed, batch, caches)
        result.append(
            [y, changed, *(pages for cache in caches for pages in (cache.keys, cache.values))]
        )
    for left, right in zip(*result, strict=True):
        assert torch.equal(left, right)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    model = Model()
    linear = PanelLinear(model.linear([64], 64))
    model.load([{0: 16}, {0: 16}])
    x = torch.randn(40, 64).to(BF16)
    for slots in (torch.ones(40, dtype=torch.int64), torch.randint(0, 3, (40,))):
        with running(model.table, tokens=of_slots(slots)):
            expected, spoilt = linear(x), x.clone()
            spoilt[7], spoilt[9] = math.nan, math.inf
            y = linear(spoilt)
        good = [row for row in range(40) if row not in (7, 9)]
        assert torch.equal(y[good], expected[good])
        assert not bool(y[7].isfinite().any())


def test_packed_weights_are_padded_with_zeros() -> None:
    a, b = torch.ones(17, 33, dtype=BF16), torch.ones(20, 17, dtype=BF16)
    b[3, 4] = 2.0**-41
    packed_a, packed_b = torch.ops.millrace.pack_lora_a(a), torch.ops.millrace.pack_lora_b(b)
    assert packed_a.shape == (2, 2, 16, 16, 2)
    assert packed_b.shape == (2, 2, 8, 16, 2)
    unpacked_a = packed_a.permute(0, 3, 1, 2, 4).reshape(32, 64)
    unpacked_b = packed_b.permute(0, 3, 1, 2, 4).reshape(32, 32)
    b[3, 4] = 0
    assert torch.equal(unpacked_a, F.pad(a, (0, 31, 0, 15)))
    assert torch.equal(unpacked_b, F.pad(b, (0, 15, 0, 12)))
    for bad in (a.float(), a.T, a[0], a[:0]):
        for pack in (torch.ops.millrace.pack_lora_a, torch.ops.millrace.pack_lora_b):
            with pytest.raises(RuntimeError, match="bfloat16 matrix"):
                pack(bad)


def bad_operands(rows: Tensor, table: Tensor) -> Iterator[tuple[Tensor, Tensor | None, int, str]]:
    """Rows, table, first module, and the error."""
    yield rows, None, 0, "belong together"
    yield rows.long(), table, 0, "belong together"
    yield rows[:-1], table, 0, "one adapter slot per row"
    yield rows, table.int(), 0, "not a table"
    yield rows, table[..., :4].contiguous(), 0, "not a table"
    yield rows, table[0], 0, "not a table"
    yield rows, table, 1, "lacks modules"
    yield rows, table, -1, "lacks modules"
    yield rows + 1, table, 0, "slot out of range"
    yield rows - 2, table, 0, "slot out of range"
    for field_, value, error in (
        (4, -1, "slices"),
        (4, 2**40, "slices"),
        (0, 0, "weights"),
        (1, 0, "weights"),
        (2, 0, "weights"),
    ):
        wrong = table.clone()
        wrong[1, -1, field_] = value
        yield rows, wrong, 0, error


def test_operands_that_are_wrong_are_refused_before_anything_is_computed() -> None:
    model = Model()
    attention, mlp = model.attention(), model.mlp()
    half, _ = TiledMlp(mlp), TiledAttention(attention)
    model.load([dict.fromkeys(range(7), 16)])
    x = torch.randn(5, HIDDEN).to(BF16)
    table, rows = model.table.lora_table, torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)
    for some, its_table, first, error in bad_operands(rows, table[:, 4:].contiguous()):
        residual = x.clone()
        with pytest.raises(RuntimeError, match=error):
            torch.ops.millrace.mlp_block(
                x.clone(),
                x,
                residual,
                half.weights[0],
                EPS,
                *half.weights[1:],
                some,
                its_table,
                first,
            )
        assert torch.equal(residual, x)
    linear = PanelLinear(replace(attention.out, lora=None))
    y, tall = torch.empty(5, HIDDEN, dtype=BF16), torch.randn(5, HEADS * DIM).to(BF16)
    for some, its_table, first, error in bad_operands(rows, table[:, 3:4].contiguous()):
        with pytest.raises(RuntimeError, match=error):
            torch.ops.millrace.panel_linear(
                y, tall, linear._packed, linear._bias, some, its_table, first
            )
    for starts in ([16], [0, 8], [0, 96], [0, 32, 16], [0, 16, 32, 48]):
        with pytest.raises(RuntimeError, match="bad parts"):
            torch.ops.millrace.panel_linear(
                y, tall, linear._packed, linear._bias, rows, table, 0, starts
            )
    with pytest.raises(RuntimeError, match="lacks modules"):
        torch.ops.millrace.panel_linear(
            y, tall, linear._packed, linear._bias, rows, table[:, :2].contiguous(), 0, [0, 16, 32]
        )


def test_linears_whose_modules_are_not_whole_tiles_are_composed() -> None:
    model, kernels = Model(), CpuKernels(deterministic=True)
    odd = model.linear([40, 40, 16], 64)
    assert not tile_blocks.fits_site(odd)
    linear = kernels.linear_from(odd)
    assert isinstance(linear, AdaptedLinear)
    whole = model.linear([64], 64, is_head=True)
    assert isinstance(kernels.linear_from(whole), PanelLinear)
    weight = torch.randn(80, 64).to(BF16)
    padded = LinearWeights(StoredWeight.of(weight), None, whole.lora)
    assert not tile_blocks.fits_site(padded)
    mlp, attention = model.mlp(), model.attention()
    assert tile_blocks.fits_mlp(mlp)
    assert tile_blocks.fits_attention(attention)
    assert not tile_blocks.fits_mlp(replace(mlp, down=replace(mlp.down, lora=None)))
    assert not tile_blocks.fits_attention(replace(attention, out=odd))
    sites: list[LoraSite | None] = [mlp.gate_up.lora, attention.qkv.lora]
    assert all(site is not None and site.packing == "plain" for site in sites)
    kernels.mlp(mlp)
    assert mlp.gate_up.lora is not None
    assert mlp.gate_up.lora.packing == "tiles"
