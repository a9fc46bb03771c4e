"""The Triton attention over latents against its definition and against itself: on a GPU, or else in the interpreter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace_testing.models.models import prompt_of, read_driver, save_tiny

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.agreement import TOLERANCE, ragged_batch
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.cuda import cuda_attention, cuda_latents
from millrace_shard.kernels.cuda.cuda_attention import SharedMemory
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.cuda.served_agreement import differing_bits, served_difference
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import NormWeights, Rotation
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_testing.router.pages import Span

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONTEXTS = (275, 257, 17, 1, 256)
SPANS: tuple[Span, ...] = ((0, 268, 275), (1, 256, 257), (2, 0, 17), (3, 0, 1), (4, 255, 256))
"""Ends of prompts, and single queries on both sides of the end of a span. Few: the interpreter is slow."""
COUNTS = [end - begin for _, begin, end in SPANS]


@dataclass(frozen=True)
class Latents:
    """Random queries and keys of sequences, in pages among pages full of NaN."""

    kernels: Kernels
    queries: list[Tensor]
    """Of each sequence, [context, heads, width]."""
    keys: list[Tensor]
    """Of each sequence, [context, 1, width]."""
    whole: RaggedBatch
    cache: LayerCache

    @classmethod
    def random(
        cls,
        heads: int = 3,
        widths: tuple[int, int] = (32, 16),
        dtype: torch.dtype = FP32,
        *,
        deterministic: bool = True,
        contexts: Sequence[int] = CONTEXTS,
    ) -> Latents:
        """`widths` are channels of latents and of rotated keys."""
        kernels, width = CudaKernels(deterministic=deterministic), sum(widths)
        generator = torch.Generator().manual_seed(heads * width)

        def random(length: int, count: int) -> Tensor:
            return torch.randn(length, count, width, generator=generator).to(DEVICE, dtype)

        whole = ragged_batch(contexts, contexts, block_size=16, device=DEVICE)
        cache = kernels.new_cache(
            num_blocks=int(whole.block_tables.max()) + 2,
            num_kv_heads=1,
            head_dim=width,
            dtype=dtype,
            device=DEVICE,
            latent_dim=widths[0],
        )
        cache.keys.fill_(math.nan)
        queries, keys = ([random(length, n) for length in contexts] for n in (heads, 1))
        kernels.store(torch.cat(keys), torch.cat(keys), whole, cache)
        return cls(kernels, queries, keys, whole, cache)

    def batch(self, spans: Sequence[Span]) -> RaggedBatch:
        """The queries of `spans`."""
        counts = tuple(end - begin for _, begin, end in spans)
        ends = tuple(end for *_, end in spans)
        tables = self.whole.block_tables[[sequence for sequence, _, _ in spans]]
        made = ragged_batch(counts, ends, block_size=16, device=DEVICE)
        return replace(made, block_tables=tables)

    def attend(self, spans: Sequence[Span], batch: RaggedBatch | None = None) -> Tensor:
        """[queries, heads, latent_dim], laid out as `batch` says, if there is one."""
        queries = torch.cat([self.queries[b][begin:end] for b, begin, end in spans])
        scale = queries.shape[2] ** -0.5
        out = self.kernels.attend(queries, batch or self.batch(spans), self.cache, scale=scale)
        return out.view(*queries.shape[:2], -1)

    def expected(self, spans: Sequence[Span]) -> Tensor:
        """In float64, straight from the definition."""
        return torch.cat([self._expected(*span) for span in spans])

    def _expected(self, sequence: int, begin: int, end: int) -> Tensor:
        queries = self.queries[sequence][begin:end].double()
        keys = self.keys[sequence][:end, 0].double()
        scores = torch.einsum("qhd,kd->hqk", queries, keys) * keys.shape[1] ** -0.5
        hidden = torch.arange(end) > torch.arange(begin, end).unsqueeze(1)
        weights = scores.masked_fill(hidden.to(DEVICE), -torch.inf).softmax(-1)
        return torch.einsum("hqk,kd->qhd", weights, keys[:, : self.cache.latent_dim])


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "fixed"])
@pytest.mark.parametrize(
    ("heads", "widths", "dtype"),
    [
        *((3, (32, 16), FP32), (20, (64, 32), FP16), (5, (40, 8), BF16), (34, (16, 16), FP16)),
        pytest.param(16, (512, 64), BF16, marks=pytest.mark.long),
        pytest.param(20, (512, 64), FP32, marks=pytest.mark.long),
    ],
)
def test_attention_over_latents_matches_its_definition(
    heads: int, widths: tuple[int, int], dtype: torch.dtype, deterministic: bool
) -> None:
    latents = Latents.random(heads, widths, dtype, deterministic=deterministic)
    out, expected = latents.attend(SPANS), latents.expected(SPANS)
    tolerance = {BF16: 0.03, FP16: 0.003, FP32: 5e-6}[dtype]
    assert (out.double() - expected).abs().max() < tolerance


@pytest.mark.parametrize(("heads", "dtype"), [(3, FP32), (20, FP16)])
def test_rows_over_latents_have_the_same_bits_in_any_batch_and_with_any_chunks(
    heads: int, dtype: torch.dtype
) -> None:
    latents = Latents.random(heads, dtype=dtype)
    together = torch.split(latents.attend(SPANS), COUNTS)
    for (sequence, begin, end), rows in zip(SPANS, together, strict=True):
        cuts = sorted({begin, max(begin, end - 9), max(begin, end - 2), end - 1, end})
        pieces = [latents.attend([(sequence, a, b)]) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(pieces), rows)


def test_a_single_query_over_latents_has_the_same_bits_in_any_batch_in_fast_mode_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latents = Latents.random(20, dtype=FP16, deterministic=False, contexts=(700, 257, 1))
    spans = [(0, 699, 700), (1, 256, 257), (2, 0, 1)]
    together = latents.attend(spans)
    for span, rows in zip(spans, torch.split(together, 1), strict=True):
        assert torch.equal(latents.attend([span]), rows)
    monkeypatch.setattr(cuda_attention, "PROGRAMS", 1)
    assert torch.equal(latents.attend(spans), together)
    batch = latents.batch(spans)
    wider = torch.nn.functional.pad(batch.block_tables, (0, 150))
    assert torch.equal(latents.attend(spans, replace(batch, block_tables=wider)), together)


def test_latents_beyond_the_end_of_a_sequence_never_matter() -> None:
    latents = Latents.random(deterministic=False)
    before = latents.attend(SPANS)
    assert before.isfinite().all()
    stored = torch.zeros(latents.cache.keys.shape[:2], dtype=torch.bool, device=DEVICE)
    stored.view(-1)[latents.whole.cache_rows] = True
    latents.cache.keys[~stored] = 3e4
    assert torch.equal(latents.attend(SPANS), before)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_latent_that_is_not_finite_fails_visibly_and_affects_no_other() -> None:
    latents = Latents.random(contexts=(40, 33, 17))
    spans = [(0, 33, 40), (1, 32, 33), (2, 0, 17)]
    before = torch.split(latents.attend(spans), [7, 1, 17])
    row = int(latents.batch([(2, 10, 11)]).block_tables[0, 0]) * 16 + 10
    latents.cache.keys.view(-1, 48)[row, 3] = math.nan
    after = torch.split(latents.attend(spans), [7, 1, 17])
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert not after[2][10:].isfinite().all(-1).any()


@pytest.mark.parametrize("rows", [1, 40, 300])
@pytest.mark.parametrize(("inputs", "dtype"), [(24, FP32), (64, FP16)])
def test_linears_of_heads_match_float64_whatever_the_rows(
    inputs: int, rows: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = (
        torch.randn(*size, inputs, generator=generator).to(DEVICE, dtype)
        for size in ((3, 50), (rows, 4))
    )
    linear = CudaKernels(deterministic=False).heads_linear(weight.clone())
    out = torch.full((rows, 4, 66), torch.nan, dtype=dtype, device=DEVICE)
    linear(x[:, :3], out[:, 1:, :50])
    expected = torch.einsum("thi,hoi->tho", x[:, :3].double(), weight.double())
    tolerance = 1e-5 if dtype == FP32 else 0.02
    torch.testing.assert_close(out[:, 1:, :50].double(), expected, atol=tolerance, rtol=tolerance)
    assert out[:, 0].isnan().all()
    assert out[..., 50:].isnan().all()
    one = torch.empty(1, 3, 50, dtype=dtype, device=DEVICE)
    linear(x[-1:, :3], one)
    assert torch.equal(one[0], out[-1, 1:, :50])


@pytest.mark.parametrize(
    ("rotary", "interleaved", "norm"),
    [
        (16, True, {}),
        (16, False, {"plus_one": True, "wide": True}),
        (None, False, {}),
        (8, True, {}),
    ],
    ids=["pairs", "halves", "no-positions", "partly"],
)
def test_latents_and_rotated_keys_are_those_of_plain_torch(
    rotary: int | None, interleaved: bool, norm: dict[str, Any]
) -> None:
    cuda, plain = CudaKernels(deterministic=True), PlainKernels(deterministic=True)
    generator = torch.Generator().manual_seed(3)
    heads, queries, shared, weight, rope = (
        torch.randn(*shape, generator=generator).to(DEVICE)
        for shape in ((6, 4, 48), (6, 3, 24), (6, 60), (32,), (40, rotary or 2))
    )
    batch = ragged_batch((5, 1), (20, 33), block_size=16, device=DEVICE)
    rotation = None if rotary is None else Rotation(table=rope, interleaved=interleaved)
    norms = NormWeights(weight=weight, eps=1e-5, **norm)
    results = []
    for kernels in (cuda, plain):
        latents = Latents.random(3, (32, 16), contexts=(20, 33))
        mine = heads.clone()
        tensors = mine, queries[..., 8:], shared[:, 12:], norms
        kernels.prepare_latents(*tensors, rotation, batch, latents.cache)
        results.append((mine[:, :-1], latents.cache.keys.view(-1, 48)[batch.cache_rows]))
    (ours, our_keys), (theirs, their_keys) = results
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(our_keys, their_keys, atol=1e-6, rtol=1e-6)
    assert torch.equal(ours[..., :32], heads[:, :-1, :32])


@pytest.mark.parametrize("num_bytes", [101376, 166912, 232448])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_tilings_for_latents_keep_two_stages_on_every_gpu(
    dtype: torch.dtype, num_bytes: int
) -> None:
    memory = SharedMemory(num_bytes, (9, 0) if num_bytes > 200000 else (8, 6))
    tilings = (
        cuda_latents.tile_tiling(dtype),
        cuda_latents.fixed_tiling(dtype),
        *(cuda_latents.span_tiling(dtype, heads) for heads in (8, 16, 20, 128)),
    )
    for tiling in tilings:
        fitted = cuda_latents.fitted(tiling, (512, 64), dtype, memory)
        assert fitted.num_stages >= 2
        assert fitted.rows >= min(32, tiling.rows) or dtype == FP32


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "fixed"])
def test_the_check_of_a_start_passes_over_latents(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "millrace_shard.kernels.cuda.served_agreement"
    for name, value in {"LONG_CONTEXT": 300, "NUM_OTHERS": 3, "PROMPT": 12, "CHUNK": 5}.items():
        monkeypatch.setattr(f"{module}.{name}", value)
    monkeypatch.setattr(f"{module}.LONG", ((12, 1, 5), (30, 200, 300)))
    monkeypatch.setattr(f"{module}.MANY", ((1, 5, 1), (20, 25, 30)))
    shape = LayerShape(num_heads=3, num_kv_heads=1, head_dim=48, latent_dim=32)
    kernels, oracle = (
        each(deterministic=flag)
        for each, flag in ((CudaKernels, deterministic), (PlainKernels, False))
    )
    difference = served_difference(kernels, oracle, dtype=FP32, shape=shape, device=DEVICE)
    assert difference < TOLERANCE[FP32]
    if deterministic:
        assert differing_bits(kernels, dtype=FP32, shape=shape, device=DEVICE) is None


@pytest.mark.parametrize("model_type", ["deepseek_v2", "glm4_moe_lite"])
def test_a_model_over_latents_keeps_its_bits_in_chunks_and_has_the_logits_of_plain_torch(
    model_type: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, model_type, num_hidden_layers=2)

    def logits(kernels: Kernels, chunk: int | None = None) -> Tensor:
        driver = read_driver(tmp_path, kernels, device=DEVICE)
        return torch.stack(driver.generate([prompt_of(9, seed=1)], 2, chunk=chunk)[0].logits)

    ours = logits(CudaKernels(deterministic=True))
    assert torch.equal(ours, logits(CudaKernels(deterministic=True), chunk=4))
    expected = logits(PlainKernels(deterministic=False))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
