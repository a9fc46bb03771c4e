"""Adapters by Triton against float64 and against themselves in other company: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.adapters.packing import AdapterPacker, CanonicalModule
from millrace_shard.kernels import agreement
from millrace_shard.kernels.base import Linear
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.lora import adapter_table, lora_agreement, triton_lora
from millrace_shard.kernels.lora.adapter_table import (
    AdapterRows,
    AdapterTable,
    LoraPart,
    PackedAdapter,
    most_blocks,
    running,
)
from millrace_shard.kernels.lora.lora_agreement import adapter_difference
from millrace_shard.kernels.lora.triton_lora import TritonAdaptedLinear
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_testing.quantized.code_formats import random_codes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# In parts of 1 + size. The interpreter casts to bfloat16 by cutting off, as numpy has none.
TOLERANCE = {BF16: 0.03, FP16: 0.004, FP32: 4e-6}
pytestmark = pytest.mark.long
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INPUTS = 1100
OUTPUTS = (70, 33, 16)
RANKS = (1, 8, 16, 17, 40, 96)
"""Ranks of the adapters in slots 1, 2, …; the modules of an adapter have other ranks."""


@pytest.fixture(
    params=[BF16, pytest.param(FP16, marks=pytest.mark.long), FP32], ids=["bf16", "fp16", "fp32"]
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    assert isinstance(request.param, torch.dtype)
    return request.param


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def module(rank: int, inputs: int, outputs: int, *, bias: bool, seed: int) -> CanonicalModule:
    return CanonicalModule(
        a=normal(rank, inputs, seed=seed) / math.sqrt(inputs),
        b=normal(outputs, rank, seed=seed + 1) / math.sqrt(rank),
        scales=normal(rank, seed=seed + 2),
        bias=normal(outputs, seed=seed + 3) if bias else None,
    )


@dataclass
class Bench:
    """A fused linear of three modules behind another one, and adapters for it."""

    dtype: torch.dtype
    inputs: int = INPUTS
    is_head: bool = False
    modules: dict[int, dict[str, CanonicalModule]] = field(default_factory=dict)
    """By slot, then by the name of the module."""

    def __post_init__(self) -> None:
        self.table = AdapterTable(DEVICE)
        self.table.add_site([self._part("before", 5, 0)])
        starts = np.cumsum([0, *OUTPUTS])
        self.parts = [
            self._part(name, count, int(start))
            for name, count, start in zip("qkv", OUTPUTS, starts, strict=False)
        ]
        site = self.table.add_site(self.parts, is_head=self.is_head)
        weight = normal(sum(OUTPUTS), self.inputs, seed=1) / math.sqrt(self.inputs)
        self.weight = weight.to(DEVICE, self.dtype)
        kernels = CudaKernels(deterministic=True)
        self.base = kernels.linear(self.weight)
        self.linear: Linear = kernels.linear_from(
            LinearWeights(StoredWeight.of(self.weight), lora=site)
        )
        self.table.resize(len(RANKS))
        packer = AdapterPacker(self.table, self.dtype)
        for slot, rank in enumerate(RANKS, 1):
            # Slot 2 does not change k.
            self.modules[slot] = {
                part.name: module(
                    rank + 3 * place,
                    self.inputs,
                    part.outputs,
                    bias=place == slot % 3,
                    seed=9 * slot + 50 * place,
                )
                for place, part in enumerate(self.parts)
                if (slot, part.name) != (2, "k")
            }
            packed = packer.pack(self.modules[slot])
            self.table.put(slot, PackedAdapter(digest="", parts=packed, num_pages=1))

    def _part(self, name: str, outputs: int, first: int) -> LoraPart:
        return LoraPart(
            name=name,
            inputs=self.inputs,
            outputs=outputs,
            input_range=(0, self.inputs),
            output_range=(0, outputs),
            first_output=first,
        )

    def __call__(self, x: Tensor, slots: Sequence[int]) -> Tensor:
        rows = AdapterRows.of(np.array(slots), DEVICE)
        with running(self.table, tokens=rows):
            return self.linear(x)

    def expected(self, x: Tensor, slots: Sequence[int]) -> Tensor:
        """In float64, of the weights rounded to the dtype."""
        wide = x.double().cpu()
        y = wide @ self.weight.double().cpu().T
        for row, slot in enumerate(slots):
            for part in self.parts:
                result = self.modules.get(slot, {}).get(part.name)
                if result is None:
                    continue
                a, b = (each.to(self.dtype).double() for each in (result.a, result.b))
                delta = (wide[row] @ a.T * result.scales.double()) @ b.T
                if result.bias is not None:
                    delta = delta + result.bias.double()
                y[row, part.first_output : part.first_output + part.outputs] += delta
        return y


@pytest.fixture
def bench(dtype: torch.dtype) -> Bench:
    return Bench(dtype)


def mixed(count: int, seed: int = 0) -> list[int]:
    """Slots of rows in no order, 0 among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, len(RANKS) + 1, (count,), generator=generator).tolist()


def error(out: Tensor, expected: Tensor) -> float:
    difference = (out.double().cpu() - expected).abs() / (1 + expected.abs())
    return float(difference.max())


def is_right(bench: Bench, rows: int) -> bool:
    x, slots = normal(rows, bench.inputs, seed=3).to(DEVICE, bench.dtype), mixed(rows)
    return error(bench(x, slots), bench.expected(x, slots)) < TOLERANCE[bench.dtype]


@pytest.mark.parametrize("rows", [7, 60])
def test_products_match_their_definition(bench: Bench, rows: int) -> None:
    assert is_right(bench, rows)


def test_programs_that_add_all_parts_give_the_right_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_lora, "MANY_BLOCKS", 2)
    assert is_right(Bench(FP32), 20)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32 if values.dtype == FP32 else torch.int16)


def has_the_bits_of_rows_alone(bench: Bench, rows: int = 30) -> bool:
    x, slots = normal(rows, bench.inputs, seed=5).to(DEVICE, bench.dtype), mixed(rows, seed=2)
    whole = bench(x, slots)
    return all(
        torch.equal(bits(bench(x[row : row + 1], slots[row : row + 1])), bits(whole[row : row + 1]))
        for row in range(0, rows, 13)
    )


def test_a_row_with_an_adapter_has_the_same_bits_in_any_batch(bench: Bench) -> None:
    assert has_the_bits_of_rows_alone(bench)


def test_a_row_has_the_same_bits_in_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that add all parts, and programs with one part each."""
    monkeypatch.setattr(triton_lora, "MANY_BLOCKS", 3)
    bench = Bench(FP32)
    x = normal(50, INPUTS, seed=6).to(DEVICE)
    slots = [2] * len(x)
    slots[3] = slots[40] = 0
    whole = bench(x, slots)
    for rows in ([5], [4, 5, 6], range(30, 50)):
        chosen = list(rows)
        assert torch.equal(bench(x[chosen], [slots[row] for row in chosen]), whole[chosen])


def test_larger_adapters_in_other_slots_do_not_change_bits() -> None:
    bench = Bench(FP16)
    x, slots = normal(4, INPUTS, seed=7).to(DEVICE, FP16), [1, 2, 3, 1]
    whole = bench(x, slots)
    for slot in (4, 5, 6):
        bench.table.remove(slot)
    assert torch.equal(bench(x, slots), whole)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_without_an_adapter_keep_their_bits(bench: Bench) -> None:
    x = normal(20, INPUTS, seed=8).to(DEVICE, bench.dtype)
    # Sums of -0 change when 0 is added, and what is not finite would show in a product with a mask.
    x[1], x[2, 3], x[4, 5] = -0.0, torch.nan, torch.inf
    slots = [0, 0, 3, 0, 6, *mixed(15)]
    result, base = bench(x, slots), bench.base(x)
    free = [row for row, slot in enumerate(slots) if not slot]
    assert torch.equal(bits(result[free]), bits(base[free]))
    others = [row for row, slot in enumerate(slots) if slot and row not in {2, 4}]
    assert result[others].isfinite().all()
    assert not torch.equal(result[others], base[others])


def test_a_module_that_an_adapter_does_not_change_keeps_its_bits() -> None:
    bench = Bench(FP32)
    x = normal(3, INPUTS, seed=9).to(DEVICE)
    columns = slice(OUTPUTS[0], OUTPUTS[0] + OUTPUTS[1])
    result, base = bench(x, [2, 2, 1]), bench.base(x)
    assert torch.equal(result[:2, columns], base[:2, columns])
    assert (result[:2] != base[:2]).any()
    assert (result[2:, columns] != base[2:, columns]).any()


def test_replaced_adapters_and_rows_that_are_views_are_computed_right() -> None:
    bench = Bench(FP32)
    x = normal(3, INPUTS, seed=10).to(DEVICE)
    slots = [4, 0, 5]
    first = bench(torch.cat([x, x], dim=1)[:, :INPUTS], slots)
    assert torch.equal(first, bench(x.t().contiguous().t(), slots))
    moved = bench.table.get(4)
    assert moved is not None
    bench.table.put(1, moved)
    assert torch.equal(bench(x, [1, 0, 5]), first)
    bench.table.remove(1)
    assert torch.equal(bench(x, [1, 0, 5])[:2], bench.base(x)[:2])


def test_a_linear_over_codes_has_the_adapters_too() -> None:
    bench = Bench(FP32)
    codes = random_codes("int4", sum(OUTPUTS), INPUTS, 128)
    stored = StoredWeight((codes,), FP32, DEVICE)
    weights = LinearWeights(stored, lora=bench.table.sites[-1])
    bench.linear = CudaKernels(deterministic=True).linear_from(weights)
    bench.weight = codes.dequantized().to(DEVICE)
    assert is_right(bench, 7)


@pytest.mark.parametrize("over_codes", [False, True])
def test_the_head_adds_to_float32_logits(over_codes: bool) -> None:
    table = AdapterTable(DEVICE)
    part = LoraPart(
        name="lm_head", inputs=96, outputs=70, input_range=(0, 96), output_range=(0, 70)
    )
    site = table.add_site([part], is_head=True)
    weight = normal(70, 96, seed=1).to(DEVICE, FP16)
    kernels = CudaKernels(deterministic=True)
    if over_codes:
        codes = random_codes("int8", 70, 96, None)
        weight = codes.dequantized().to(DEVICE)
        stored = StoredWeight((codes,), FP16, DEVICE)
        head = kernels.head_from(LinearWeights(stored, lora=site))
    else:
        head = kernels.head(weight, site)
    table.resize(1)
    own = module(5, 96, 70, bias=False, seed=2)
    packed = AdapterPacker(table, FP16).pack({"lm_head": own})
    table.put(1, PackedAdapter(digest="", parts=packed, num_pages=1))
    x = normal(3, 96, seed=3).to(DEVICE, FP16)
    with running(table, logits=AdapterRows.of(np.array([0, 1, 1]), DEVICE)):
        logits = head(x)
    assert logits.dtype == FP32
    expected = x.double().cpu() @ weight.double().cpu().T
    a, b = own.a.half().double(), own.b.half().double()
    expected[1:] += (x[1:].double().cpu() @ a.T * own.scales.double()) @ b.T
    assert error(logits, expected) < TOLERANCE[FP16]


def test_the_adapter_of_a_neighbour_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: each row has the adapter of the row before."""
    blocks = adapter_table._blocks
    monkeypatch.setattr(adapter_table, "_blocks", lambda host: blocks(np.roll(host, 1)))
    assert not is_right(Bench(FP32), 7)


def test_a_split_by_the_number_of_rows_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: few rows are split into other parts."""
    add = TritonAdaptedLinear._add

    def split(self: TritonAdaptedLinear, y: Tensor, x: Tensor, blocks: Tensor) -> None:
        self._part, self._num_parts = (64, 18) if len(x) == 1 else (576, 2)
        add(self, y, x, blocks)

    monkeypatch.setattr(TritonAdaptedLinear, "_add", split)
    assert not has_the_bits_of_rows_alone(Bench(FP32))


def test_ranks_past_the_first_slices_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a rank is rounded down to whole slices."""
    put = AdapterTable.put

    def shorter(self: AdapterTable, slot: int, adapter: PackedAdapter) -> None:
        put(self, slot, adapter)
        self.lora_table[slot, :, 4] = self.lora_table[slot, :, 4].clamp(max=1)

    monkeypatch.setattr(AdapterTable, "put", shorter)
    assert not is_right(Bench(FP32), 7)


@given(st.lists(st.integers(0, 4), max_size=90))
def test_blocks_hold_each_row_with_an_adapter_once(slots: list[int]) -> None:
    host = np.array(slots, dtype=np.int64)
    rows = AdapterRows.of(host, torch.device("cpu"))
    if rows is None:
        assert not host.any()
        return
    blocks = rows.blocks.numpy()
    assert len(blocks) <= most_blocks(len(host), 4)
    result = [(int(row), int(slot)) for slot, *own in blocks for row in own if row >= 0]
    assert sorted(result) == [(row, slot) for row, slot in enumerate(slots) if slot]


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_check_at_the_start_is_passed(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        # The interpreter takes long for the real numbers, and other tests have as many channels and as long contexts.
        for module_ in (agreement, lora_agreement):
            monkeypatch.setattr(module_, "INTER", 144)
            monkeypatch.setattr(module_, "CONTEXT", (70, 20, 40))
    kernels, oracle = CudaKernels(deterministic=deterministic), PlainKernels(deterministic=False)
    difference = adapter_difference(kernels, oracle, dtype=FP32, head_dim=16, device=DEVICE)
    assert difference < agreement.TOLERANCE[FP32]
