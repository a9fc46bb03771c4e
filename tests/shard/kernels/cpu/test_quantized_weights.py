"""Products with codes against float64 products of the exact values, and against themselves with other rows."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.cpu import packed_weight
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.cpu.packed_weight import has_integer_products, packed_codes
from millrace_shard.kernels.cpu.tile_blocks import PanelLinear
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.quantized import (
    PlainQuantizedLinear,
    QuantizedTensor,
    ScaleUnits,
    in_common_form,
    rounded_rows,
)
from millrace_shard.kernels.stored_weight import StoredWeight

BF16 = torch.bfloat16
OUTPUTS = 70
CHECKED = 40
"""Rows at each end that are compared with float64; `check_rows` compares the others with rows of fewer."""
ROWS = 520
"""More than are multiplied at once."""
NF4_LOW = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0)
NF4_HIGH = (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
TABLES = {
    "int4": torch.arange(16.0) - 8,
    "uint4": torch.arange(16.0),
    "nf4": torch.tensor((*NF4_LOW, *NF4_HIGH)),
    "e2m1": torch.tensor((*E2M1, *(-value for value in E2M1))),
    "iq2": torch.tensor((8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0)) / 8,
    "int8": torch.arange(256.0) - 128,
    "uint8": torch.arange(256.0),
    "e4m3": E4M3,
}
WHOLE = 1 << 20
SIZES = [(576, 16), (576, 32), (576, 128), (704, 64), (704, 96), (576, WHOLE), (100, WHOLE)]
LONG_SIZES = [(2880, 32), (2880, 2880), (2880, 1024)]


pytestmark = pytest.mark.usefixtures("tiles", "two_threads", "seed")


def random_weight(
    table: str,
    inputs: int,
    group: int,
    *,
    outputs: int = OUTPUTS,
    offsets: bool = False,
    order: bool = False,
) -> QuantizedTensor:
    values = TABLES[table]
    shape = outputs, -(-inputs // group)
    return QuantizedTensor(
        codes=torch.randint(len(values), (outputs, inputs), dtype=torch.uint8),
        values=values,
        scales=(torch.rand(shape) + 0.1) / values.abs().max(),
        offsets=torch.randn(shape) if offsets else None,
        group_size=group,
        input_order=torch.randperm(inputs) if order else None,
    )


def linear_of(
    *parts: QuantizedTensor, bias: Tensor | None = None, integer: bool = False, wide: bool = False
) -> PanelLinear:
    weight = LinearWeights(StoredWeight(parts, BF16, torch.device("cpu")), bias)
    return PanelLinear(weight, dtype=torch.float32, integer=integer, wide=wide)


def check(
    y: Tensor,
    weight: QuantizedTensor,
    x: Tensor,
    *,
    integer: bool = False,
    wide: bool = False,
    tolerance: float = 4e-6,
) -> None:
    """Compare the first and last rows with float64, relative to the sums of absolute products."""
    if len(x) > 2 * CHECKED:
        x, y = (torch.cat((each[:CHECKED], each[-CHECKED:])) for each in (x, y))
    if integer:
        rows, matrix = rounded_for(weight, x, wide=wide), weight.dequantized().double()
    else:
        rows, matrix = x.double(), multiplied(weight)
    exact = rows @ matrix.T
    size = rows.abs() @ parts_of(weight).abs().T
    assert float(((y.double() - exact).abs() / size).max()) < tolerance


def multiplied(weight: QuantizedTensor) -> Tensor:
    """The weights of exact products, float64. On AMX small groups have bfloat16, with ties away from zero."""
    if not is_rounded(weight):
        return weight.dequantized().double()
    values, offsets = weight.values.double(), weight.offsets
    high = values.to(BF16).double()
    exact = replace(
        weight,
        values=high + (values - high).to(BF16).double(),
        scales=weight.scales.double(),
        offsets=None if offsets is None else offsets.double(),
    )
    single = exact.dequantized().float()
    nearest = single.to(BF16).float()
    away = torch.nextafter(nearest.abs().to(BF16), torch.tensor(torch.inf, dtype=BF16)).float()
    is_tie = (single.abs() - nearest.abs()) == (away - single.abs())
    return torch.where(is_tie, away.copysign(single), nearest).double()


def is_rounded(weight: QuantizedTensor) -> bool:
    """Groups that are not multiples of 32 inputs become several groups of 16."""
    is_small = weight.group_size <= 32 or weight.group_size % 32 > 0
    has_groups = weight.group_size < weight.shape[1]
    return is_small and has_groups and torch.ops.millrace.tile_unit() == "amx"


def rounded_for(weight: QuantizedTensor, x: Tensor, *, wide: bool) -> Tensor:
    """The rows, rounded in the order of the codes, float64."""
    order = torch.arange(x.shape[1]) if weight.input_order is None else weight.input_order
    rounded = (rounded_to_16_bits if wide else rounded_rows)(x[:, order])
    return torch.empty_like(x, dtype=torch.float64).index_copy_(1, order, rounded)


def rounded_to_16_bits(rows: Tensor) -> Tensor:
    """The same with integers of which the largest of 32 inputs is 127 * 256."""
    count, size = rows.shape
    parts = F.pad(rows.float(), (0, -size % 32)).view(count, -1, 32)
    largest, most = parts.abs().amax(-1, keepdim=True), torch.tensor(127.0 * 256)
    integers = (parts * torch.div(most, largest)).round()
    return (integers.double() * (largest / most).double()).view(count, -1)[:, :size]


def parts_of(weight: QuantizedTensor) -> Tensor:
    """The absolute values of both summands of a weight."""
    sizes = replace(weight, offsets=None).dequantized().double().abs()
    if weight.offsets is None:
        return sizes
    zeros = replace(weight, values=torch.zeros_like(weight.values))
    return sizes + zeros.dequantized().double().abs()


def check_rows(linear: PanelLinear, x: Tensor, whole: Tensor) -> None:
    """Any number of rows has the bits of all rows; odd numbers take the first rows, even numbers the last ones."""
    for rows in (*range(1, 19), 25, 31, 32, 33, 40, 130, 513):
        torch.set_num_threads(1 + rows // 2 % 2)
        own = slice(rows) if rows % 2 else slice(-rows, None)
        assert torch.equal(linear(x[own]), whole[own]), rows


@pytest.mark.parametrize(("inputs", "group"), [*SIZES, *LONG_SIZES])
@pytest.mark.parametrize("table", ["int4", "int8"])
def test_products_match_the_exact_codes(table: str, inputs: int, group: int) -> None:
    weight, x = random_weight(table, inputs, group), torch.randn(ROWS, inputs).to(BF16)
    assert packed_codes([weight], integer=False) is not None
    linear = linear_of(weight)
    whole = linear(x)
    check(whole, weight, x)
    check_rows(linear, x, whole)


@pytest.mark.parametrize(("inputs", "group"), [(576, 16), (704, 96), (704, WHOLE)])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("table", ["uint4", "nf4", "e2m1", "iq2", "uint8", "e4m3"])
def test_products_are_exact_for_any_table_offsets_and_input_order(
    table: str, inputs: int, group: int, order: bool
) -> None:
    weight = random_weight(table, inputs, group, offsets=table.startswith("uint"), order=order)
    x = torch.randn(ROWS, inputs).to(BF16)
    linear = linear_of(weight)
    whole = linear(x)
    check(whole, weight, x, tolerance=8e-6)
    check_rows(linear, x, whole)


@pytest.mark.parametrize("integer", [False, True])
def test_bits_of_int8_are_multiplied_as_ascending_codes_are(integer: bool) -> None:
    ascending, x = random_weight("int8", 576, WHOLE), torch.randn(40, 576).to(BF16)
    signed = replace(ascending, codes=ascending.codes ^ 128, values=TABLES["int8"].roll(128))
    assert torch.equal(signed.dequantized(), ascending.dequantized())
    expected = linear_of(ascending, integer=integer)(x)
    assert torch.equal(linear_of(signed, integer=integer)(x), expected)


@pytest.mark.parametrize(("inputs", "group"), [*SIZES, *LONG_SIZES])
@pytest.mark.parametrize("table", ["int4", "e2m1", "iq2", "int8"])
@pytest.mark.parametrize("wide", [False, True])
def test_integer_products_match_rounded_rows(
    table: str, inputs: int, group: int, wide: bool
) -> None:
    weight, x = random_weight(table, inputs, group), torch.randn(ROWS, inputs).to(BF16)
    linear = linear_of(weight, integer=True, wide=wide)
    whole = linear(x)
    check(whole, weight, x, integer=True, wide=wide)
    check_rows(linear, x, whole)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("table", ["uint4", "uint8"])
def test_integer_products_are_exact_with_offsets_in_another_order(table: str, wide: bool) -> None:
    weight = random_weight(table, 704, 32, offsets=True, order=True)
    x = torch.randn(ROWS, 704).to(BF16)
    linear = linear_of(weight, integer=True, wide=wide)
    whole = linear(x)
    check(whole, weight, x, integer=True, wide=wide)
    check_rows(linear, x, whole)


@pytest.mark.parametrize(("first", "bits"), [(131, 4), (0, 5), (96, 6), (190, 6), (100, 8)])
@pytest.mark.parametrize("group", [16, 96])
def test_integer_products_take_only_the_bits_that_the_codes_need(
    first: int, bits: int, group: int
) -> None:
    weight, x = random_weight("int8", 704, group, outputs=96), torch.randn(40, 704).to(BF16)
    weight = replace(weight, codes=weight.codes % (1 << bits if bits < 8 else 156) + first)
    packed = packed_codes([weight], integer=True)
    assert packed is not None
    groups = -(-704 // group)
    assert 0 <= packed.numel() - 96 * (704 * bits // 8 + 4 * groups) < 2048
    for wide in (False, True):
        linear = linear_of(weight, integer=True, wide=wide)
        whole = linear(x)
        check(whole, weight, x, integer=True, wide=wide)
        check_rows(linear, x, whole)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("largest", "sign"), [(15, 1), (31, 1), (63, -1), (255, 1), (255, -1)])
def test_sums_of_the_largest_integers_are_exact(largest: int, sign: int, wide: bool) -> None:
    codes = torch.full((32, 128), largest, dtype=torch.uint8)
    codes[0, 0] = 0
    weight = QuantizedTensor(
        codes=codes, values=torch.arange(256.0), scales=torch.ones(32, 1), group_size=128
    )
    linear = linear_of(weight, integer=True, wide=wide)
    y = linear(torch.full((9, 128), 127.0 * sign).to(BF16))
    assert torch.equal(y, (weight.codes.float().sum(1) * 127 * sign).expand_as(y))


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize(
    ("table", "inputs", "group"), [("uint4", 704, 32), ("iq2", 704, 16), ("int8", 576, 16)]
)
def test_scales_that_count_units_take_a_byte(
    table: str, inputs: int, group: int, integer: bool
) -> None:
    weight, x = random_weight(table, inputs, group, outputs=96), torch.randn(40, inputs).to(BF16)
    shape, groups = (96, -(-inputs // 256)), inputs // group
    units = ScaleUnits(torch.rand(shape), torch.rand(shape)).each(
        lambda each: (each + 0.5).half().float()
    )
    index, counts = torch.arange(groups) * group // 256, torch.randint(-127, 128, (96, groups))
    weight = replace(
        weight,
        scales=counts * units.scales[:, index],
        offsets=counts.flip(0) * units.offsets[:, index],
        units=units,
    )
    packed = packed_codes([weight], integer=integer)
    assert packed is not None
    bytes_needed = weight.bits * inputs // 8 + 2 * groups + 2 * 2 * shape[1]
    assert 0 <= packed.numel() - 96 * bytes_needed < 2048
    linear = linear_of(weight, integer=integer)
    whole = linear(x)
    if integer:  # units scale sums of several groups then
        check(whole, weight, x, integer=True)
    else:
        assert torch.equal(whole, linear_of(replace(weight, units=None), integer=False)(x))
    for rows in (1, 2, 7, 13):
        assert torch.equal(linear(x[-rows:]), whole[-rows:]), rows
    part, tail = weight.rows(0, 32), weight.rows(32, 96)
    assert torch.equal(linear_of(part, tail, integer=integer)(x), linear(x))


@pytest.mark.parametrize("count", [-128, 127])
@pytest.mark.parametrize(
    ("values", "group"),
    [
        (torch.arange(16.0), 32),
        (torch.arange(256.0), 32),
        (torch.arange(16.0) - 4, 16),
        (torch.arange(256.0) - 32, 16),
    ],
    ids=["Q4_K", "Q5_K", "Q3_K", "Q6_K"],
)
def test_the_largest_sums_that_counts_multiply_are_exact(
    values: Tensor, group: int, count: int
) -> None:
    largest = {(16, 32): 15, (256, 32): 31, (16, 16): 7, (256, 16): 63}[len(values), group]
    for code in (0, largest):
        codes = torch.full((32, 32), code, dtype=torch.uint8)
        codes[0, 0], codes[1, 1] = largest, 0
        units = ScaleUnits(torch.ones(32, 1), torch.ones(32, 1))
        scales = torch.full((32, 32 // group), float(count))
        weight = QuantizedTensor(
            codes=codes, values=values, scales=scales, group_size=group, units=units
        )
        linear = linear_of(weight, integer=True)
        for rows in (1, 3, 9, 40):
            y = linear(torch.full((rows, 32), -127.0).to(BF16))
            expected = values[codes.long()].double().sum(1) * count * -127
            assert torch.equal(y.double(), expected.expand_as(y)), (code, rows)


NUM_RANDOM = int(os.environ.get("RANDOM_FORMS", "30"))


@pytest.mark.parametrize("integer", [False, True])
def test_products_are_exact_for_weights_of_any_form(integer: bool) -> None:
    """Inputs, outputs and rows that are no multiples of tiles, scales and rows that are 0 or tiny."""
    rng = random.Random(4)
    for number in range(NUM_RANDOM):
        inputs, group = rng.randint(1, 400), rng.choice((16, 32, 48, 64, 96, 160, WHOLE))
        table, outputs = rng.choice([*TABLES]), rng.choice((1, 15, 17, 33, rng.randint(1, 90)))
        has_offsets, has_order = rng.random() < 0.3, rng.random() < 0.2
        weight = random_weight(
            table, inputs, group, outputs=outputs, offsets=has_offsets, order=has_order
        )
        weight.scales[:, rng.randrange(weight.scales.shape[1])] *= rng.choice((0.0, 1e-38, 1.0))
        rows = rng.choice((1, 2, 3, 9, 17, 31, 33, 65))
        x = torch.randn(rows, inputs).to(BF16)
        x[rng.randrange(rows)] *= rng.choice((0.0, 1e-35, 1.0, 1e30))
        linear = linear_of(weight, integer=integer)
        y = linear(x)
        rounds_rows = integer and has_integer_products(weight)
        if integer and (rounds_rows or not is_rounded(weight)):
            expected = PlainQuantizedLinear(weight, None, integer=rounds_rows)(x)
        else:
            expected = x.double() @ multiplied(weight).T
        size = x.double().abs() @ parts_of(weight).T
        assert bool(((y.double() - expected).abs() <= 1e-5 * size + 1e-36).all()), number
        own = slice(rng.randrange(rows), rows)
        assert torch.equal(linear(x[own]), y[own]), number


def test_values_that_are_not_integers_are_multiplied_exactly() -> None:
    weight, x = random_weight("nf4", 576, 64), torch.randn(9, 576).to(BF16)
    assert torch.equal(linear_of(weight, integer=True)(x), linear_of(weight)(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_scales_of_any_type_are_exact(dtype: torch.dtype) -> None:
    weight, x = random_weight("int4", 128, 32, offsets=True), torch.randn(5, 128).to(BF16)
    assert weight.offsets is not None
    scales, offsets = (each.to(dtype).float() for each in (weight.scales, weight.offsets))
    weight = replace(weight, scales=scales, offsets=offsets)
    packed = packed_codes([weight], integer=False)
    assert packed is not None
    sizes = {torch.float32: 4, torch.float16: 2, BF16: 2}
    panels, groups = 3, 4
    assert packed.numel() % (panels * groups * (32 * 32 // 2 + 2 * 32 * sizes[dtype])) < 2048
    check(linear_of(weight)(x), weight, x)


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("table", ["int4", "int8"])
@pytest.mark.parametrize("inputs", [32, 544, 1000])
def test_a_row_is_the_same_alone_with_scales_of_16_bits(
    table: str, inputs: int, offsets: bool
) -> None:
    """A single row reads them with the codes of each step, other rows before the steps."""
    weight, x = random_weight(table, inputs, 32, offsets=offsets), torch.randn(14, inputs).to(BF16)
    halves = None if weight.offsets is None else weight.offsets.half().float()
    weight = replace(weight, scales=weight.scales.half().float(), offsets=halves)
    linear = linear_of(weight, integer=True)
    whole = linear(x)
    check(whole, weight, x, integer=True)
    for row in range(len(x)):
        assert torch.equal(linear(x[row : row + 1]), whole[row : row + 1]), row


def test_parts_of_several_forms_are_one_linear() -> None:
    forms = (("int4", 64, False), ("int8", WHOLE, False), ("uint4", 32, True))
    parts = [random_weight(table, 128, g, outputs=48, offsets=o) for table, g, o in forms]
    x = torch.randn(33, 128).to(BF16)
    y = linear_of(*parts)(x)
    common = in_common_form(parts)
    assert common is not None
    for part, columns in zip(common, torch.split(y, 48, dim=1), strict=True):
        check(columns, part, x)


@pytest.mark.parametrize("integer", [False, True])
def test_parts_that_fill_panels_keep_their_forms_in_one_linear(integer: bool) -> None:
    forms = (("uint4", 32, 64, True), ("uint4", 32, 32, True), ("int8", 16, 32, False))
    parts = [random_weight(t, 704, group, outputs=n, offsets=o) for t, group, n, o in forms]
    parts.append(random_weight("int4", 704, 64, outputs=10))
    x, bias = torch.randn(40, 704).to(BF16), torch.randn(138).to(BF16)
    linear = linear_of(*parts, bias=bias, integer=integer)
    expected, first = list[Tensor](), 0
    for run in (parts[:2], parts[2:3], parts[3:]):
        own = bias[first : first + sum(part.shape[0] for part in run)]
        expected.append(linear_of(*run, bias=own, integer=integer)(x))
        first += len(own)
    whole = torch.cat(expected, dim=1)
    assert torch.equal(linear(x), whole)
    for rows in (1, 7, 33):
        assert torch.equal(linear(x[:rows]), whole[:rows])


@pytest.mark.parametrize("integer", [False, True])
def test_parts_without_a_common_form_stay_apart_as_codes(
    integer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ordered = random_weight("int4", 128, 64, order=True)
    joined = [random_weight(table, 128, 64) for table in ("int4", "int8")]
    plain, bias = torch.randn(OUTPUTS, 128).to(BF16), torch.randn(4 * OUTPUTS).to(BF16)
    x, device = torch.randn(3, 128).to(BF16), torch.device("cpu")
    stored = StoredWeight((ordered, *joined, plain), BF16, device)
    y = CpuKernels(deterministic=True, integer=integer).linear_from(LinearWeights(stored, bias))(x)
    runs: list[tuple[Tensor | QuantizedTensor, ...]] = [(ordered,), tuple(joined), (plain,)]
    biases = torch.split(bias, [OUTPUTS, 2 * OUTPUTS, OUTPUTS])
    expected = [
        PanelLinear(LinearWeights(StoredWeight(run, BF16, device), own), integer=integer)(x)
        for run, own in zip(runs, biases, strict=True)
    ]
    assert torch.equal(y, torch.cat(expected, dim=1))
    assert "computed apart" in caplog.text
    assert "dequantized" not in caplog.text


def test_groups_that_no_kernel_has_are_dequantized(caplog: pytest.LogCaptureFixture) -> None:
    weight, x = random_weight("int4", 120, 24), torch.randn(3, 120).to(BF16)
    stored = StoredWeight.of(weight.dequantized().to(BF16))
    expected = PanelLinear(LinearWeights(stored), dtype=torch.float32)(x)
    assert torch.equal(linear_of(weight)(x), expected)
    assert "groups of 24" in caplog.text


def test_an_operator_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(self: PlainQuantizedLinear, x: Tensor) -> Tensor:
        y = right(self, x)
        y[-1, -1] += 1
        return y

    right = PlainQuantizedLinear.__call__
    monkeypatch.setattr(PlainQuantizedLinear, "__call__", wrong)
    monkeypatch.setattr(packed_weight, "_agrees", packed_weight._agrees.__wrapped__)
    weight = random_weight("int4", 160, 64)
    assert packed_codes([weight], integer=False) is None
    assert "the operator is wrong" in caplog.text


def test_an_operator_that_rounds_weights_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = random_weight("int4", 160, 32)
    if not is_rounded(weight):
        pytest.skip("weights are rounded only on AMX")
    monkeypatch.setattr(packed_weight, "widened", lambda weight: weight.dequantized().double())
    monkeypatch.setattr(packed_weight, "_agrees", packed_weight._agrees.__wrapped__)
    assert packed_codes([weight], integer=False) is None
    assert "the operator is wrong" in caplog.text


def test_a_row_that_is_not_finite_spoils_only_itself() -> None:
    for integer, wide in ((False, False), (True, False), (True, True)):
        weight, x = random_weight("int4", 96, 32, offsets=True), torch.randn(3, 96).to(BF16)
        linear = linear_of(weight, integer=integer, wide=wide)
        expected = linear(x)
        x[1, 7] = torch.nan
        y = linear(x)
        assert bool(y[1].isnan().all())
        assert torch.equal(y[[0, 2]], expected[[0, 2]])
        assert linear(x[:0]).shape == (0, OUTPUTS)


def test_biases_are_added_and_heads_return_float32() -> None:
    weight, x = random_weight("int8", 96, WHOLE), torch.randn(3, 96).to(BF16)
    bias = torch.randn(OUTPUTS).to(BF16)
    plain = linear_of(weight)(x)
    assert torch.equal(linear_of(weight, bias=bias)(x), plain + bias.float())
    stored = LinearWeights(StoredWeight((weight,), BF16, torch.device("cpu")))
    logits = CpuKernels(deterministic=True).head_from(stored)(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, plain)
    wide = CpuKernels(deterministic=True, integer=True).head_from(stored)(x)
    exact = x.double() @ weight.dequantized().double().T
    assert float((wide - exact).abs().max()) < 2**-15 * float(exact.abs().max())
