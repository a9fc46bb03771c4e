"""The check of adapters at start-up: kernels that serve pass, kernels with a fault do not."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels import choose
from millrace_shard.kernels.agreement import TOLERANCE
from millrace_shard.kernels.base import Linear
from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.lora.adapter_table import LoraSite
from millrace_shard.kernels.lora.lora_agreement import adapter_difference
from millrace_shard.kernels.plain import PlainKernels
from millrace_testing.engines.kernels import KERNELS, make_kernels

CPU = torch.device("cpu")
ORACLE = PlainKernels(deterministic=False)
SITES = ("qkv0", "o0", "gu0", "d0", "head0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [24, 64])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_apply_adapters_as_plain_torch_does(
    name: str, head_dim: int, dtype: torch.dtype
) -> None:
    kernels = make_kernels(name, deterministic=True, dtype=dtype)
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
def test_a_linear_without_its_adapters_is_found(missing: str) -> None:
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


def test_deterministic_kernels_that_change_rows_of_the_base_are_found() -> None:
    for deterministic, is_fault in ((True, True), (False, False)):
        kernels = ChangesBaseRows(deterministic=deterministic)
        found = adapter_difference(kernels, ORACLE, dtype=torch.float32, head_dim=32)
        assert (found == math.inf) is is_fault


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
