"""The check of a served shape passes for the Triton kernels: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels import agreement, experts_agreement
from millrace_shard.kernels.agreement import TOLERANCE
from millrace_shard.kernels.cuda import served_agreement
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.cuda.served_agreement import differing_bits, served_difference
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import CodeFormat

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP32 = torch.float32
SHAPE = LayerShape(
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    kinds=((330, None),),
    experts=((40, 24, 2),),
    linears=((40, 600),),
    head=(50, 32),
    formats=(CodeFormat(values=tuple(range(-8, 8)), group_size=64, has_offsets=True),),
)


pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes minutes for the real numbers."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(served_agreement, "LONG_CONTEXT", 350)
        monkeypatch.setattr(served_agreement, "LONG", ((70, 1, 9), (80, 300, 350)))
        monkeypatch.setattr(served_agreement, "MANY", (served_agreement.MANY[0],) * 2)
        monkeypatch.setattr(served_agreement, "PROMPTS", ((20, 1, 9), (25, 30, 9)))
        monkeypatch.setattr(served_agreement, "NUM_OTHERS", 4)
        monkeypatch.setattr(agreement, "INTER", 144)
        monkeypatch.setattr(experts_agreement, "INTER", 24)
        monkeypatch.setattr(experts_agreement, "ROWS", (1, 20))


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "fixed"])
def test_the_kernels_agree_with_plain_torch(deterministic: bool) -> None:
    kernels, oracle = CudaKernels(deterministic=deterministic), PlainKernels(deterministic=False)
    difference = served_difference(kernels, oracle, dtype=FP32, shape=SHAPE, device=DEVICE)
    assert difference < TOLERANCE[FP32]


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "fixed"])
def test_bits_are_the_same_only_in_deterministic_mode(deterministic: bool) -> None:
    kernels = CudaKernels(deterministic=deterministic)
    named = differing_bits(kernels, dtype=FP32, shape=SHAPE, device=DEVICE)
    assert (named is None) == deterministic
