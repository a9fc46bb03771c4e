"""The plain kernels against formulas written down one row at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from millrace_shard.kernels import plain_attention, scores
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.build import BuildError, load_operators
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.kernels.ragged import RaggedBatch

CPU = torch.device("cpu")
MODES = [False, True]


@dataclass
class Case:
    """Sequences with all their keys and values in a paged cache whose other positions are NaN."""

    kernels: PlainKernels
    cache: LayerCache
    tables: Tensor
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]

    def batch(self, rows: list[tuple[int, int, int]]) -> tuple[RaggedBatch, Tensor]:
        """Rows of (sequence, first query, end of queries) and their queries."""
        size = self.kernels.block_size
        positions = [torch.arange(first, end) for _, first, end in rows]
        cache_rows = [
            self.tables[s][p // size].long() * size + p % size
            for (s, _, _), p in zip(rows, positions, strict=True)
        ]
        counts = tuple(end - first for _, first, end in rows)
        ends = [end for _, _, end in rows]
        starts = torch.tensor((0, *counts)).cumsum(0, dtype=torch.int32)
        batch = RaggedBatch(
            ids=torch.zeros(sum(counts), dtype=torch.int64),
            positions=torch.cat(positions),
            cache_rows=torch.cat(cache_rows),
            query_starts=starts,
            context_lengths=torch.tensor(ends, dtype=torch.int32),
            block_tables=self.tables[[s for s, _, _ in rows]],
            logit_rows=starts[1:].long() - 1,
            num_queries=counts,
            num_context=tuple(ends),
        )
        return batch, torch.cat([self.queries[s][first:end] for s, first, end in rows])

    def store(self, sequence: int, start: int, end: int) -> None:
        """Put keys and values of these positions into the cache."""
        batch, _ = self.batch([(sequence, start, end)])
        span = slice(start, end)
        self.kernels.store(
            self.keys[sequence][span], self.values[sequence][span], batch, self.cache
        )


def make_case(
    kernels: PlainKernels,
    lengths: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    stored: bool = True,
) -> Case:
    generator = torch.Generator().manual_seed(0)

    def random(length: int, heads: int) -> Tensor:
        return torch.randn(length, heads, head_dim, generator=generator).to(dtype)

    width = -(-max(lengths) // kernels.block_size)
    num_blocks = 1 + width * len(lengths)
    order = 1 + torch.randperm(num_blocks - 1, generator=generator).to(torch.int32)
    cache = kernels.new_cache(
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=CPU,
    )
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    case = Case(
        kernels=kernels,
        cache=cache,
        tables=order.view(len(lengths), width),
        queries=[random(length, num_heads) for length in lengths],
        keys=[random(length, num_kv_heads) for length in lengths],
        values=[random(length, num_kv_heads) for length in lengths],
    )
    if stored:
        for sequence, length in enumerate(lengths):
            case.store(sequence, 0, length)
    return case


def attention_of_one(
    case: Case,
    sequence: int,
    position: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query's attention, [num_heads * head_dim] float64."""
    first = 0 if window is None else max(0, position - window + 1)
    queries = case.queries[sequence][position].double()
    keys = case.keys[sequence][first : position + 1].double()
    values = case.values[sequence][first : position + 1].double()
    group = queries.shape[0] // keys.shape[1]
    heads = []
    for head, query in enumerate(queries):
        scores = keys[:, head // group] @ query * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1].double()))
        heads.append(scores.softmax(0)[: len(keys)] @ values[:, head // group])
    return torch.cat(heads)


ROWS = [(0, 30, 31), (1, 0, 150), (2, 4, 9), (3, 200, 201), (4, 0, 1), (5, 130, 170)]
LENGTHS = [31, 150, 9, 201, 1, 170]


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 20, 500])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_matches_its_definition(
    deterministic: bool, block_size: int, window: int | None, softcap: float | None
) -> None:
    kernels = PlainKernels(deterministic=deterministic, block_size=block_size)
    case = make_case(kernels, LENGTHS, num_heads=6, num_kv_heads=2)
    batch, queries = case.batch(ROWS)
    out = kernels.attend(queries, batch, case.cache, scale=0.4, window=window, softcap=softcap)
    assert out.shape == (len(queries), 96)
    spans = [(s, p) for s, first, end in ROWS for p in range(first, end)]
    for row, (sequence, position) in list(enumerate(spans))[::7]:
        expected = attention_of_one(
            case, sequence, position, scale=0.4, window=window, softcap=softcap
        )
        torch.testing.assert_close(out[row].double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_sinks_join_the_softmax_and_have_no_values(
    deterministic: bool, window: int | None, softcap: float | None
) -> None:
    kernels = PlainKernels(deterministic=deterministic)
    case = make_case(kernels, LENGTHS, num_heads=6, num_kv_heads=2)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 2.0, 4.0, 30.0])
    batch, queries = case.batch(ROWS)
    rule: dict[str, Any] = {"scale": 0.4, "window": window, "softcap": softcap, "sinks": sinks}
    out = kernels.attend(queries, batch, case.cache, **rule)
    spans = [(s, p) for s, first, end in ROWS for p in range(first, end)]
    for row, (sequence, position) in list(enumerate(spans))[::7]:
        expected = attention_of_one(case, sequence, position, **rule)
        torch.testing.assert_close(out[row].double(), expected, atol=2e-5, rtol=0)
    if deterministic:
        batch, queries = case.batch([(1, 60, 101)])
        assert torch.equal(kernels.attend(queries, batch, case.cache, **rule), out[61:102])


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 8), (4, 4, 20), (9, 3, 64)]
)
def test_attention_of_any_heads_matches_its_definition(
    deterministic: bool, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    kernels = PlainKernels(deterministic=deterministic)
    case = make_case(
        kernels, [33, 20], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    batch, queries = case.batch([(0, 32, 33), (1, 3, 20)])
    out = kernels.attend(queries, batch, case.cache, scale=0.3)
    for row, (sequence, position) in enumerate([(0, 32), *((1, p) for p in range(3, 20))]):
        expected = attention_of_one(case, sequence, position, scale=0.3)
        torch.testing.assert_close(out[row].double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 20, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fixed_attention_gives_the_same_bits_however_a_query_comes(
    dtype: torch.dtype, window: int | None
) -> None:
    kernels = PlainKernels(deterministic=True)
    lengths = [300, 40]
    whole = make_case(kernels, lengths, dtype=dtype)
    batch, queries = whole.batch([(0, 0, 300)])
    expected = kernels.attend(queries, batch, whole.cache, scale=0.3, window=window)
    growing = make_case(kernels, lengths, dtype=dtype, stored=False)
    growing.store(1, 0, 40)
    start = 0
    for step in (1, 127, 1, 1, 50, 1, 119):
        growing.store(0, start, start + step)
        batch, queries = growing.batch([(1, 39, 40), (0, start, start + step), (1, 10, 40)])
        out = kernels.attend(queries, batch, growing.cache, scale=0.3, window=window)
        assert torch.equal(out[1 : 1 + step], expected[start : start + step])
        start += step
    assert start == 300


def test_a_queries_bits_do_not_depend_on_batch_mates_in_a_linear() -> None:
    kernels = PlainKernels(deterministic=True)
    for dtype in (torch.float32, torch.bfloat16):
        weight, bias = torch.randn(70, 96).to(dtype), torch.randn(70).to(dtype)
        linear = kernels.linear(weight, bias)
        x = torch.randn(100, 96).to(dtype)
        expected = linear(x)
        for rows in (slice(0, 1), slice(5, 37), slice(31, 100), slice(3, 3)):
            assert torch.equal(linear(x[rows]), expected[rows])
        torch.testing.assert_close(expected, torch.nn.functional.linear(x, weight, bias))


def test_nan_past_the_end_changes_nothing() -> None:
    """The same case with zeros in place of NaN, where nothing could go wrong."""
    for deterministic in MODES:
        kernels = PlainKernels(deterministic=deterministic)
        case = make_case(kernels, LENGTHS)
        batch, queries = case.batch(ROWS)
        out = kernels.attend(queries, batch, case.cache, scale=0.3, window=30)
        clean = LayerCache(case.cache.keys.nan_to_num(), case.cache.values.nan_to_num())
        assert torch.equal(out, kernels.attend(queries, batch, clean, scale=0.3, window=30))


def test_zero_blocks_clears_only_the_listed_blocks() -> None:
    kernels = PlainKernels(deterministic=False, block_size=4)
    case = make_case(kernels, [16])
    before = case.cache.keys.clone()
    kernels.zero_blocks(case.cache, torch.tensor([2, 4]))
    for pages in (case.cache.keys, case.cache.values):
        assert (pages[[2, 4]] == 0).all()
    assert torch.equal(case.cache.keys[[1, 3]], before[[1, 3]])


def test_rms_norm_casts_before_it_scales() -> None:
    x = torch.randn(5, 3, 40).to(torch.bfloat16) * 9
    weight = torch.randn(40).to(torch.bfloat16)
    wide = x.double()
    normal = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = normal.to(torch.bfloat16) * weight
    out = PlainKernels(deterministic=False).rms_norm(x, weight, 1e-5)
    assert out.dtype == torch.bfloat16
    assert (out != expected).float().mean() < 0.02
    torch.testing.assert_close(out, expected)


def test_add_rms_norm_adds_in_place() -> None:
    kernels = PlainKernels(deterministic=False)
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    total = x + residual
    out = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert torch.equal(out, kernels.rms_norm(total, weight, 1e-6))


def test_silu_mul_takes_the_gate_first() -> None:
    gate_up = torch.randn(3, 10)
    gate, up = gate_up[:, :5].double(), gate_up[:, 5:].double()
    expected = gate / (1 + (-gate).exp()) * up
    out = PlainKernels(deterministic=False).silu_mul(gate_up)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul_of_a_row_does_not_depend_on_where_it_lies(dtype: torch.dtype) -> None:
    """The sizes leave a rest to vector loops, and threads share the rows."""
    kernels = PlainKernels(deterministic=True)
    torch.set_num_threads(3)
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        gate_up = torch.randn(611, 2 * 61, generator=generator).to(dtype) * 3
        expected = kernels.silu_mul(gate_up)
        for rows in (slice(0, 1), slice(600, 611), slice(150, 450), slice(2, 2)):
            assert torch.equal(kernels.silu_mul(gate_up[rows].clone()), expected[rows])


@pytest.mark.parametrize("rotary_dim", [16, 8, 2])
def test_rope_store_rotates_pairs_of_channels(rotary_dim: int) -> None:
    """Channel i pairs with i + rotary_dim / 2; channels past rotary_dim and values are left alone."""
    kernels = PlainKernels(deterministic=False)
    case = make_case(kernels, [40], stored=False)
    batch, _ = case.batch([(0, 13, 40)])
    angles = torch.rand(50, rotary_dim // 2) * 6
    rope = torch.cat((angles.cos(), angles.sin()), dim=1) * 1.25
    qkv = torch.randn(27, 8 * 16)
    original = qkv.clone().view(27, 8, 16)
    queries = kernels.rope_store(qkv, rope, batch, case.cache, num_heads=4, num_kv_heads=2)
    expected = original.clone()
    for row in range(27):
        for i in range(rotary_dim // 2):
            angle = float(angles[13 + row, i])
            cos, sin = 1.25 * math.cos(angle), 1.25 * math.sin(angle)
            a, b = original[row, :6, i], original[row, :6, i + rotary_dim // 2]
            expected[row, :6, i] = a * cos - b * sin
            expected[row, :6, i + rotary_dim // 2] = b * cos + a * sin
    torch.testing.assert_close(queries, expected[:, :4], atol=1e-5, rtol=0)
    stored = case.cache.keys.view(-1, 2, 16)[batch.cache_rows]
    torch.testing.assert_close(stored, expected[:, 4:6], atol=1e-5, rtol=0)
    assert torch.equal(case.cache.values.view(-1, 2, 16)[batch.cache_rows], original[:, 6:])
    assert case.cache.keys.isnan().any(), "nothing but the batch's rows is written"


def test_steps_of_only_prefills_or_only_decodes_attend_exactly() -> None:
    kernels = PlainKernels(deterministic=False)
    case = make_case(kernels, LENGTHS)
    for rows in ([(1, 0, 150)], [(0, 30, 31), (3, 200, 201)]):
        batch, queries = case.batch(rows)
        out = kernels.attend(queries, batch, case.cache, scale=0.3)
        expected = attention_of_one(case, rows[0][0], rows[0][2] - 1, scale=0.3)
        last = rows[0][2] - rows[0][1] - 1
        torch.testing.assert_close(out[last].double(), expected, atol=2e-5, rtol=0)


class LargestResult(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the size of the largest tensor that any operation yields."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation as it is."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize(("window", "bound"), [(None, 1500 * 2 * 16), (40, 8 * 16 * 2 * 16)])
def test_one_long_sequence_does_not_make_the_others_long(
    window: int | None, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a long row by itself is gathered, or as many short ones as the budget holds, whatever their order."""
    lengths = [33, 1500, 7, 40, 1, 1400, 64, 18, 200, 25]
    case = make_case(PlainKernels(deterministic=False), lengths)
    batch, queries = case.batch([(i, n - 1, n) for i, n in enumerate(lengths)])
    monkeypatch.setattr(plain_attention, "SINGLES_ELEMENTS", 8 * 16 * 2 * 16)
    with LargestResult() as largest:
        out = case.kernels.attend(queries, batch, case.cache, scale=0.3, window=window)
    cached = case.cache.keys.numel()
    assert largest.elements <= bound + 4 * 2 * 16 * 16 < cached
    for i, length in enumerate(lengths):
        expected = attention_of_one(case, i, length - 1, scale=0.3, window=window)
        torch.testing.assert_close(out[i].double(), expected, atol=1e-5, rtol=0)


def test_wider_block_tables_than_needed_are_fine() -> None:
    kernels = PlainKernels(deterministic=False)
    case = make_case(kernels, [40, 20])
    batch, queries = case.batch([(0, 39, 40), (1, 5, 20)])
    wider = torch.nn.functional.pad(batch.block_tables, (0, 7))
    out = kernels.attend(queries, batch, case.cache, scale=0.3)
    again = kernels.attend(queries, replace(batch, block_tables=wider), case.cache, scale=0.3)
    assert torch.equal(out, again)


def test_block_sizes_that_do_not_divide_the_key_chunk_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be a power of two up to 128, not 48"):
        PlainKernels(deterministic=True, block_size=48)


Choose = Callable[[Tensor], scores.Best]


@pytest.fixture(params=["compiled", "plain"])
def choose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Choose:
    if request.param == "plain":
        monkeypatch.setattr(scores, "operators_loaded", lambda: False)
    else:
        try:
            load_operators()
        except BuildError as error:
            pytest.skip(str(error))
    return scores.choose_greedy


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 49152])
def test_the_greedy_choice_is_the_maximum_with_its_log_probability(
    choose: Choose, size: int
) -> None:
    logits = torch.randn(7, size, generator=torch.Generator().manual_seed(size)) * 5
    ids, logprobs, failed = choose(logits)
    assert not failed.any()
    assert torch.equal(ids, logits.argmax(-1))
    expected = logits.double().log_softmax(-1).max(-1).values
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_first_of_equal_tokens_is_chosen(choose: Choose) -> None:
    logits = torch.zeros(3, 100)
    logits[1, [40, 99]] = 2.0
    logits[2, [99, 17]] = 3.0
    assert choose(logits)[0].tolist() == [0, 40, 17]


def test_forbidden_tokens_are_never_chosen(choose: Choose) -> None:
    logits = torch.full((1, 40), -math.inf)
    logits[0, 39] = -5.0
    ids, logprobs, _ = choose(logits)
    assert ids.tolist() == [39]
    assert logprobs.tolist() == [0.0]
    assert not logprobs.signbit().any(), (
        "a token that is forced is said to have 0.0, and never -0.0"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 37])
def test_only_the_row_that_is_not_finite_fails(choose: Choose, bad: float, place: int) -> None:
    logits = torch.randn(3, 38)
    expected = choose(logits.clone())
    logits[1, place] = bad
    ids, logprobs, failed = choose(logits)
    assert failed.tolist() == [False, True, False]
    assert not logprobs[1].isfinite()
    assert 0 <= int(ids[1]) < 38
    for row in (0, 2):
        assert ids[row] == expected[0][row]
        assert logprobs[row] == expected[1][row]


def test_rows_have_the_same_bits_in_any_batch(choose: Choose) -> None:
    logits = torch.randn(40, 1003)
    ids, logprobs, _ = choose(logits)
    for row in range(40):
        alone = choose(logits[row : row + 1])
        assert alone[0][0] == ids[row]
        assert alone[1][0] == logprobs[row]


def test_elements_are_scaled_values_with_offsets_in_the_order_of_inputs() -> None:
    generator = torch.Generator().manual_seed(1)
    outputs, inputs, group_size = 5, 22, 8
    groups = 3
    tensor = QuantizedTensor(
        codes=torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8),
        values=torch.randn(16, generator=generator),
        scales=torch.rand(outputs, groups, generator=generator),
        offsets=torch.randn(outputs, groups, generator=generator),
        group_size=group_size,
        input_order=torch.randperm(inputs, generator=generator),
    )
    assert tensor.shape == (outputs, inputs)
    assert tensor.bits == 4
    weight = tensor.dequantized()
    assert tensor.offsets is not None
    assert tensor.input_order is not None
    for row in range(outputs):
        for column in range(inputs):
            group = column // group_size
            value = tensor.values[int(tensor.codes[row, column])]
            expected = tensor.scales[row, group] * value + tensor.offsets[row, group]
            assert weight[row, int(tensor.input_order[column])] == expected
