from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace_shard.greedy import Best, choose_greedy
from millrace_shard.kernels import agreement, choose
from millrace_shard.kernels.agreement import TOLERANCE, largest_difference
from millrace_shard.kernels.base import (
    AttentionBlock,
    AttentionWeights,
    Layer,
    LayerCache,
    Layers,
    Linear,
    MlpBlock,
    MlpWeights,
    Reduce,
)
from millrace_shard.kernels.build import BuildError, load_operators, operators_loaded
from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.cpu import CpuKernels
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.masks import MaskTable, RowMasks
from millrace_shard.ragged import RaggedBatch

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton for this platform")


def chosen(dtype: torch.dtype = torch.float32, head_dim: int = 64) -> str:
    return choose_kernels(CPU, dtype, deterministic=True, head_dims=[head_dim]).name


def pretend(monkeypatch: pytest.MonkeyPatch, difference: float | RuntimeError) -> None:
    """Operators that load, and then differ from plain by so much, or fail."""

    def measured(*_: object, **__: object) -> float:
        if isinstance(difference, RuntimeError):
            raise difference
        return difference

    monkeypatch.setattr(choose, "load_operators", lambda: None)
    monkeypatch.setattr(choose, "largest_difference", measured)


def test_kernels_that_agree_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0.0)
    assert chosen() == "cpu"
    assert chosen(torch.bfloat16, 80) == "cpu"


@pytest.mark.parametrize("deterministic", [True, False])
def test_determinism_is_handed_on(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    pretend(monkeypatch, 0.0)
    for custom in (True, False):
        kernels = choose_kernels(
            CPU, torch.float32, deterministic=deterministic, head_dims=[64], custom=custom
        )
        assert isinstance(kernels, (CpuKernels, PlainKernels))
        assert kernels.deterministic is deterministic


@pytest.mark.parametrize(
    ("difference", "reason"),
    [(0.5, "differ by 0.5"), (float("inf"), "differ by inf"), (RuntimeError("no AMX"), "no AMX")],
)
def test_kernels_that_do_not_agree_are_not(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    difference: float | RuntimeError,
    reason: str,
) -> None:
    pretend(monkeypatch, difference)
    try:
        load_operators()
    except BuildError as error:
        pytest.skip(str(error))
    assert chosen() == "plain"
    assert [reason in record.message for record in caplog.records] == [True]
    # Nor do the greedy choice and masks take them, or int8.
    assert not operators_loaded()
    load_operators()
    assert operators_loaded()


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 64), (torch.bfloat16, 20)])
def test_what_they_cannot_do_runs_on_plain(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int
) -> None:
    pretend(monkeypatch, 0.0)
    assert chosen(dtype, head_dim) == "plain"


def test_other_devices_and_the_flag_choose_plain_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, 0.0)
    other = torch.device("mps")
    kernels = choose_kernels(other, torch.float32, deterministic=False, head_dims=[64])
    assert kernels.name == "plain"
    for device in (CPU, CUDA):
        kernels = choose_kernels(
            device, torch.float32, deterministic=True, head_dims=[64], custom=False
        )
        assert kernels.name == "plain"
    assert not caplog.records


def chosen_on_cuda(dtype: torch.dtype = torch.bfloat16, head_dim: int = 80) -> str:
    return choose_kernels(CUDA, dtype, deterministic=False, head_dims=[head_dim]).name


@needs_triton
@pytest.mark.parametrize("deterministic", [True, False])
def test_cuda_kernels_that_agree_are_chosen(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    pretend(monkeypatch, 0.0)
    kernels = choose_kernels(CUDA, torch.float16, deterministic=deterministic, head_dims=[80])
    assert kernels.name == "cuda"
    assert vars(kernels)["deterministic"] is deterministic


@needs_triton
@pytest.mark.parametrize(
    ("difference", "reason"), [(0.5, "differ by 0.5"), (RuntimeError("no cc"), "no cc")]
)
def test_cuda_kernels_that_do_not_agree_are_not(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    difference: float | RuntimeError,
    reason: str,
) -> None:
    pretend(monkeypatch, difference)
    assert chosen_on_cuda() == "plain"
    assert [reason in record.message for record in caplog.records] == [True]


@needs_triton
def test_what_cuda_kernels_cannot_do_runs_on_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0.0)
    assert chosen_on_cuda(torch.float64) == "plain"
    assert chosen_on_cuda(head_dim=512) == "plain"


def test_without_triton_plain_is_chosen_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, 0.0)
    monkeypatch.delattr("millrace_shard.kernels.cuda", raising=False)
    monkeypatch.setitem(sys.modules, "millrace_shard.kernels.cuda", None)
    assert chosen_on_cuda() == "plain"
    assert ["Triton" in record.message for record in caplog.records] == [True]


def test_without_a_compiler_plain_is_chosen_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path))
    # Past the cache: the operators may be loaded already.
    monkeypatch.setattr(choose, "load_operators", load_operators.__wrapped__)
    with caplog.at_level(logging.INFO):
        assert chosen() == "plain"
    assert len(caplog.records) == 1
    with pytest.raises(BuildError):
        load_operators.__wrapped__()


class Broken(PlainKernels):
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return super().silu_mul(gate_up) * 1.2


class BlindToWindow(PlainKernels):
    def attend(self, queries, batch, cache, *, scale, window=None, softcap=None):  # type: ignore[no-untyped-def]
        return super().attend(queries, batch, cache, scale=scale, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agreement_tells_right_from_wrong(dtype: torch.dtype) -> None:
    oracle = PlainKernels(deterministic=False)
    same = PlainKernels(deterministic=True, block_size=64)
    assert largest_difference(same, oracle, dtype=dtype, head_dim=32) < TOLERANCE[dtype]
    for kind in (Broken, BlindToWindow):
        wrong = kind(deterministic=False)
        assert largest_difference(wrong, oracle, dtype=dtype, head_dim=32) > TOLERANCE[dtype]


class OffInOneOutput(PlainKernels):
    """Halves of its own, of which one has a wrong output in a wrong row."""

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

    def head(self, weight: Tensor) -> Linear:
        linear = super().head(weight)
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
def test_agreement_covers_what_serves(wrong: str, dtype: torch.dtype) -> None:
    oracle = PlainKernels(deterministic=False)
    difference = largest_difference(OffInOneOutput(wrong), oracle, dtype=dtype, head_dim=64)
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
    difference = largest_difference(kernels, kernels, dtype=torch.bfloat16, head_dim=64)
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
    difference = largest_difference(kernels, kernels, dtype=torch.bfloat16, head_dim=64)
    assert difference > TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float16, 64), (torch.bfloat16, 20)], ids=["fp16", "odd"]
)
def test_caches_that_it_has_no_operators_for_are_refused(dtype: torch.dtype, dim: int) -> None:
    with pytest.raises(ValueError, match="no CPU cache"):
        CpuKernels(deterministic=True).new_cache(
            num_blocks=2, num_kv_heads=1, head_dim=dim, dtype=dtype, device=CPU
        )
