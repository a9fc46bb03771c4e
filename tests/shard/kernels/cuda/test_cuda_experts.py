"""The Triton experts against plain torch and against themselves: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from bench.harness.code_formats import code_format
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")

import triton
import triton.language as tl

from millrace_shard.kernels.agreement import Random
from millrace_shard.kernels.cuda import expert_stack, grouped_experts
from millrace_shard.kernels.cuda.expert_stack import most_tiles
from millrace_shard.kernels.cuda.grouped_experts import GroupedExperts
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.cuda.quantized_linear import expand
from millrace_shard.kernels.cuda.triton_choice import group_pairs
from millrace_shard.kernels.cuda.triton_experts import add_experts, tile_of_expert
from millrace_shard.kernels.expert_weights import ExpertsWeights, RoutingRule, Scoring
from millrace_shard.kernels.experts_agreement import RULES, Formats, experts_weights
from millrace_shard.kernels.layer_blocks import ComposedExperts
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import CodeFormat

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter casts to bfloat16 by cutting off, as numpy has none.
TOLERANCE = {BF16: 0.05, FP16: 0.004, FP32: 2e-5}
pytestmark = pytest.mark.long
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def experts_of(
    rule: RoutingRule,
    dtype: torch.dtype,
    *,
    composed: bool = False,
    deterministic: bool = True,
    formats: Formats = (None, None),
    inter: int = 24,
) -> object:
    weights = partial(
        experts_weights,
        Random(dtype, DEVICE),
        dtype,
        rule,
        hidden=40,
        inter=inter,
        num_experts=12,
        formats=formats,
    )
    if composed:
        return ComposedExperts(PlainKernels(deterministic=True), weights())
    return CudaKernels(deterministic=deterministic).experts(weights())


def rows_of(count: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 40, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.scoring.value)
def test_experts_match_plain_torch(rule: RoutingRule, dtype: torch.dtype) -> None:
    made, plain = experts_of(rule, dtype), experts_of(rule, dtype, composed=True)
    assert isinstance(made, GroupedExperts)
    assert isinstance(plain, ComposedExperts)
    for count in (1, 19):
        x = rows_of(count, dtype)
        difference = (made(x).float() - plain(x).float()).abs() / (1 + plain(x).float().abs())
        assert difference.max() < TOLERANCE[dtype]
    assert made(rows_of(0, dtype)).shape == (0, 40)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.scoring.value)
def test_a_row_has_the_same_bits_with_any_other_rows(rule: RoutingRule) -> None:
    made, x = experts_of(rule, FP32), rows_of(5, FP32)
    assert isinstance(made, GroupedExperts)
    expected = made(x)
    assert torch.equal(torch.cat([made(row) for row in torch.split(x, 1)]), expected)
    crowd = x[:1].expand(30, -1)
    assert torch.equal(made(torch.cat((crowd, x, rows_of(9, FP32, seed=2))))[30:35], expected)


@pytest.mark.parametrize("deterministic", [False, True])
def test_results_of_many_rows_take_two_bytes_in_fast_mode(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a token's experts are added."""
    sizes: list[int] = []
    rule = RULES[0]

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(out: Tensor, results: Tensor, *args: Any, **kwargs: Any) -> None:
                sizes.append(results.nbytes)
                add_experts[grid](out, results, *args, **kwargs)

            return launch

    monkeypatch.setattr(grouped_experts, "add_experts", Spy())
    monkeypatch.setattr(grouped_experts, "MANY_ROWS", 4 * rule.top_k)
    made = experts_of(rule, BF16, deterministic=deterministic)
    plain = experts_of(rule, BF16, composed=True)
    assert isinstance(made, GroupedExperts)
    assert isinstance(plain, ComposedExperts)
    x = rows_of(4, BF16)
    many, few = made(x), made(x[:3])
    difference = (many.float() - plain(x).float()).abs() / (1 + plain(x).float().abs())
    assert difference.max() < TOLERANCE[BF16]
    of_float32 = [rows * rule.top_k * 40 * 4 for rows in (4, len(few))]
    assert sizes == [of_float32[0] // (1 if deterministic else 2), of_float32[1]]


FORMATS = (
    *(("int4", None), ("int4 with zeros", 16), ("nf4", 32), ("e2m1", 32), ("e2m1", 16)),
    *(("int8", None), ("e4m3", None)),
)
"""Names and group sizes: whole groups, padded ones, and a last one that is shorter."""


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
@pytest.mark.parametrize(("name", "size"), FORMATS)
def test_experts_over_codes_stay_packed_and_match_plain_torch(
    name: str, size: int | None, dtype: torch.dtype
) -> None:
    form, rule = code_format(name, size), RULES[1]
    made = experts_of(rule, dtype, formats=(form, form), inter=48)
    plain = experts_of(rule, dtype, composed=True, formats=(form, form), inter=48)
    assert isinstance(made, GroupedExperts)
    assert isinstance(plain, ComposedExperts)
    for count in (1, 19):
        x = rows_of(count, dtype)
        difference = (made(x).float() - plain(x).float()).abs() / (1 + plain(x).float().abs())
        assert difference.max() < TOLERANCE[dtype]
    elements, biases = 12 * 3 * 40 * 48, 12 * (2 * 48 + 40) * dtype.itemsize
    num_scales = 12 * (2 * 48 * -(-40 // (size or 40)) + 40 * -(-48 // (size or 48)))
    # The last steps of groups are padded to a power of two.
    padded = 64 / 40 * elements * (4 if len(form.values) == 16 else 8) / 8
    assert made.num_bytes <= padded + num_scales * (2 + 4 * form.has_offsets) + biases


@pytest.mark.parametrize("name", ["e2m1", "int4 with zeros"])
def test_fast_mode_expands_codes_once_for_many_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five experts at a time, and of the last two; deterministic mode and few rows keep to the codes."""
    rule, form = RULES[1], code_format(name, 16)
    many = 4
    monkeypatch.setattr(expert_stack, "EXPERT_ROWS", many * rule.top_k / 12)
    monkeypatch.setattr(expert_stack, "EXPERT_BYTES", 5 * 40 * 48 * FP16.itemsize)
    expanded: list[tuple[int, ...]] = []

    def noted(out: Tensor, *args: Any) -> None:
        expanded.append((*out.shape,))
        expand(out, *args)

    monkeypatch.setattr(expert_stack, "expand", noted)
    made, fixed, plain = (
        experts_of(
            rule,
            FP16,
            formats=(form, form),
            deterministic=deterministic,
            composed=composed,
        )
        for deterministic, composed in ((False, False), (True, False), (True, True))
    )
    assert isinstance(made, GroupedExperts)
    assert isinstance(fixed, GroupedExperts)
    assert isinstance(plain, ComposedExperts)
    x = rows_of(many, FP16)
    difference = (made(x).float() - plain(x).float()).abs() / (1 + plain(x).float().abs())
    assert difference.max() < TOLERANCE[FP16]
    assert expanded == [(size, *shape) for shape in ((48, 40), (40, 24)) for size in sizes(shape)]
    del expanded[:]
    assert torch.equal(made(x[:3]), fixed(x[:3]))
    fixed(x)
    assert not expanded


def sizes(shape: tuple[int, int]) -> list[int]:
    """How many of the 12 experts are expanded at a time, where five of 48 outputs and 40 inputs are."""
    most = 5 * 40 * 48 // (shape[0] * shape[1])
    return [min(most, 12 - first) for first in range(0, 12, most)]


def test_a_row_has_the_same_bits_over_codes_with_any_other_rows() -> None:
    form = code_format("int4 with zeros", 16)
    made, x = experts_of(RULES[0], FP32, formats=(form, form)), rows_of(5, FP32)
    assert isinstance(made, GroupedExperts)
    expected = made(x)
    assert torch.equal(torch.cat([made(row) for row in torch.split(x, 1)]), expected)


@pytest.mark.parametrize("change", ["a tensor", "another group size", "another table", "an order"])
def test_experts_whose_codes_have_several_forms_are_expanded(change: str) -> None:
    """Expert 7 differs from those before it, which were packed."""
    usual = code_format("int4", 16)
    forms: dict[str, CodeFormat | None] = {
        "a tensor": None,
        "another group size": code_format("int4", 32),
        "another table": code_format("nf4", 16),
        "an order": replace(usual, has_input_order=True),
    }

    def weights() -> ExpertsWeights:
        first, other = (
            experts_weights(
                Random(FP32, DEVICE),
                FP32,
                RULES[0],
                hidden=40,
                inter=24,
                num_experts=12,
                formats=(form, form),
            )
            for form in (usual, forms[change])
        )
        pairs = enumerate(zip(first.experts, other.experts, strict=True))
        return replace(first, experts=[each[index == 7] for index, each in pairs])

    made = CudaKernels(deterministic=True).experts(weights())
    plain = ComposedExperts(PlainKernels(deterministic=True), weights())
    assert isinstance(made, GroupedExperts)
    assert made.num_bytes == 12 * 3 * 40 * 24 * FP32.itemsize
    x = rows_of(9, FP32)
    difference = (made(x) - plain(x)).abs() / (1 + plain(x).abs())
    assert difference.max() < TOLERANCE[FP32]


@pytest.mark.parametrize(
    "rule",
    [
        *RULES,
        RoutingRule(top_k=3, scoring=Scoring.SOFTMAX),
        RoutingRule(top_k=2, scoring=Scoring.SIGMOID),
    ],
    ids=str,
)
def test_the_choice_is_that_of_plain_torch(rule: RoutingRule) -> None:
    made = experts_of(rule, FP32)
    assert isinstance(made, GroupedExperts)
    logits = Random(FP32, DEVICE)(40, 12)
    logits[7] = 0.5
    bias, correction = made._router.bias, made._router.correction
    biased = logits if bias is None else logits + bias
    chosen, shares = rule.choose(biased, correction)
    result, found_shares = made._choose(logits)
    assert torch.equal(result.long(), chosen)
    torch.testing.assert_close(found_shares, shares)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_that_is_not_finite_fails_no_other_row() -> None:
    for rule in RULES:
        made, x = experts_of(rule, FP32), rows_of(4, FP32)
        assert isinstance(made, GroupedExperts)
        before = made(x)
        x[2, 5] = torch.nan
        after = made(x)
        assert after[2].isnan().all()
        assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("counts", [(0, 3, 0, 0, 33, 16, 1, 0), (0, 0, 5), (4,), (1,) * 300])
def test_every_tile_has_a_program_and_few_programs_have_none(
    counts: tuple[int, ...], rows: int
) -> None:
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    num_programs = most_tiles(sum(counts), len(counts), rows)
    expected = [(e, tile) for e, n in enumerate(counts) for tile in range(-(-n // rows))]
    assert len(expected) <= num_programs <= len(expected) + len(counts)
    numbers = torch.empty(num_programs, 2, dtype=torch.int32, device=DEVICE)
    write_tiles[(num_programs,)](numbers, starts, len(counts), rows=rows)
    assert [tuple(each) for each in numbers.tolist()[: len(expected)]] == expected
    assert all(expert == len(counts) for expert, _ in numbers.tolist()[len(expected) :])


@triton.jit  # type: ignore[untyped-decorator]
def write_tiles(numbers, starts, num_experts, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert and the tile of each program; grid (programs,)."""
    number = tl.program_id(0)
    expert, tile = tile_of_expert(number, starts, num_experts, rows)
    tl.store(numbers + 2 * number, expert)
    tl.store(numbers + 2 * number + 1, tile)


def test_a_token_starts_a_program_for_each_of_its_experts_and_no_more() -> None:
    assert most_tiles(8, 128, 16) == 8
    assert most_tiles(2048, 128, 16) == 256


def test_pairs_are_ordered_by_expert() -> None:
    chosen = torch.randint(0, 5, (1300, 2), generator=torch.Generator().manual_seed(0))
    chosen[chosen == 3] = 4
    order = torch.empty(2600, dtype=torch.int32, device=DEVICE)
    starts = torch.empty(6, dtype=torch.int32, device=DEVICE)
    group_pairs[(5,)](order, starts, chosen.int().to(DEVICE), 2600)
    assert torch.equal(order.cpu().long(), chosen.flatten().argsort(stable=True))
    counts = chosen.flatten().bincount(minlength=5)
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]
