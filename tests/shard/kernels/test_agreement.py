"""The check at each start: it rejects wrong results of everything that serves."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from millrace_shard.kernels import agreement, choose
from millrace_shard.kernels.agreement import TOLERANCE, Random, largest_difference
from millrace_shard.kernels.base import (
    AttentionBlock,
    Experts,
    HeadsLinear,
    Layer,
    LayerCache,
    Layers,
    Linear,
    MlpBlock,
    Reduce,
)
from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.expert_weights import ExpertsWeights
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    LinearWeights,
    MlpWeights,
)
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.lora.lora_agreement import adapter_difference
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.scores import Best, MaskTable, RowMasks, choose_greedy
from millrace_testing.engines.kernels import KERNELS, make_kernels


class Broken(PlainKernels):
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return super().silu_mul(gate_up) * 1.2


class BlindToWindow(PlainKernels):
    def attend(self, queries, batch, cache, *, window=None, **rule):  # type: ignore[no-untyped-def]
        return super().attend(queries, batch, cache, **rule)


class BlindToSinks(PlainKernels):
    def attend(self, queries, batch, cache, *, sinks=None, **rule):  # type: ignore[no-untyped-def]
        return super().attend(queries, batch, cache, **rule)


class WithoutTheLastExpert(PlainKernels):
    def experts(self, weights: ExpertsWeights) -> Experts:
        rule = replace(weights.router.rule, top_k=weights.router.rule.top_k - 1)
        return super().experts(replace(weights, router=replace(weights.router, rule=rule)))


class WithoutHeadNorms(PlainKernels):
    def rope_store(self, *tensors, norms=None, **heads):  # type: ignore[no-untyped-def]
        return super().rope_store(*tensors, **heads)


class WithSwappedHeadNorms(PlainKernels):
    def rope_store(self, *tensors, norms=None, **heads):  # type: ignore[no-untyped-def]
        swapped = norms and HeadNorms(query=norms.key, key=norms.query)
        return super().rope_store(*tensors, norms=swapped, **heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_agreement_check_rejects_wrong_kernels(dtype: torch.dtype) -> None:
    oracle = PlainKernels(deterministic=False)
    same = PlainKernels(deterministic=True, block_size=64)
    assert (
        largest_difference(same, oracle, dtype=dtype, shape=LayerShape.small(32)) < TOLERANCE[dtype]
    )
    for kind in (
        Broken,
        BlindToWindow,
        BlindToSinks,
        WithoutTheLastExpert,
        WithoutHeadNorms,
        WithSwappedHeadNorms,
    ):
        wrong = kind(deterministic=False)
        assert (
            largest_difference(wrong, oracle, dtype=dtype, shape=LayerShape.small(32))
            > TOLERANCE[dtype]
        )


class WithOtherValues(PlainKernels):
    def attend(self, queries, batch, cache, **rule):  # type: ignore[no-untyped-def]
        return super().attend(queries, batch, cache, **rule).roll(1, dims=1)


class WithOneHeadForAll(PlainKernels):
    def heads_linear(self, weight: Tensor) -> HeadsLinear:
        return super().heads_linear(weight[:1].expand_as(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_agreement_check_rejects_wrong_attention_over_latents(dtype: torch.dtype) -> None:
    shape, oracle = LayerShape.small(48, latent_dim=32), PlainKernels(deterministic=False)
    same = PlainKernels(deterministic=True, block_size=64)
    assert largest_difference(same, oracle, dtype=dtype, shape=shape) < TOLERANCE[dtype]
    for kind in (WithOtherValues, WithOneHeadForAll, WithoutTheLastExpert):
        wrong = kind(deterministic=False)
        assert largest_difference(wrong, oracle, dtype=dtype, shape=shape) > TOLERANCE[dtype]


class OffInOneOutput(PlainKernels):
    """Its own halves, of which one has a wrong output in a wrong row."""

    def __init__(self, wrong: str) -> None:
        super().__init__(deterministic=False)
        self._wrong = wrong

    def attention(self, weights: AttentionWeights) -> AttentionBlock:
        block = super().attention(weights)

        def run(
            x: Tensor | None, residual: Tensor, batch: RaggedBatch, cache: LayerCache
        ) -> Tensor:
            return self._spoilt("attention", block(x, residual, batch, cache))

        return run

    def mlp(self, weights: MlpWeights) -> MlpBlock:
        block = super().mlp(weights)
        return lambda x, residual: self._spoilt("mlp", block(x, residual))

    def head(self, weight: Tensor, lora: LoraSite | None = None) -> Linear:
        linear = super().head(weight, lora)
        return lambda x: self._spoilt("head", linear(x))

    def layers(self, layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
        run = super().layers(layers, reduce)
        return lambda *step: self._spoilt("layers", run(*step))

    def _spoilt(self, what: str, y: Tensor) -> Tensor:
        if what == self._wrong:
            y[-1, -1] += 0.2 * (1 + y[-1, -1].abs())
        return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", ["nothing", "attention", "mlp", "layers", "head"])
def test_agreement_covers_every_operator_that_serves(wrong: str, dtype: torch.dtype) -> None:
    oracle = PlainKernels(deterministic=False)
    difference = largest_difference(
        OffInOneOutput(wrong), oracle, dtype=dtype, shape=LayerShape.small(64)
    )
    assert (difference > TOLERANCE[dtype]) == (wrong != "nothing")


@pytest.mark.parametrize("wrong", ["id", "probability"])
def test_agreement_covers_the_greedy_choice(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    def choose_wrongly(logits: Tensor) -> Best:
        best = choose_greedy(logits)
        if wrong == "id":
            return best._replace(ids=(best.ids + 1) % logits.shape[1])
        return best._replace(logprobs=best.logprobs + 1)

    monkeypatch.setattr(agreement, "choose_greedy", choose_wrongly)
    kernels = PlainKernels(deterministic=False)
    difference = largest_difference(
        kernels, kernels, dtype=torch.bfloat16, shape=LayerShape.small(64)
    )
    assert difference > TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("wrong", ["bit", "row", "end"])
def test_agreement_covers_masks(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    forbid = MaskTable.forbid

    def forbid_wrongly(
        table: MaskTable, scores: Tensor, masks: RowMasks, *, most_elements: int
    ) -> None:
        bits = masks.bits ^ (wrong == "bit")
        rows = masks.rows + (wrong == "row") * np.array([-1, 0])
        last = scores[:, -1].clone()
        forbid(table, scores, RowMasks(rows=rows, bits=bits), most_elements=most_elements)
        if wrong == "end":
            scores[:, -1] = last

    monkeypatch.setattr(MaskTable, "forbid", forbid_wrongly)
    kernels = PlainKernels(deterministic=False)
    difference = largest_difference(
        kernels, kernels, dtype=torch.bfloat16, shape=LayerShape.small(64)
    )
    assert difference > TOLERANCE[torch.bfloat16]


CPU = torch.device("cpu")
ORACLE = PlainKernels(deterministic=False)
SITES = ("qkv0", "o0", "gu0", "d0", "head0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [24, 64])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_apply_adapters_as_plain_torch_does(
    name: str, head_dim: int, dtype: torch.dtype
) -> None:
    kernels = make_kernels(name, deterministic=True)
    assert adapter_difference(kernels, ORACLE, dtype=dtype, head_dim=head_dim) < TOLERANCE[dtype]


class WithoutOneSite(PlainKernels):
    """Kernels that forget the adapters of one linear."""

    def __init__(self, missing: str) -> None:
        super().__init__(deterministic=False)
        self._missing = missing

    def linear_from(self, weights: LinearWeights) -> Linear:
        if weights.lora is not None and weights.lora.parts[0].name == self._missing:
            weights = replace(weights, lora=None)
        return super().linear_from(weights)

    def head(self, weight: Tensor, lora: LoraSite | None = None) -> Linear:
        return super().head(weight, None if self._missing == "head0" else lora)


@pytest.mark.parametrize("missing", SITES)
def test_a_linear_without_its_adapters_is_detected(missing: str) -> None:
    kernels = WithoutOneSite(missing)
    difference = adapter_difference(kernels, ORACLE, dtype=torch.bfloat16, head_dim=32)
    assert difference > TOLERANCE[torch.bfloat16]


class ChangesBaseRows(PlainKernels):
    """Kernels that compute a step with adapters in other bits."""

    def head(self, weight: Tensor, lora: LoraSite | None = None) -> Linear:
        head = super().head(weight, lora)

        def run(x: Tensor) -> Tensor:
            adapted = lora is not None and lora.rows is not None
            return head(x) * (1 + 1e-6 * adapted)

        return run


def test_deterministic_kernels_that_change_rows_of_the_base_are_detected() -> None:
    for deterministic, is_fault in ((True, True), (False, False)):
        kernels = ChangesBaseRows(deterministic=deterministic)
        result = adapter_difference(kernels, ORACLE, dtype=torch.float32, head_dim=32)
        assert (result == math.inf) is is_fault


def test_kernels_that_fail_the_check_do_not_serve_with_adapters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_kernels("cpu", deterministic=True)
    monkeypatch.setattr(choose, "adapter_difference", lambda *_, **__: 0.5)
    monkeypatch.setattr(choose, "disable_operators", lambda: None)
    shapes = [LayerShape.small(32)]
    with caplog.at_level(logging.WARNING):
        chosen = choose_kernels(CPU, torch.float32, deterministic=True, shapes=shapes)
        assert (chosen.name, caplog.messages) == ("cpu", [])
        chosen = choose_kernels(
            CPU, torch.float32, deterministic=True, shapes=shapes, adapters=True
        )
    assert chosen.name == "plain"
    assert "with adapters they differ by 0.5 here" in caplog.text


class Drawn(TorchFunctionMode):
    """Records the device of each draw of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[tuple[torch.device, torch.device]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func.__name__ in ("rand", "randn", "randint"):
            self.devices.append((torch.device(options["device"]), options["generator"].device))
        return func(*args, **options)


def test_keys_and_values_of_long_contexts_are_drawn_on_the_device() -> None:
    """Drawing them on the host takes seconds, and copies them."""
    kernels, device = PlainKernels(deterministic=False), torch.device("cpu")
    shape = LayerShape(num_heads=4, num_kv_heads=2, head_dim=16)
    with Drawn() as drawn:
        agreement.filled_cache(kernels, Random(torch.float32, device), shape, (700,))
    assert drawn.devices
    assert set(drawn.devices) == {(device, device)}
