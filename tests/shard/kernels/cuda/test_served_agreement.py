"""The check of a model's own shapes: it distinguishes right from wrong, and equal bits from similar ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels.agreement import TOLERANCE
from millrace_shard.kernels.base import Experts, LayerCache, Linear
from millrace_shard.kernels.cuda import served_agreement
from millrace_shard.kernels.cuda.served_agreement import differing_bits, served_difference
from millrace_shard.kernels.expert_weights import ExpertsWeights
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import CodeFormat
from millrace_shard.kernels.ragged import RaggedBatch

FP32 = torch.float32
SHAPE = LayerShape(
    num_heads=3,
    num_kv_heads=1,
    head_dim=16,
    kinds=((None, None), (40, 5.0)),
    experts=((16, 8, 2),),
    linears=((40, 600), (24, 16)),
    head=(50, 16),
)
FORMATS = (
    CodeFormat(values=tuple(range(-8, 8)), group_size=64, has_offsets=True),
    CodeFormat(values=tuple(range(256)), group_size=None, has_input_order=True),
)
ORACLE = PlainKernels(deterministic=False)


class WrongAt(PlainKernels):
    """Attention that is wrong in steps that meet a condition."""

    def __init__(self, wrong: Callable[[Tensor, RaggedBatch, dict[str, Any]], bool]) -> None:
        super().__init__(deterministic=False)
        self._wrong = wrong

    def attend(self, queries: Tensor, batch: RaggedBatch, cache: LayerCache, **rule: Any) -> Tensor:
        out = super().attend(queries, batch, cache, **rule)
        if self._wrong(queries, batch, rule):
            out[-1, -1] += 0.1
        return out


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda *_: False, False),
        (lambda queries, *_: queries.shape[1] == 3, True),
        (lambda queries, *_: queries.shape[1] == 4, False),
        (lambda _, batch, __: max(batch.num_context) > 8192, True),
        (lambda _, batch, __: len(batch.num_queries) > 128, True),
        (lambda *step: step[2]["window"] == 40, True),
        (lambda *step: step[2]["softcap"] == 5.0, True),
        (lambda *step: step[2]["window"] == 66, False),
    ],
    ids=["right", "own-heads", "other", "long", "many", "window", "cap", "other-window"],
)
def test_the_agreement_check_covers_the_shapes_of_the_served_model(
    wrong: Callable[[Tensor, RaggedBatch, dict[str, Any]], bool], found: bool
) -> None:
    difference = served_difference(WrongAt(wrong), ORACLE, dtype=FP32, shape=SHAPE)
    assert (difference > TOLERANCE[FP32]) == found


def test_long_contexts_begin_their_windows_within_a_span() -> None:
    for window in (1024, 2048, 4096):
        begins = [context - window for context in served_agreement.LONG[1] if context > 8192]
        assert begins
        assert all(begin // 64 * 64 % 256 for begin in begins)


class Uncentred(PlainKernels):
    """Kernels that are wrong over codes."""

    def linear_from(self, weights: LinearWeights) -> Linear:
        linear, is_coded = super().linear_from(weights), weights.weight.tensors is None
        return lambda x: linear(x) + 0.2 * is_coded


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, formats=FORMATS)])
def test_the_agreement_check_covers_the_formats_of_the_codes(shape: LayerShape) -> None:
    kernels = Uncentred(deterministic=False)
    difference = served_difference(kernels, ORACLE, dtype=FP32, shape=shape)
    assert (difference > TOLERANCE[FP32]) == bool(shape.formats)


class WrongExperts(PlainKernels):
    """Experts that are wrong over codes."""

    def experts(self, weights: ExpertsWeights) -> Experts:
        first, weights = weights.peeked()
        experts, is_coded = super().experts(weights), first.down.weight.tensors is None
        return lambda x: experts(x) + 0.2 * is_coded


@pytest.mark.parametrize("formats", [(), FORMATS])
def test_the_agreement_check_covers_the_formats_of_the_experts(
    formats: tuple[CodeFormat, ...],
) -> None:
    shape = replace(SHAPE, experts=((64, 32, 2),), expert_formats=formats)
    kernels = WrongExperts(deterministic=False)
    difference = served_difference(kernels, ORACLE, dtype=FP32, shape=shape)
    assert (difference > TOLERANCE[FP32]) == bool(formats)


class Nudged(PlainKernels):
    """Deterministic kernels, of which one operator adds a last bit in steps of some kind."""

    def __init__(self, where: str, counts: set[tuple[int, ...]] | set[int]) -> None:
        super().__init__(deterministic=True)
        self._where, self._counts = where, counts

    def attend(self, queries: Tensor, batch: RaggedBatch, cache: LayerCache, **rule: Any) -> Tensor:
        out = super().attend(queries, batch, cache, **rule)
        if self._where == "attention" and batch.num_queries in self._counts:
            out[-1, -1] = torch.nextafter(out[-1, -1], out.new_tensor(torch.inf))
        return out

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        linear = super().linear(weight, bias)
        name = f"linear {weight.shape[0]}"

        def run(x: Tensor) -> Tensor:
            return self._nudged(name, linear(x))

        return run

    def experts(self, weights: ExpertsWeights) -> Experts:
        experts = super().experts(weights)
        return lambda x: self._nudged("experts", experts(x))

    def linear_from(self, weights: LinearWeights) -> Linear:
        linear = super().linear_from(weights)
        name = f"coded {weights.weight.shape[0]}"
        return lambda x: self._nudged(name, linear(x))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._nudged("norm", super().rms_norm(x, weight, eps))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._nudged("silu", super().silu_mul(gate_up))

    def _nudged(self, where: str, out: Tensor) -> Tensor:
        if self._where == where and len(out) in self._counts:
            out[-1, 0] = torch.nextafter(out[-1, 0], out.new_tensor(torch.inf))
        return out


def company(count: int) -> tuple[int, ...]:
    return (*(1,) * served_agreement.NUM_OTHERS, count)


@pytest.mark.parametrize(
    ("where", "counts", "found"),
    [
        ("nowhere", set(), None),
        ("attention", {company(1)}, "in company"),
        ("attention", {(9,)}, "in a chunk"),
        ("attention", {company(9)}, "in a chunk in company"),
        ("attention", {(70,)}, "in a prompt"),
        ("linear 40", {1}, "600 inputs and 40 outputs"),
        ("linear 24", {70}, "16 inputs and 24 outputs"),
        ("linear 24", {1024}, "16 inputs and 24 outputs"),
        ("linear 50", {41}, "16 inputs and 50 outputs"),
        ("experts", {41}, "experts of 16 and 8 channels"),
        ("coded 24", {70}, "codes of 16 inputs and 24 outputs"),
        ("coded 50", {1}, "codes of 16 inputs and 50 outputs"),
        ("norm", {9}, "the norm"),
        ("silu", {300}, "the activation"),
    ],
)
def test_bits_that_depend_on_the_step_are_detected(
    where: str, counts: set[tuple[int, ...]] | set[int], found: str | None
) -> None:
    shape = replace(SHAPE, formats=FORMATS)
    named = differing_bits(Nudged(where, counts), dtype=FP32, shape=shape)
    assert named is None if found is None else named is not None and named.endswith(found)


def test_similar_rows_are_not_equal_bits() -> None:
    """The library chooses its kernels by the number of rows."""
    fast = PlainKernels(deterministic=False)
    assert differing_bits(fast, dtype=FP32, shape=SHAPE) is not None
