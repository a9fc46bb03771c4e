"""The compiled operators with empty inputs, odd strides, large sizes, and inputs that they must refuse."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Layer, LayerCache, Linear
from millrace_shard.kernels.build import BuildError, load_operators
from millrace_shard.kernels.cpu import tile_blocks
from millrace_shard.kernels.cpu.int8_linear import PlainInt8Linear, with_int8
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    LinearWeights,
    MlpWeights,
    NormWeights,
    Rotation,
)
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.stored_weight import StoredWeight

BF16 = torch.bfloat16
CPU = torch.device("cpu")
HIDDEN, HEADS, DIM = 64, 2, 32

OUT_OF_MEMORY = """
import resource
import torch
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.tile_blocks import PanelLinear
from millrace_shard.kernels.stored_weight import StoredWeight

load_operators()
torch.ops.millrace.tile_unit()
torch.set_num_threads(1)
linear = PanelLinear(LinearWeights(StoredWeight.of(torch.eye(32).bfloat16())))
few, many = torch.ones(3, 32).bfloat16(), torch.empty(2**24, 32, dtype=torch.bfloat16)
with open("/proc/self/statm") as file:
    pages = int(file.read().split()[0])
limit = pages * resource.getpagesize() + (1500 << 20)  # of which what comes out takes 1024
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    linear(many)
except RuntimeError as error:
    print(error)
print(linear(few).eq(few).all().item())
"""


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    try:
        load_operators()
    except BuildError as error:
        pytest.skip(str(error))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture
def kernels() -> CpuKernels:
    return CpuKernels(deterministic=True)


def linear_of(out: int, inputs: int, *, bias: bool = False) -> LinearWeights:
    weight = (torch.randn(out, inputs) / math.sqrt(inputs)).to(BF16)
    return LinearWeights(StoredWeight.of(weight), torch.randn(out).to(BF16) if bias else None)


def ones(size: int) -> NormWeights:
    return NormWeights(weight=torch.ones(size, dtype=BF16), eps=1e-5)


def attention_of(**changes: object) -> AttentionWeights:
    weights = AttentionWeights(
        norm=ones(HIDDEN),
        qkv=linear_of(3 * HEADS * DIM, HIDDEN),
        out=linear_of(HIDDEN, HEADS * DIM),
        rotation=Rotation(table=torch.ones(512, DIM)),
        scale=DIM**-0.5,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=DIM,
    )
    return replace(weights, **changes)  # type: ignore[arg-type]


def mlp_of(**changes: object) -> MlpWeights:
    weights = MlpWeights(
        norm=ones(HIDDEN),
        gate_up=linear_of(96, HIDDEN),
        down=linear_of(HIDDEN, 48),
    )
    return replace(weights, **changes)  # type: ignore[arg-type]


def cache_of(
    kernels: CpuKernels | PlainKernels, kv_heads: int, dim: int, *, num_blocks: int = 8
) -> LayerCache:
    cache = kernels.new_cache(
        num_blocks=num_blocks, num_kv_heads=kv_heads, head_dim=dim, dtype=BF16, device=CPU
    )
    kernels.zero_blocks(cache, torch.arange(num_blocks))
    return cache


def test_halves_of_a_layer_accept_no_rows(kernels: CpuKernels) -> None:
    nothing = torch.empty(0, HIDDEN, dtype=BF16)
    cache = cache_of(kernels, HEADS, DIM)
    batch = replace(
        ragged_batch([1], [1], block_size=64),
        positions=torch.empty(0, dtype=torch.int64),
        cache_rows=torch.empty(0, dtype=torch.int64),
        query_starts=torch.zeros(1, dtype=torch.int32),
        context_lengths=torch.empty(0, dtype=torch.int32),
        block_tables=torch.empty(0, 1, dtype=torch.int32),
    )
    block = kernels.attention(attention_of())
    assert block(None, nothing.clone(), batch, cache).shape == (0, HIDDEN)
    assert block(nothing.clone(), nothing.clone(), batch, cache).shape == (0, HIDDEN)
    mlp = kernels.mlp(mlp_of())
    assert mlp(nothing.clone(), nothing.clone()).shape == (0, HIDDEN)
    layers = kernels.layers([Layer(block, mlp)], None)
    assert layers(nothing.clone(), batch, [cache]).shape == (0, HIDDEN)


@pytest.mark.parametrize("dim", [768, 800, 1024])
def test_attention_is_exact_for_heads_of_any_size(kernels: CpuKernels, dim: int) -> None:
    # Above 768 the tiles of a row of queries are further apart than they are long.
    group, plain = 71, PlainKernels(deterministic=True, block_size=64)
    queries, keys, values = (
        torch.randn(rows, heads, dim).to(BF16) for rows, heads in ((71, group), (79, 1), (79, 1))
    )
    outs = []
    for each in (kernels, plain):
        cache = cache_of(each, 1, dim)
        each.store(keys, values, ragged_batch([70, 9], [70, 9], block_size=64), cache)
        batch = ragged_batch([70, 1], [70, 9], block_size=64)
        outs.append(each.attend(queries, batch, cache, scale=dim**-0.5).float())
    torch.testing.assert_close(*outs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_single_head_may_have_any_stride(kernels: CpuKernels, dtype: torch.dtype) -> None:
    # As transformers has it: heads first, then turned round.
    turned = torch.randn(1, 5, DIM).to(dtype).transpose(0, 1)
    batch = ragged_batch([5], [5], block_size=64)
    cache = kernels.new_cache(num_blocks=2, num_kv_heads=1, head_dim=DIM, dtype=dtype, device=CPU)
    kernels.zero_blocks(cache, torch.arange(2))
    kernels.store(turned, turned, batch, cache)
    plain = torch.empty(5, 1, DIM, dtype=dtype).copy_(turned)
    assert plain.stride() != turned.stride()
    outs = [kernels.attend(each, batch, cache, scale=0.1) for each in (turned, plain)]
    assert torch.equal(outs[0], outs[1])


def panels(weight: Tensor) -> Linear:
    return tile_blocks.PanelLinear(LinearWeights(StoredWeight.of(weight)))


def int8(weight: Tensor) -> Linear:
    return with_int8(CpuKernels(deterministic=True)).linear(weight)


def plain_int8(weight: Tensor) -> Linear:
    return PlainInt8Linear(weight, None)


@pytest.mark.parametrize("pack", [panels, int8, plain_int8])
@pytest.mark.usefixtures("tiles")
def test_linears_take_any_strides_and_no_rows(pack: Callable[[Tensor], Linear]) -> None:
    weight = linear_of(40, 64).weight.copied()
    linear = pack(weight)
    strided = torch.randn(5, 128).to(BF16)[:, ::2]
    y = linear(strided)
    assert torch.equal(y, linear(strided.contiguous()))
    expected = F.linear(strided.float(), weight.float())
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)
    assert linear(strided[:0]).shape == (0, 40)
    assert linear(strided.view(5, 1, 64)).shape == (5, 1, 40)


@pytest.mark.usefixtures("tiles")
def test_running_out_of_memory_leaves_the_operators_usable() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "out of memory" in done.stdout
    assert done.stdout.splitlines()[-1] == "True"


@pytest.mark.parametrize("starts", [[0, 2, 4], [0, 2, 6], [1, 2, 5], [-1, 2, 5]])
def test_sequences_that_do_not_have_these_rows_are_refused(
    kernels: CpuKernels, starts: list[int]
) -> None:
    batch = ragged_batch([2, 3], [7, 9], block_size=64)
    wrong = replace(batch, query_starts=torch.tensor(starts, dtype=torch.int32))
    cache = cache_of(kernels, HEADS, DIM)
    queries = torch.randn(5, HEADS, DIM).to(BF16)
    with pytest.raises(RuntimeError, match="bad sequence lengths"):
        kernels.attend(queries, wrong, cache, scale=1.0)
    residual = torch.randn(5, HIDDEN).to(BF16)
    with pytest.raises(RuntimeError, match="bad sequence lengths"):
        kernels.attention(attention_of())(None, residual, wrong, cache)


def test_blocks_out_of_range_are_refused_before_anything_is_computed(kernels: CpuKernels) -> None:
    batch = ragged_batch([5], [300], block_size=64)
    cache = cache_of(kernels, HEADS, DIM)
    residual = torch.randn(5, HIDDEN).to(BF16)
    before = residual.clone()

    def attend(some: RaggedBatch) -> None:
        kernels.attention(attention_of())(None, residual, some, cache)

    for at in (0, 4):
        for bad in (8, -1):
            tables = batch.block_tables.clone()
            tables[0, at] = bad
            with pytest.raises(RuntimeError, match="block out of range"):
                attend(replace(batch, block_tables=tables))
    assert torch.equal(residual, before)
    assert not cache.keys.any()
    attend(batch)


@pytest.mark.usefixtures("tiles")
def test_a_step_that_layers_refuse_changes_nothing(kernels: CpuKernels) -> None:
    batch = ragged_batch([5], [300], block_size=64)
    caches = [cache_of(kernels, HEADS, DIM) for _ in range(2)]
    layers = kernels.layers(
        [Layer(kernels.attention(attention_of()), kernels.mlp(mlp_of()))] * 2, None
    )
    residual = torch.randn(5, HIDDEN).to(BF16)
    before = residual.clone()
    tables, places = batch.block_tables.clone(), batch.cache_rows.clone()
    tables[0, 4], places[4] = 8, 8 * 64
    for wrong, match in (
        (replace(batch, block_tables=tables), "block out of range"),
        (replace(batch, cache_rows=places), "cache row out of range"),
        (replace(batch, positions=batch.positions - 300), "position out of range"),
    ):
        with pytest.raises(RuntimeError, match=match):
            layers(residual, wrong, caches)
    smaller = cache_of(kernels, HEADS, DIM, num_blocks=7)
    with pytest.raises(RuntimeError, match="caches differ in size"):
        layers(residual, batch, [caches[0], smaller])
    assert torch.equal(residual, before)
    assert not any(each.any() for cache in caches for each in (cache.keys, cache.values))
    layers(residual, batch, caches)


@pytest.mark.parametrize("length", [1, 63, 65])
@pytest.mark.usefixtures("tiles")
def test_biases_and_norms_of_another_size_are_refused(kernels: CpuKernels, length: int) -> None:
    batch, wrong = ragged_batch([5], [5], block_size=64), torch.ones(length, dtype=BF16)
    cache, x = cache_of(kernels, HEADS, DIM), torch.randn(5, HIDDEN).to(BF16)
    qkv, out = attention_of().qkv.weight, attention_of().out.weight
    gate_up, down = mlp_of().gate_up.weight, mlp_of().down.weight
    wrong_norm = NormWeights(weight=wrong, eps=1e-5)
    for weights in (
        attention_of(qkv=LinearWeights(qkv, wrong)),
        attention_of(out=LinearWeights(out, wrong)),
        attention_of(head_norms=HeadNorms(query=wrong_norm, key=ones(DIM))),
        attention_of(head_norms=HeadNorms(query=ones(DIM), key=wrong_norm)),
    ):
        with pytest.raises(RuntimeError, match="Expected"):
            kernels.attention(weights)(None, x.clone(), batch, cache)
    for each in (
        mlp_of(gate_up=LinearWeights(gate_up, wrong)),
        mlp_of(down=LinearWeights(down, wrong)),
    ):
        with pytest.raises(RuntimeError, match="Expected"):
            kernels.mlp(each)(x.clone(), x.clone())
