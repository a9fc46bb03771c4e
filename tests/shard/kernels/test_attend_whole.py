"""Attention of all patches of an image to all: kernels agree with torch, and its bits depend on the image alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_testing.engines.kernels import KERNELS, make_kernels

SHAPES = ((64, 2, 8), (49, 3, 24), (130, 2, 32), (169, 2, 72))
"""Patches, heads, channels of a head."""
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def heads_of(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randn(3, *shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", KERNELS)
def test_every_patch_attends_to_every_patch(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    heads = heads_of(shape, dtype)
    scale = shape[2] ** -0.5
    attended = make_kernels(name, deterministic=True).attend_whole(*heads, scale=scale)
    queries, keys, values = heads.double().transpose(1, 2)
    expected = F.softmax(queries @ keys.transpose(1, 2) * scale, dim=-1) @ values
    expected = expected.transpose(0, 1).flatten(1)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(attended.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_the_number_of_threads(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    heads, kernels = heads_of(shape, dtype), make_kernels("cpu", deterministic=True)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(kernels.attend_whole(*heads, scale=0.3))
    torch.set_num_threads(1)
    assert torch.equal(*results)
