"""The operator of experts over codes against float64 products of the codes, and a row's bits among other rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels.agreement import Random
from millrace_shard.kernels.base import Experts
from millrace_shard.kernels.cpu import tile_experts
from millrace_shard.kernels.cpu.int8_linear import int8_weight, with_int8
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.cpu.tile_experts import TiledExperts
from millrace_shard.kernels.expert_weights import ExpertsWeights, ExpertWeights, RoutingRule
from millrace_shard.kernels.experts_agreement import RULES, experts_weights
from millrace_shard.kernels.layer_blocks import ComposedExperts
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.quantized import CodeFormat, PlainQuantizedLinear, QuantizedTensor
from millrace_shard.kernels.stored_weight import Origin
from millrace_testing.quantized.code_formats import defined_experts

BF16 = torch.bfloat16
CPU = torch.device("cpu")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
NF4_LOW = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0)
NF4_HIGH = (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0)
INT4, INT8 = tuple(map(float, range(-8, 8))), tuple(map(float, range(-128, 128)))
FORMATS = {
    "mxfp4": CodeFormat(values=(*E2M1, *(-value for value in E2M1)), group_size=32),
    "int4-g128": CodeFormat(values=INT4, group_size=128),
    "int4-zeros-order": CodeFormat(
        values=INT4, group_size=64, has_offsets=True, has_input_order=True
    ),
    "nf4": CodeFormat(values=(*NF4_LOW, *NF4_HIGH), group_size=64),
    "int8": CodeFormat(values=INT8, group_size=None),
    "uint8-g16": CodeFormat(values=tuple(map(float, range(256))), group_size=16, has_offsets=True),
    "fp8": CodeFormat(values=tuple(E4M3.tolist()), group_size=None),
}
INTEGERS = ("mxfp4", "int4-g128", "int4-zeros-order", "int8")
"""Formats that have products of integers."""
SHAPES = {"odd": (96, 48, 12), "long": (832, 816, 6)}
"""Hidden, intermediate and the number of experts."""
BY_SHARES, CLAMPED, BY_GROUPS, _ = RULES
RULE_OF = {"odd": BY_GROUPS, "long": CLAMPED}


pytestmark = pytest.mark.usefixtures("tiles")


def weights_of(
    rule: RoutingRule, shape: str, name: str | None, other: str | None = None
) -> ExpertsWeights:
    """Gates and ups in the format `name`, down in `other`, if given; in bfloat16 for None."""
    hidden, inter, count = SHAPES[shape]
    formats = FORMATS.get(name or ""), FORMATS.get(other or name or "")
    random = Random(BF16, CPU)
    weights = experts_weights(
        random, BF16, rule, hidden=hidden, inter=inter, num_experts=count, formats=formats
    )
    return replace(weights, experts=list(weights.experts))


def mixed(rule: RoutingRule, shape: str) -> ExpertsWeights:
    """Every expert has another format."""
    names = (*FORMATS, None)
    lists = [list(weights_of(rule, shape, name).experts) for name in names]
    experts = [lists[i % len(names)][i] for i in range(SHAPES[shape][2])]
    return replace(weights_of(rule, shape, None), experts=experts)


def rows_of(count: int, shape: str, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, SHAPES[shape][0], generator=generator).to(BF16)


def made_of(weights: ExpertsWeights, *, integer: bool = False) -> TiledExperts:
    made = CpuKernels(deterministic=True, integer=integer).experts(weights)
    assert isinstance(made, TiledExperts)
    return made


def check(experts: Experts, weights: ExpertsWeights, shape: str, *, integer: bool = False) -> None:
    for count in (1, 5, 120):
        x = rows_of(count, shape)
        expected = defined_experts(weights, x, integer=integer)
        error = experts(x).double() - expected
        if integer:
            # Now and then an activation is rounded to the next integer, which changes all of a row.
            assert error.square().mean(0).max().sqrt() < 0.02 * expected.square().mean().sqrt()
        else:
            # On AMX weights with groups of 32 are rounded to bfloat16.
            assert (error.abs() / (1 + expected.abs())).max() < 0.016


def check_bits(experts: Experts, shape: str) -> None:
    """A row has the same bits alone, between others, in a crowd with the same experts, and on any threads."""
    torch.set_num_threads(1)
    x, others = rows_of(3, shape), rows_of(120, shape, seed=2)
    expected = torch.cat([experts(row) for row in torch.split(x, 1)])
    for num_threads, crowd in ((1, 12), (1, 25), (2, 50)):
        torch.set_num_threads(num_threads)
        assert torch.equal(experts(x), expected)
        assert torch.equal(experts(torch.cat((others[:7], x, others)))[7:10], expected)
        assert torch.equal(experts(torch.cat((x[:1].expand(crowd, -1), x)))[crowd:], expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_experts_of_codes_match_their_definition(name: str, shape: str) -> None:
    weights = weights_of(RULE_OF[shape], shape, name)
    check(made_of(weights), weights, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", INTEGERS)
def test_experts_of_integers_match_their_definition(name: str, shape: str) -> None:
    weights = weights_of(RULE_OF[shape], shape, name)
    check(made_of(weights, integer=True), weights, shape, integer=True)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_with_any_other_rows(name: str, integer: bool) -> None:
    check_bits(made_of(weights_of(CLAMPED, "long", name), integer=integer), "long")


@pytest.mark.parametrize("integer", [False, True])
def test_gates_and_down_may_have_different_formats(integer: bool) -> None:
    weights = weights_of(BY_SHARES, "odd", "int8", "mxfp4")
    made = made_of(weights, integer=integer)
    check(made, weights, "odd", integer=integer)
    check_bits(made, "odd")


@pytest.mark.parametrize("shape", SHAPES)
def test_experts_of_a_layer_may_have_different_formats(shape: str) -> None:
    weights = mixed(BY_SHARES, shape)
    made = made_of(weights)
    check(made, weights, shape)
    check_bits(made, shape)
    check_bits(made_of(weights, integer=True), shape)


def test_only_codes_of_integers_have_activations_in_int8() -> None:
    x = rows_of(5, "odd")
    for name, differs in (("int4-g128", True), ("nf4", False), (None, False)):
        exact, rounded = (
            made_of(weights_of(BY_SHARES, "odd", name), integer=integer)(x)
            for integer in (False, True)
        )
        assert torch.equal(exact, rounded) is not differs


@pytest.mark.parametrize(("name", "bits"), [("mxfp4", 4.5), ("int4-g128", 4.16), ("int8", 8.1)])
def test_codes_are_kept_as_they_are(name: str, bits: float) -> None:
    hidden, inter, count = SHAPES["long"]
    made = made_of(weights_of(BY_SHARES, "long", name))
    num_bytes = sum(each.numel() for each in made._weights)
    header = 2 * count * 1024
    # The last panel of 48 outputs and the last group of 816 inputs are filled up.
    assert num_bytes - header < 1.03 * count * 3 * hidden * inter * bits / 8


def test_experts_whose_codes_no_kernel_has_are_dequantised() -> None:
    def in_groups_of_24(linear: LinearWeights) -> LinearWeights:
        format_ = replace(FORMATS["int4-g128"], group_size=24)
        codes = format_.random(*linear.weight.shape, CPU)
        origin = Origin(name="linear", warn=reasons.setdefault)
        return replace(linear, weight=replace(linear.weight, parts=(codes,), origin=origin))

    reasons = dict[str, str]()

    def weights() -> ExpertsWeights:
        of = list(weights_of(BY_SHARES, "odd", "int8").experts)
        of[3] = replace(of[3], gate_up=in_groups_of_24(of[3].gate_up))
        of[7] = replace(of[7], gate_up=in_groups_of_24(of[7].gate_up))
        return replace(weights_of(BY_SHARES, "odd", None), experts=of)

    check(made_of(weights()), weights(), "odd")
    (reason,) = reasons
    assert "groups of 24" in reason


def test_an_operator_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(weight: QuantizedTensor, _: object, *, integer: bool) -> object:
        return lambda x: right(weight, None, integer=integer)(x) * 1.1

    right = PlainQuantizedLinear
    monkeypatch.setattr(tile_experts, "PlainQuantizedLinear", wrong)
    tile_experts.codes_agree.cache_clear()
    made = CpuKernels(deterministic=True).experts(weights_of(BY_SHARES, "odd", "int8"))
    tile_experts.codes_agree.cache_clear()
    assert isinstance(made, ComposedExperts)
    assert "the operator is wrong" in caplog.text
    check(made, weights_of(BY_SHARES, "odd", "int8"), "odd")


def test_experts_are_one_operator_with_quantize_int8() -> None:
    made = with_int8(CpuKernels(deterministic=True)).experts(weights_of(CLAMPED, "long", None))
    assert isinstance(made, TiledExperts)

    def in_int8(linear: LinearWeights) -> LinearWeights:
        codes = int8_weight(linear.weight.copied())
        return replace(linear, weight=replace(linear.weight, parts=(codes,)))

    plain = weights_of(CLAMPED, "long", None)
    experts = [
        ExpertWeights(gate_up=in_int8(each.gate_up), down=in_int8(each.down))
        for each in plain.experts
    ]
    check(made, replace(plain, experts=experts), "long", integer=True)
