"""Keys and values in codes by Triton against the codes of plain torch: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.layer_weights import HeadNorms, NormWeights
from millrace_shard.kernels.plain import PlainKernels
from millrace_testing.engines.kernels import CACHE_DTYPES, SCALES
from millrace_testing.models.models import prompt_of, read_driver, save_tiny
from millrace_testing.router.pages import Pages, Span

pytest.importorskip("triton", reason="no Triton for this platform")

import triton
import triton.language as tl

from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.cuda.triton_codes import E4M3, E5M2, INT8, encoded, numbers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CODED = CACHE_DTYPES[1:]
KINDS = {torch.int8: INT8, torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
TOLERANCE = {BF16: 0.03, FP16: 0.004, FP32: 5e-6}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = PlainKernels(deterministic=True)
CONTEXTS = (275, 257, 17, 1, 256)
SPANS: tuple[Span, ...] = ((0, 268, 275), (1, 256, 257), (2, 0, 17), (3, 0, 1), (4, 255, 256))
COUNTS = [end - begin for _, begin, end in SPANS]

each_code = pytest.mark.parametrize("cache_dtype", CODED, ids=lambda each: str(each)[6:])


@triton.jit  # type: ignore[untyped-decorator]
def _decode(codes, out, kind: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, size)
    found = numbers(tl.load(codes + lane), kind, out.dtype.element_ty)
    tl.store(out + lane, found)


@triton.jit  # type: ignore[untyped-decorator]
def _encode(x, scales, codes, kind: tl.constexpr, rows: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    where = tl.arange(0, rows)[:, None] * size + tl.arange(0, size)[None, :]
    found = encoded(tl.load(x + where), tl.load(scales + tl.arange(0, rows)), kind)
    tl.store(codes + where, found)


@each_code
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
def test_every_code_is_its_number(cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(256, dtype=dtype, device=DEVICE)
    _decode[(1,)](codes, out, kind=KINDS[cache_dtype], size=256)
    torch.testing.assert_close(
        out.float(), codes.view(cache_dtype).float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("cache_dtype", CODED[1:], ids=lambda each: str(each)[6:])
def test_numbers_round_to_the_codes_of_torch(cache_dtype: torch.dtype) -> None:
    """Every code's number, the middles between neighbours, and their neighbours in float32."""
    numbers_ = torch.arange(127, dtype=torch.uint8).view(cache_dtype).float()
    numbers_ = numbers_[numbers_.isfinite()].sort().values
    middles = (numbers_[1:] + numbers_[:-1]) / 2
    ends = [torch.nextafter(middles, torch.tensor(to)) for to in (-math.inf, math.inf)]
    sizes = torch.cat([numbers_, middles, *ends, torch.tensor([1e9, 3e38, 1e-30, 0.0])])
    x = torch.nn.functional.pad(torch.cat([sizes, -sizes]), (0, 1024 - 2 * len(sizes)))
    codes = torch.empty(1024, dtype=torch.uint8, device=DEVICE)
    ones = torch.ones(1, device=DEVICE)
    _encode[(1,)](x.to(DEVICE), ones, codes, kind=KINDS[cache_dtype], rows=1, size=1024)
    largest = torch.finfo(cache_dtype).max
    expected = x.clamp(-largest, largest).to(cache_dtype).view(torch.uint8)
    assert torch.equal(codes.cpu(), expected)


def caches(cache_dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> list[LayerCache]:
    """Caches of the CUDA kernels and of plain torch, of zeros."""
    result = []
    for kernels in (CudaKernels(deterministic=True), PLAIN):
        cache = kernels.new_cache(
            num_blocks=8,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=cache_dtype,
            device=DEVICE,
            scales=SCALES,
        )
        cache.zero(torch.arange(8, device=DEVICE))
        result.append(cache)
    return result


def assert_same(ours: LayerCache, theirs: LayerCache) -> None:
    for mine, other in zip(ours.by_block, theirs.by_block, strict=True):
        if mine.itemsize == 1:
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
        else:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


def inputs(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers of many sizes, so that some saturate in fp8 and some are subnormal."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randn(shape, generator=generator).exp()
    return (torch.randn(shape, generator=generator) * sizes).to(DEVICE, dtype)


@each_code
@pytest.mark.parametrize("dtype", [FP16, FP32, BF16], ids=["fp16", "fp32", "bf16"])
def test_stored_codes_are_those_of_plain_torch(
    cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    batch = ragged_batch((20, 1), (20, 33), block_size=16, device=DEVICE)
    ours, theirs = caches(cache_dtype, 3, 40)
    keys, values = inputs(2, 21, 3, 40, dtype=dtype)
    # A head of zeros, and values that are no numbers.
    keys[3, 1] = 0
    keys[5, 2, 7], values[6, 0, 1] = math.nan, math.inf
    CudaKernels(deterministic=True).store(keys, values, batch, ours)
    PLAIN.store(keys, values, batch, theirs)
    assert_same(ours, theirs)


@each_code
@pytest.mark.parametrize(("rotary", "has_norms"), [(32, False), (16, True)])
def test_codes_of_rotated_keys_are_those_of_plain_torch(
    cache_dtype: torch.dtype, rotary: int, has_norms: bool
) -> None:
    batch = ragged_batch((3, 1), (3, 18), block_size=16, device=DEVICE)
    ours, theirs = caches(cache_dtype, 2, 32)
    kernels = CudaKernels(deterministic=True)
    qkv = inputs(4, (3 + 4) * 32, dtype=FP32)
    # Quarter turns change no digit, so that both compute the same numbers.
    turns = torch.arange(18 * rotary // 2, device=DEVICE).view(18, -1) % 4 * (math.pi / 2)
    rope = torch.cat([turns.cos().round(), turns.sin().round()], dim=1)
    norms = None
    if has_norms:
        weight = NormWeights(weight=torch.ones(32, device=DEVICE), eps=1e-5)
        norms = HeadNorms(query=weight, key=weight)
    own = kernels.rope_store(
        qkv.clone(), rope, batch, ours, num_heads=3, num_kv_heads=2, norms=norms
    )
    if norms is None:
        plain = PLAIN.rope_store(qkv, rope, batch, theirs, num_heads=3, num_kv_heads=2)
        assert torch.equal(own, plain)
    else:
        # The norm's last bit may differ: its keys are kept as they are, then coded by plain torch.
        exact, _ = caches(FP32, 2, 32)
        kernels.rope_store(qkv, rope, batch, exact, num_heads=3, num_kv_heads=2, norms=norms)
        rows = batch.cache_rows
        keys, values = (each.view(-1, 2, 32)[rows] for each in (exact.keys, exact.values))
        PLAIN.store(keys, values, batch, theirs)
    assert_same(ours, theirs)


def pages(
    cache_dtype: torch.dtype,
    heads: tuple[int, int, int] = (3, 1, 32),
    dtype: torch.dtype = FP32,
    *,
    deterministic: bool = True,
    contexts: tuple[int, ...] = CONTEXTS,
) -> Pages:
    return Pages.random(
        CudaKernels(deterministic=deterministic),
        contexts,
        heads=heads,
        dtype=dtype,
        device=DEVICE,
        cache_dtype=cache_dtype,
    )


def distance(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).abs().max())


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "fixed"])
@pytest.mark.parametrize(
    ("cache_dtype", "heads", "dtype"),
    [*((each, (3, 1, 64), BF16) for each in CODED), (torch.int8, (4, 2, 24), FP16)],
    ids=lambda each: "-".join(map(str, each)) if isinstance(each, tuple) else str(each)[6:],
)
def test_attention_over_codes_matches_its_definition(
    cache_dtype: torch.dtype, heads: tuple[int, int, int], dtype: torch.dtype, deterministic: bool
) -> None:
    paged = pages(cache_dtype, heads, dtype, deterministic=deterministic)
    assert distance(paged.attend(SPANS), paged.expected(SPANS)) < TOLERANCE[dtype]


@each_code
def test_windows_caps_and_sinks_over_codes_match_their_definitions(
    cache_dtype: torch.dtype,
) -> None:
    paged = pages(cache_dtype, (4, 2, 16))
    sinks = torch.tensor([-3.0, 0.0, 1.0, 4.0], device=DEVICE)
    for rule in ((20, 5.0, None), (None, None, sinks)):
        out, expected = paged.attend(SPANS, *rule), paged.expected(SPANS, *rule)
        assert distance(out, expected) < TOLERANCE[FP32]


@pytest.mark.parametrize(
    ("cache_dtype", "dtype"),
    # float16 multiplies values of int8 by their scales, in place of weights.
    [(torch.int8, FP16), *((each, FP32) for each in CODED)],
    ids=lambda each: str(each)[6:],
)
def test_rows_over_codes_have_the_same_bits_in_any_batch_and_with_any_chunks(
    cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    paged = pages(cache_dtype, dtype=dtype)
    together = torch.split(paged.attend(SPANS), COUNTS)
    for (sequence, begin, end), rows in zip(SPANS, together, strict=True):
        cuts = sorted({begin, max(begin, end - 9), max(begin, end - 2), end - 1, end})
        pieces = [paged.attend([(sequence, a, b)]) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(pieces), rows)


@each_code
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_codes_that_are_no_numbers_fail_visibly_and_affect_no_other(
    cache_dtype: torch.dtype,
) -> None:
    paged = pages(cache_dtype, contexts=(40, 33, 17))
    spans = [(0, 33, 40), (1, 32, 33), (2, 0, 17)]
    before = torch.split(paged.attend(spans), [7, 1, 17])
    block, offset = divmod(10, 16)
    bad = inputs(1, 1, 32, dtype=FP32)
    bad[0, 0, 3] = math.nan
    row = paged.tables[2, block : block + 1].long() * 16 + offset
    batch = paged.batch([(2, 10, 11)])
    assert torch.equal(batch.cache_rows.cpu(), row)
    PLAIN.store(bad, bad, batch, paged.cache)
    after = torch.split(paged.attend(spans), [7, 1, 17])
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert not after[2][10:].isfinite().all(-1).any()


def test_a_model_over_codes_keeps_its_bits_in_chunks_and_has_the_logits_of_plain_torch(
    tmp_path: Path,
) -> None:
    save_tiny(tmp_path, "qwen3", head_dim=24, num_hidden_layers=1, max_window_layers=1)

    def logits(kernels: Kernels, chunk: int | None = None) -> Tensor:
        driver = read_driver(tmp_path, kernels, device=DEVICE, cache_dtype=torch.float8_e4m3fn)
        return torch.stack(driver.generate([prompt_of(9, seed=1)], 2, chunk=chunk)[0].logits)

    ours = logits(CudaKernels(deterministic=True))
    assert torch.equal(ours, logits(CudaKernels(deterministic=True), chunk=4))
    # A sum that differs in its last bit may lead to another code.
    torch.testing.assert_close(ours, logits(PLAIN), atol=2e-2, rtol=0)


def test_a_cache_of_codes_has_half_the_bytes() -> None:
    sizes = {}
    for cache_dtype in (BF16, *CODED):
        cache, _ = caches(cache_dtype, 2, 128)
        sizes[cache_dtype] = sum(each.nbytes for each in cache.by_block)
    whole = sizes.pop(BF16)
    assert sizes.pop(torch.int8) == whole // 2 + 8 * 16 * 2 * 2 * 4
    assert set(sizes.values()) == {whole // 2}
