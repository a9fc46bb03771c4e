"""The Triton kernels over rows against plain torch: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.layer_weights import HeadNorms, NormWeights, Rotation
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.cuda.operators import CudaKernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# In parts of 1 + size. The interpreter casts to bfloat16 by cutting off, as numpy has none.
TOLERANCE = {BF16: 0.02, FP16: 0.002, FP32: 2e-6}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = PlainKernels(deterministic=True)


@pytest.fixture(params=[BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    assert isinstance(request.param, torch.dtype)
    return request.param


@pytest.fixture
def kernels() -> CudaKernels:
    return CudaKernels(deterministic=True)


class Random:
    def __init__(self, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self._dtype = dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(DEVICE, self._dtype)


def error(out: Tensor, expected: Tensor) -> float:
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    difference = (out.double() - expected.double()).abs() / (1 + expected.double().abs())
    return float(difference.max())


@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 100), (40, 16), (2, 5000)])
def test_norms_match_their_definition(
    dtype: torch.dtype, kernels: CudaKernels, rows: int, width: int
) -> None:
    random = Random(dtype)
    x, residual, weight = random(rows, width) * 3, random(rows, width), random(width)
    ours, plain = residual.clone(), residual.clone()
    normed = kernels.add_rms_norm(x, ours, weight, 1e-5)
    assert error(normed, PLAIN.add_rms_norm(x, plain, weight, 1e-5)) < TOLERANCE[dtype]
    assert error(ours, plain) < TOLERANCE[dtype]
    if dtype == FP32:
        assert torch.equal(ours, plain)
    assert torch.equal(kernels.rms_norm(ours, weight, 1e-5), normed)
    assert torch.equal(kernels.rms_norm(ours[-1:], weight, 1e-5), normed[-1:])


def test_the_norm_is_cast_before_it_is_scaled(kernels: CudaKernels) -> None:
    random = Random(FP16)
    x, weight = random(2, 2048), random(2048)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    once = (wide * weight.float()).half()
    ours, plain = kernels.rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x, weight, 1e-5)
    # Square roots differ by a rounding here and there; a cast less differs in a good part of all.
    assert (ours != plain).sum() < (once != plain).sum() / 10


@pytest.mark.parametrize("width", [16, 80])
def test_norms_of_heads_in_a_merged_projection_match_plain_torch(
    dtype: torch.dtype, kernels: CudaKernels, width: int
) -> None:
    random = Random(dtype)
    heads, weight = random(5, 9, width)[:, 2:6], random(width)
    normed = kernels.rms_norm(heads, weight, 1e-5)
    assert error(normed, PLAIN.rms_norm(heads, weight, 1e-5)) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [8, 100, 1536])
def test_silu_mul_matches_its_definition(
    dtype: torch.dtype, kernels: CudaKernels, width: int
) -> None:
    gate_up = Random(dtype)(3, 2 * width) * 3
    out = kernels.silu_mul(gate_up)
    assert error(out, PLAIN.silu_mul(gate_up)) < TOLERANCE[dtype]
    merged = torch.cat([gate_up, gate_up], dim=1)[:, : 2 * width]
    assert torch.equal(kernels.silu_mul(merged), out)


def test_the_activation_is_cast_before_it_is_multiplied(kernels: CudaKernels) -> None:
    gate_up = Random(FP16)(2, 2048)
    gate, up = gate_up.chunk(2, dim=1)
    once = (torch.nn.functional.silu(gate.float()) * up.float()).half()
    ours, plain = kernels.silu_mul(gate_up), PLAIN.silu_mul(gate_up)
    # Sigmoids differ by a rounding here and there; a cast less differs in a good part of all.
    assert (ours != plain).sum() < (once != plain).sum() / 10


@dataclass(frozen=True)
class Step:
    """Two kernels' caches, both NaN, and one batch."""

    batch: RaggedBatch
    ours: LayerCache
    plain: LayerCache

    @classmethod
    def of(cls, kernels: CudaKernels, num_kv_heads: int, dim: int, dtype: torch.dtype) -> Step:
        caches = []
        for _ in range(2):
            cache = kernels.new_cache(
                num_blocks=9, num_kv_heads=num_kv_heads, head_dim=dim, dtype=dtype, device=DEVICE
            )
            cache.keys.fill_(math.nan)
            cache.values.fill_(math.nan)
            caches.append(cache)
        batch = ragged_batch((9, 1), (30, 20), block_size=kernels.block_size, device=DEVICE)
        return cls(batch, *caches)

    def difference(self) -> float:
        """The largest difference of stored values; positions without a value must still be NaN in both."""
        worst = 0.0
        for ours, plain in (
            (self.ours.keys, self.plain.keys),
            (self.ours.values, self.plain.values),
        ):
            stored = ~plain.isnan()
            assert torch.equal(stored, ~ours.isnan())
            assert stored.flatten(2).all(-1).sum() == 10
            worst = max(worst, error(ours[stored], plain[stored]))
        return worst


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"),
    [(9, 3, 64, 64), (3, 1, 80, 32), (2, 2, 16, 16), (2, 1, 96, 72)],
)
def test_rope_store_rotates_pairs_of_channels(
    dtype: torch.dtype, kernels: CudaKernels, heads: int, kv_heads: int, dim: int, rotary: int
) -> None:
    step = Step.of(kernels, kv_heads, dim, dtype)
    qkv = Random(dtype)(10, (heads + 2 * kv_heads) * dim)
    angles = torch.arange(40).unsqueeze(1) / torch.arange(1, rotary // 2 + 1)
    rope = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
    untouched = qkv.clone()
    expected = PLAIN.rope_store(
        qkv.clone(), rope, step.batch, step.plain, num_heads=heads, num_kv_heads=kv_heads
    )
    queries = kernels.rope_store(
        qkv, rope, step.batch, step.ours, num_heads=heads, num_kv_heads=kv_heads
    )
    assert error(queries, expected) < TOLERANCE[dtype]
    assert step.difference() < TOLERANCE[dtype]
    assert queries.data_ptr() == qkv.data_ptr()
    assert torch.equal(qkv[:, (heads + kv_heads) * dim :], untouched[:, (heads + kv_heads) * dim :])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary"),
    [(9, 3, 64, 64), (3, 1, 80, 32), (2, 2, 16, 16), (2, 1, 96, 72)],
)
def test_rope_store_normalises_queries_and_keys(
    dtype: torch.dtype, kernels: CudaKernels, heads: int, kv_heads: int, dim: int, rotary: int
) -> None:
    """A head is normalised over all of its channels, rotated or not, and values are stored as they are."""
    step = Step.of(kernels, kv_heads, dim, dtype)
    random = Random(dtype)
    qkv = random(10, (heads + 2 * kv_heads) * dim) * 3
    query, key = (NormWeights(weight=1 + random(dim) / 4, eps=1e-2) for _ in range(2))
    norms = HeadNorms(query=query, key=key)
    rope = random(40, rotary).float()
    untouched = qkv.clone()
    normed = qkv.clone().view(10, heads + 2 * kv_heads, dim)
    for some, norm in ((slice(0, heads), query), (slice(heads, heads + kv_heads), key)):
        wide = normed[:, some].double()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        normed[:, some] = (wide * scale * norm.weight.double()).to(dtype)
    expected = PLAIN.rope_store(
        normed.flatten(1), rope, step.batch, step.plain, num_heads=heads, num_kv_heads=kv_heads
    )
    queries = kernels.rope_store(
        qkv, rope, step.batch, step.ours, num_heads=heads, num_kv_heads=kv_heads, norms=norms
    )
    assert error(queries, expected) < 2 * TOLERANCE[dtype]
    assert step.difference() < 2 * TOLERANCE[dtype]
    assert torch.equal(qkv[:, (heads + kv_heads) * dim :], untouched[:, (heads + kv_heads) * dim :])


FLAGS = tuple(
    {"centred": centred, "plus_one": plus_one, "wide": wide}
    for centred in (False, True)
    for plus_one in (False, True)
    for wide in (False, True)
)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_norms_of_all_kinds_are_one_launch_with_the_values_of_plain_torch(
    dtype: torch.dtype, kernels: CudaKernels, flags: dict[str, Any]
) -> None:
    random = Random(dtype)
    norm = NormWeights(weight=1 + random(80) / 4, eps=1e-2, **flags)
    x, residual = random(5, 80) * 3 + 1, random(5, 80)
    assert error(kernels.norm(x, norm), norm.apply(x)) < 2 * TOLERANCE[dtype]
    added = residual.clone()
    normed = kernels.add_norm(x, added, norm)
    assert error(added, residual + x) < TOLERANCE[dtype]
    assert error(normed, norm.apply(added)) < 2 * TOLERANCE[dtype]


def test_each_head_may_have_a_weight_of_its_own(dtype: torch.dtype, kernels: CudaKernels) -> None:
    random = Random(dtype)
    norm = NormWeights(weight=1 + random(3, 40) / 4, eps=1e-2, centred=True, wide=True)
    heads = random(7, 5, 40)[:, 1:4]
    assert error(kernels.norm(heads, norm), norm.apply(heads)) < 2 * TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_gelu_is_that_of_plain_torch(dtype: torch.dtype, kernels: CudaKernels) -> None:
    gate_up = Random(dtype)(9, 140) * 4
    assert error(kernels.gelu_mul(gate_up), PLAIN.gelu_mul(gate_up)) < 2 * TOLERANCE[dtype]
    assert kernels.gelu_mul(gate_up[:0]).shape == (0, 70)


@pytest.mark.parametrize(
    ("after_rope", "interleaved", "flags"),
    [
        (None, True, {}),
        (False, True, {}),
        (True, False, {}),
        (True, True, {"wide": True}),
        (False, False, {"plus_one": True, "wide": True}),
        (False, False, {"plus_one": True}),
    ],
)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (96, 72)])
def test_heads_of_other_families_are_prepared_in_one_launch(
    dtype: torch.dtype,
    kernels: CudaKernels,
    after_rope: bool | None,
    interleaved: bool,
    flags: dict[str, Any],
    dim: int,
    rotary: int,
) -> None:
    heads, kv_heads, random = 5, 2, Random(dtype)
    step = Step.of(kernels, kv_heads, dim, dtype)
    rotation = Rotation(table=random(40, rotary).float(), interleaved=interleaved)
    query, key = (NormWeights(weight=1 + random(dim) / 4, eps=1e-2, **flags) for _ in range(2))
    norms = None
    if after_rope is not None:
        norms = HeadNorms(query=query, key=key, after_rope=after_rope)
    qkv = random(10, (heads + 2 * kv_heads) * dim) * 3
    expected = qkv.clone().view(10, -1, dim)
    queries, keys, values = torch.split(expected, [heads, kv_heads, kv_heads], dim=1)
    if norms is not None and not after_rope:
        queries.copy_(query.apply(queries))
        keys.copy_(key.apply(keys))
    rotation.apply(queries, step.batch.positions)
    rotation.apply(keys, step.batch.positions)
    if norms is not None and after_rope:
        queries.copy_(query.apply(queries))
        keys.copy_(key.apply(keys))
    PLAIN.store(keys, values, step.batch, step.plain)
    prepared = kernels.prepare_heads(qkv, rotation, norms, step.batch, step.ours, (heads, kv_heads))
    assert prepared is not None
    assert error(prepared, queries) < 3 * TOLERANCE[dtype]
    assert step.difference() < 3 * TOLERANCE[dtype]


def test_heads_that_no_kernel_prepares_are_left_as_they_are(kernels: CudaKernels) -> None:
    random, step = Random(FP32), Step.of(kernels, 1, 64, FP32)
    rotation, qkv = Rotation(table=random(40, 64)), random(10, 4 * 64)
    for norm, is_whole in (
        (NormWeights(weight=random(64), eps=1e-5, centred=True), False),
        (NormWeights(weight=random(2, 64), eps=1e-5), False),
        (NormWeights(weight=random(64), eps=1e-5), True),
    ):
        norms, before = HeadNorms(query=norm, key=norm, whole_width=is_whole), qkv.clone()
        assert kernels.prepare_heads(qkv, rotation, norms, step.batch, step.ours, (2, 1)) is None
        assert torch.equal(qkv, before)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_values_are_stored_as_they_are(kernels: CudaKernels) -> None:
    step = Step.of(kernels, 1, 16, FP32)
    qkv = Random(FP32)(10, 4 * 16)
    qkv[0, 48:] = math.inf
    rope = torch.zeros(40, 16, device=DEVICE)
    kernels.rope_store(qkv, rope, step.batch, step.ours, num_heads=2, num_kv_heads=1)
    stored = step.ours.values.view(-1, 16)[step.batch.cache_rows]
    assert torch.equal(stored, qkv[:, 48:])


@pytest.mark.parametrize(("kv_heads", "dim"), [(3, 64), (20, 80)])
def test_store_takes_strided_views(
    dtype: torch.dtype, kernels: CudaKernels, kv_heads: int, dim: int
) -> None:
    step = Step.of(kernels, kv_heads, dim, dtype)
    keys = Random(dtype)(kv_heads, 10, dim).transpose(0, 1)
    values = Random(dtype)(10, kv_heads, 2, dim)[:, :, 1]
    kernels.store(keys, values, step.batch, step.ours)
    PLAIN.store(keys, values, step.batch, step.plain)
    assert step.difference() == 0


def test_no_rows_are_accepted(kernels: CudaKernels) -> None:
    nothing = torch.empty(0, 64, device=DEVICE)
    weight = torch.ones(64, device=DEVICE)
    assert kernels.rms_norm(nothing, weight, 1e-5).shape == (0, 64)
    assert kernels.add_rms_norm(nothing, nothing.clone(), weight, 1e-5).shape == (0, 64)
    assert kernels.silu_mul(nothing).shape == (0, 32)


def test_dtypes_and_shapes_without_kernels_are_refused(kernels: CudaKernels) -> None:
    for dtype, dim in ((torch.float64, 64), (FP16, 8), (FP16, 512)):
        with pytest.raises(ValueError, match="no CUDA cache"):
            kernels.new_cache(
                num_blocks=2, num_kv_heads=1, head_dim=dim, dtype=dtype, device=DEVICE
            )
    residual = torch.zeros(4, 8, device=DEVICE)[:, ::2]
    with pytest.raises(ValueError, match="contiguous"):
        kernels.add_rms_norm(residual, residual, torch.ones(4, device=DEVICE), 1e-5)
