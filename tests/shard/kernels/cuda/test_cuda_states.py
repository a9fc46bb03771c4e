"""The Triton kernels of recurrent layers against plain torch: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from bench.gpu.engine.recurrent_layers import RecurrentLayer, Rule, batch_of_pages
from torch import Tensor

from millrace_shard.kernels.plain import PlainKernels

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.cuda.operators import CudaKernels

pytestmark = pytest.mark.long
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN, TRITON = PlainKernels(deterministic=True), CudaKernels(deterministic=True)
TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.004, torch.float32: 2e-5}
"""In parts of 1 + size; the interpreter casts to bfloat16 by cutting off."""
COUNTS = (9, 1, 2, 5)
"""Tokens of sequences: fewer and more than a convolution reads."""
PAGES = (3, 1, 7, 4)
SAVED = {2: 5, 8: 6, 9: 8}
"""Pages of copies by token."""
LAYERS = (
    RecurrentLayer(rule=Rule.CONVOLUTION, width=300),
    RecurrentLayer(rule=Rule.DELTA, width=40, inner=24, heads=4, groups=2),
    RecurrentLayer(rule=Rule.DELTA_BY_CHANNEL, width=40, inner=24, heads=4, groups=2),
    RecurrentLayer(rule=Rule.MAMBA_2, width=40, inner=20, heads=6, groups=2),
    RecurrentLayer(rule=Rule.MAMBA_1, width=100, inner=20),
)
CASES = [
    pytest.param(layer, dtype, id=f"{layer.rule.name}-{dtype}")
    for layer in LAYERS
    for dtype in TOLERANCE
]


@pytest.mark.parametrize("saved", [{}, SAVED], ids=["no-copies", "copies"])
@pytest.mark.parametrize(("layer", "dtype"), CASES)
def test_kernels_of_states_match_plain_torch(
    layer: RecurrentLayer, dtype: torch.dtype, saved: dict[int, int]
) -> None:
    ours, theirs = (layer.state(dtype, DEVICE) for _ in range(2))
    batch = batch_of_pages(COUNTS, PAGES, DEVICE, saved)
    out = layer.run(TRITON, ours, batch, sum(COUNTS))
    expected = layer.run(PLAIN, theirs, batch, sum(COUNTS))
    for mine, right in zip((out, *ours.tensors), (expected, *theirs.tensors), strict=True):
        assert mine.dtype == right.dtype
        error = (mine.double() - right.double()).abs() / (1 + right.double().abs())
        assert not error.numel() or error.max() < TOLERANCE[dtype]


@pytest.mark.parametrize(("layer", "dtype"), CASES)
def test_bits_depend_neither_on_cuts_nor_on_company(
    layer: RecurrentLayer, dtype: torch.dtype
) -> None:
    whole, apart = (layer.state(dtype, DEVICE) for _ in range(2))
    count = sum(COUNTS)
    out = layer.run(TRITON, whole, batch_of_pages(COUNTS, PAGES, DEVICE, SAVED), count)
    parts = list[Tensor]()
    for start, end in itertools.pairwise((0, 1, 3, 8, 9)):
        saved = {token - start: page for token, page in SAVED.items() if start <= token < end}
        batch = batch_of_pages((end - start,), PAGES[:1], DEVICE, saved)
        parts.append(layer.run(TRITON, apart, batch, count, slice(start, end)))
    assert torch.equal(torch.cat(parts), out[:9])
    for mine, right in zip(apart.tensors, whole.tensors, strict=True):
        assert torch.equal(mine[[3, 5, 6]], right[[3, 5, 6]])
