"""Attention over latents and linears of heads by the compiled operators, against float64, and their bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_testing.engines.kernels import TILE_UNITS, make_kernels, tiles_by

CPU = torch.device("cpu")
CONTEXTS = (1, 64, 65, 300, 777)
"""Parts of a page, pages, and more than a chunk of keys."""
QUERIES = (1, 1, 65, 37, 1)
UNITS = (*TILE_UNITS, "blocks", "float32")
WIDTHS = {"published": (576, 512), "narrow": (96, 32), "odd": (48, 40)}
"""Channels of a key, and of the latent in it."""


@pytest.fixture(params=UNITS)
def kernels(request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    """Kernels that multiply by a unit, or in blocks of rows; those of float32 are called so."""
    if request.param in {"blocks", "float32"}:
        make_kernels("cpu", deterministic=True)
        yield CpuKernels(deterministic=True, tiles=False)
    else:
        with tiles_by(request.param):
            yield CpuKernels(deterministic=True)


@pytest.fixture
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    name = request.node.callspec.params["kernels"]
    return torch.float32 if name == "float32" else torch.bfloat16


def filled(kernels: CpuKernels, keys: Tensor, dim: int) -> LayerCache:
    """A cache of latents of all CONTEXTS."""
    whole = ragged_batch(CONTEXTS, CONTEXTS, block_size=kernels.block_size)
    cache = kernels.new_cache(
        num_blocks=int(whole.block_tables.max()) + 1,
        num_kv_heads=1,
        head_dim=keys.shape[2],
        dtype=keys.dtype,
        device=CPU,
        latent_dim=dim,
    )
    kernels.zero_blocks(cache, torch.arange(len(cache.keys)))
    kernels.store(keys, keys, whole, cache)
    return cache


def attended(
    kernels: CpuKernels, queries: Tensor, cache: LayerCache, counts: Sequence[int] = QUERIES
) -> Tensor:
    batch = ragged_batch(counts, CONTEXTS, block_size=kernels.block_size)
    return kernels.attend(queries, batch, cache, scale=queries.shape[2] ** -0.5)


@pytest.mark.parametrize("heads", [1, 16, 20, 34])
@pytest.mark.parametrize("widths", WIDTHS)
def test_attention_over_latents_matches_float64(
    widths: str, heads: int, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    width, dim = WIDTHS[widths]
    keys = torch.randn(sum(CONTEXTS), 1, width).to(dtype)
    queries = torch.randn(sum(QUERIES), heads + 1, width).to(dtype)[:, :heads]
    result = attended(kernels, queries, filled(kernels, keys, dim)).view(-1, heads, dim)
    first = 0
    for own, each, count in zip(
        torch.split(keys[:, 0].double(), list(CONTEXTS)), CONTEXTS, QUERIES, strict=True
    ):
        for row in range(count):
            seen = own[: each - count + row + 1]
            weights = (queries[first + row].double() @ seen.T * width**-0.5).softmax(-1)
            expected = weights @ seen[:, :dim]
            found = result[first + row].double()
            tolerance = 1e-5 if dtype == torch.float32 else 0.03
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        first += count


@pytest.mark.parametrize("heads", [16, 20])
def test_bits_depend_neither_on_threads_nor_on_the_other_rows(
    heads: int, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    width, dim = WIDTHS["published"]
    keys = torch.randn(sum(CONTEXTS), 1, width).to(dtype)
    queries = torch.randn(sum(QUERIES), heads, width).to(dtype)
    cache = filled(kernels, keys, dim)
    expected = attended(kernels, queries, cache)
    last = torch.tensor(QUERIES).cumsum(0) - 1
    for threads in (1, 2, 3, 9):
        torch.set_num_threads(threads)
        assert torch.equal(attended(kernels, queries, cache), expected)
        alone = attended(kernels, queries[last].contiguous(), cache, (1,) * len(QUERIES))
        assert torch.equal(alone, expected[last])
    torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [1, 3, 40, 600])
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 512), (512, 128), (192, 512), (32, 96)])
def test_linears_of_heads_match_float64_whatever_the_rows(
    inputs: int, outputs: int, rows: int, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    weight = (torch.randn(5, outputs, inputs) / inputs**0.5).to(dtype)
    linear = kernels.heads_linear(weight.clone())
    x = torch.randn(rows, 6, inputs + 32).to(dtype)[:, :5, :inputs]
    out = torch.full((rows, 5, outputs + 16), torch.nan, dtype=dtype)
    linear(x, out[..., :outputs])
    expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    result = out[..., :outputs]
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)
    assert out[..., outputs:].isnan().all()
    one = torch.empty(1, 5, outputs, dtype=dtype)
    linear(x[-1:], one)
    assert torch.equal(one[0], result[-1])
