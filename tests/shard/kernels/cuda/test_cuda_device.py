"""Properties of the kernels that need a GPU: capture, no waiting, larger shapes. The rest is in test_cuda_*.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench.harness.code_formats import TABLES, code_format

from millrace_testing.router.pages import Pages, Span

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.choose import choose_kernels
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_shard.model_runner.graph_capture import waits_as_errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
CONTEXTS = (3000, 2049, 900, 5000, 8200, 1)
PROMPTS: tuple[Span, ...] = ((0, 0, 3000), (1, 2048, 2049), (2, 300, 900), (4, 8191, 8200))
SINGLES: tuple[Span, ...] = tuple((b, length - 1, length) for b, length in enumerate(CONTEXTS))
HEADS = [(32, 8, 128), (9, 3, 64), (8, 8, 96), (4, 2, 256)]


def pages(heads: tuple[int, int, int], dtype: torch.dtype, *, deterministic: bool) -> Pages:
    kernels = CudaKernels(deterministic=deterministic)
    return Pages.random(kernels, CONTEXTS, heads=heads, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "fixed"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1000])
def test_attention_is_right(
    heads: tuple[int, int, int], dtype: torch.dtype, window: int | None, deterministic: bool
) -> None:
    paged = pages(heads, dtype, deterministic=deterministic)
    limit = {BF16: 0.02, torch.float16: 0.003, torch.float32: 1e-5}[dtype]
    for spans in (PROMPTS, SINGLES, (*PROMPTS, SINGLES[3])):
        out, expected = paged.attend(spans, window), paged.expected(spans, window)
        assert (out.double() - expected).abs().max() < limit


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 1000])
def test_a_row_has_the_same_bits_whole_cut_and_as_a_single_query(
    heads: tuple[int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    paged = pages(heads, dtype, deterministic=True)
    whole = paged.attend([(0, 0, 3000)], window)
    cuts = [(0, 0, 777), (0, 777, 2100), (0, 2100, 3000)]
    pieces = [paged.attend([(3, 0, 100), cut, SINGLES[4]], window)[100:-1] for cut in cuts]
    assert torch.equal(torch.cat(pieces), whole)
    for at in (0, 255, 256, 1500, 2999):
        assert torch.equal(paged.attend([(0, at, at + 1), SINGLES[1]], window)[0], whole[at])


@pytest.mark.parametrize("inputs", [576, 4096])
def test_linear_is_independent_of_the_batch(inputs: int) -> None:
    for dtype in (BF16, torch.float32):
        weight = torch.randn(1000, inputs, device=DEVICE).to(dtype) / inputs**0.5
        x = torch.randn(700, inputs, device=DEVICE).to(dtype)
        linear = CudaKernels(deterministic=True).linear(weight)
        whole = linear(x)
        for rows in (1, 63, 64, 300):
            assert torch.equal(linear(x[:rows]), whole[:rows])


@pytest.mark.parametrize("name", TABLES)
def test_linear_over_codes_is_right_and_independent_of_the_batch(name: str) -> None:
    part = code_format(name, 128).random(1000, 4096, DEVICE)
    weights = LinearWeights(StoredWeight((part,), BF16, DEVICE))
    head = CudaKernels(deterministic=True).head_from(weights)
    x = torch.randn(700, 4096, device=DEVICE).to(BF16)
    whole = head(x)
    torch.testing.assert_close(
        whole.double(), x.double() @ part.dequantized().double().T, rtol=1e-4, atol=1e-4
    )
    for rows in (1, 63, 64, 300):
        assert torch.equal(head(x[:rows]), whole[:rows])
    graph = torch.cuda.CUDAGraph()
    few = x[:3].clone()
    with torch.cuda.graph(graph):
        out = head(few)
    few.copy_(x[3:6])
    graph.replay()
    assert torch.equal(out, whole[3:6])


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "fixed"])
def test_a_captured_step_follows_its_inputs(deterministic: bool) -> None:
    paged = pages((32, 8, 128), BF16, deterministic=deterministic)
    batch = paged.batch(SINGLES)
    queries = torch.cat([paged.queries[b][begin:end] for b, begin, end in SINGLES])

    def attend() -> torch.Tensor:
        return paged.kernels.attend(queries, batch, paged.cache, scale=128**-0.5)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    shorter: tuple[Span, ...] = tuple((b, n // 2, n // 2 + 1) for b, n in enumerate(CONTEXTS))
    replacement = paged.batch(shorter)
    queries.copy_(torch.cat([paged.queries[b][begin:end] for b, begin, end in shorter]))
    batch.context_lengths.copy_(replacement.context_lengths)
    graph.replay()
    expected = paged.kernels.attend(queries, replacement, paged.cache, scale=128**-0.5)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("spans", [PROMPTS, SINGLES])
def test_nothing_waits_for_the_device(spans: tuple[Span, ...]) -> None:
    paged = pages((32, 8, 128), BF16, deterministic=False)
    batch = paged.batch(spans)
    queries = torch.cat([paged.queries[b][begin:end] for b, begin, end in spans])
    residual = torch.randn(len(queries), 4096, device=DEVICE, dtype=BF16)
    weight = torch.ones(4096, device=DEVICE, dtype=BF16)
    qkv = torch.randn(len(queries), 48 * 128, device=DEVICE, dtype=BF16)
    rope = torch.randn(max(CONTEXTS), 128, device=DEVICE)
    # Elsewhere than what `queries` look at.
    moved = replace(batch, cache_rows=torch.arange(len(queries), device=DEVICE) % 16)
    with waits_as_errors():
        paged.kernels.attend(queries, batch, paged.cache, scale=1.0)
        normed = paged.kernels.add_rms_norm(residual, residual, weight, 1e-5)
        paged.kernels.silu_mul(normed)
        paged.kernels.rope_store(qkv, rope, moved, paged.cache, num_heads=32, num_kv_heads=8)


def test_the_cuda_kernels_are_chosen_for_every_dtype(caplog: pytest.LogCaptureFixture) -> None:
    for dtype in (BF16, torch.float16, torch.float32):
        shapes = [LayerShape.small(64), LayerShape.small(128)]
        kernels = choose_kernels(DEVICE, dtype, deterministic=False, shapes=shapes)
        assert kernels.name == "cuda", caplog.text
