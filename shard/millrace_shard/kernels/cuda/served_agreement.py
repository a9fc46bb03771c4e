"""The agreement check on the shapes that a model is served with, for kernels that are compiled for each shape.

It includes contexts past position 8192, where spans of keys grow, and more sequences than the kernels look at in one
read, and the formats of codes of its linears. In deterministic mode a row must have the same bits alone, in company, in
a chunk and in a prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from millrace_shard.kernels.agreement import (
    CPU,
    EPS,
    HEAD_OUTPUTS,
    Random,
    distance,
    filled_cache,
    largest_difference,
    ragged_batch,
    rope_table,
)
from millrace_shard.kernels.base import Experts, Kernels, Linear
from millrace_shard.kernels.cuda import sampling_agreement
from millrace_shard.kernels.cuda.linear_tilings import EXPERT_ROWS, PROMPT_ROWS
from millrace_shard.kernels.expert_weights import RoutingRule, Scoring
from millrace_shard.kernels.experts_agreement import experts_weights
from millrace_shard.kernels.layer_shape import AttentionKind, LayerShape
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.quantized import CodeFormat
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.stored_weight import StoredWeight

PROMPT = 70
CHUNK = 9
LONG_CONTEXT = 8192 + 190
LONG = ((PROMPT, 1, CHUNK), (300, LONG_CONTEXT - 100, LONG_CONTEXT))
"""Queries and contexts of the sequences of a step; windows of 1024, 2048 and 4096 begin within a span."""
MANY = (
    tuple(5 if b % 26 == 25 else 1 for b in range(130)),
    tuple(20 + b % 40 for b in range(130)),
)
NUM_OTHERS = 40
ROWS = (1, CHUNK, NUM_OTHERS + 1, PROMPT)
PROMPTS = ((130, 1, PROMPT), (190, 300, PROMPT))
"""About as many keys as queries, for which fast mode may take an operator of torch."""
BLOCK = 128
"""Outputs, and inputs, that have one scale in formats of e4m3."""
MANY_ROWS = 300
"""More than a GPU's libraries and our linears treat as few."""


def served_difference(
    kernels: Kernels,
    oracle: Kernels,
    *,
    dtype: torch.dtype,
    shape: LayerShape,
    device: torch.device = CPU,
) -> float:
    """The greatest difference of any output of `kernels` from `oracle`; see `distance`."""
    differences = [largest_difference(kernels, oracle, dtype=dtype, shape=shape, device=device)]
    for num_queries, contexts in (LONG, MANY):
        ours, theirs = (
            _attended(each, Random(dtype, device), shape, num_queries, contexts)
            for each in (kernels, oracle)
        )
        differences.append(distance(ours, theirs))
    differences.append(_products_difference(kernels, oracle, Random(dtype, device), shape, 1))
    for sizes, format_ in itertools.product(shape.experts, shape.expert_formats):
        x = Random(dtype, device)(CHUNK, sizes[0])
        ours, theirs = (
            [_experts(each, Random(dtype, device), sizes, format_)(x)] for each in (kernels, oracle)
        )
        differences.append(distance(ours, theirs))
    # Deterministic mode compares the bits of few rows and of many.
    if not kernels.deterministic:
        of_prompts = prompt_difference(kernels, oracle, dtype=dtype, shape=shape, device=device)
        differences.append(of_prompts)
    if kernels.sampling is not None:
        vocab_size = sampling_agreement.UNEVEN_VOCAB if shape.head is None else shape.head[0]
        pairs = sampling_agreement.outputs(kernels.sampling, vocab_size, device)
        differences.append(distance(*zip(*pairs, strict=True)))
    return max(differences)


def prompt_difference(
    kernels: Kernels,
    oracle: Kernels,
    *,
    dtype: torch.dtype,
    shape: LayerShape,
    device: torch.device = CPU,
) -> float:
    """As `served_difference`, of prompts without a long prefix, and of many rows with codes and with experts."""
    random = partial(Random, dtype, device)
    ours, theirs = (_attended(each, random(), shape, *PROMPTS) for each in (kernels, oracle))
    differences = [
        distance(ours, theirs),
        _products_difference(kernels, oracle, random(), shape, MANY_ROWS),
    ]
    # So many rows over codes would take minutes without a GPU. Half of the experts have each row.
    formats = (None, *shape.expert_formats) if device.type == "cuda" else (None,)
    for sizes, format_ in itertools.product(shape.experts, formats):
        x = random()(2 * EXPERT_ROWS if format_ else MANY_ROWS, sizes[0])
        results = [_experts(each, random(), sizes, format_)(x) for each in (kernels, oracle)]
        differences.append(distance(results[:1], results[1:]))
    return max(differences)


def _products_difference(
    kernels: Kernels, oracle: Kernels, random: Random, shape: LayerShape, num_rows: int
) -> float:
    """The greatest difference of linears over codes."""
    greatest = 0.0
    for (outputs, inputs), format_ in _products(shape):
        weight = _coded(format_, outputs, inputs, random.dtype, random.device)
        x = random(num_rows, inputs)
        if format_.e4m3_inputs:
            x = _in_e4m3(x)
        ours, theirs = ([each.linear_from(weight)(x)] for each in (kernels, oracle))
        greatest = max(greatest, distance(ours, theirs))
    return greatest


def differing_bits(
    kernels: Kernels, *, dtype: torch.dtype, shape: LayerShape, device: torch.device = CPU
) -> str | None:
    """The first operator found whose bits in a row depend on the rest of the step; None if there is none."""
    random = Random(dtype, device)
    for kind in shape.kinds:
        for context in (PROMPT, LONG_CONTEXT):
            way = _SequenceInSteps(kernels, random, shape, context).differing_step(kind)
            if way is not None:
                return f"attention with window {kind[0]} and context {context}, {way}"
    differing = _differing_linear(kernels, random, shape)
    if differing is not None:
        return differing
    for name, operator, inputs in _row_operators(kernels, random, shape):
        if not _is_invariant(operator, random(MANY_ROWS, inputs)):
            return name
    return None


def _row_operators(
    kernels: Kernels, random: Random, shape: LayerShape
) -> Iterator[tuple[str, Callable[[Tensor], Tensor], int]]:
    """The operators over rows, with their names and the widths of their rows."""
    for sizes, format_ in itertools.product(shape.experts, (None, *shape.expert_formats)):
        hidden, inter, _ = sizes
        name = f"experts of {hidden} and {inter} channels" + (" over codes" if format_ else "")
        yield name, _experts(kernels, random, sizes, format_), hidden
    if shape.latent_dim is not None:
        inputs = shape.num_heads * shape.latent_dim
        yield "linears of heads", _heads_linear(kernels, random, shape), inputs
    inputs = 2 * shape.num_heads * (HEAD_OUTPUTS if shape.latent_dim else shape.head_dim)
    scales = random(inputs)
    yield "the norm", lambda x: kernels.rms_norm(x, scales, EPS), inputs
    yield "the activation", kernels.silu_mul, inputs


def _heads_linear(
    kernels: Kernels, random: Random, shape: LayerShape
) -> Callable[[Tensor], Tensor]:
    """A linear of each head over its sums of latents: [T, num_heads * latent_dim] to [T, num_heads * HEAD_OUTPUTS]."""
    assert shape.latent_dim is not None
    weight = random(shape.num_heads, HEAD_OUTPUTS, shape.latent_dim) / shape.latent_dim**0.5
    linear = kernels.heads_linear(weight)

    def run(x: Tensor) -> Tensor:
        out = x.new_empty(len(x), shape.num_heads, HEAD_OUTPUTS)
        linear(x.view(len(x), shape.num_heads, -1), out)
        return out.flatten(1)

    return run


def _experts(
    kernels: Kernels, random: Random, sizes: tuple[int, int, int], format_: CodeFormat | None
) -> Experts:
    """Experts of hidden and intermediate channels, of which a token has some, over codes if there is a format."""
    hidden, inter, top_k = sizes
    rule = RoutingRule(top_k=top_k, scoring=Scoring.SOFTMAX)
    weights = experts_weights(
        random,
        random.dtype,
        rule,
        hidden=hidden,
        inter=inter,
        num_experts=2 * top_k,
        formats=(format_, format_),
    )
    return kernels.experts(weights)


def _attended(
    kernels: Kernels,
    random: Random,
    shape: LayerShape,
    num_queries: Sequence[int],
    contexts: Sequence[int],
) -> list[Tensor]:
    """Every kind of attention over one step."""
    cache = filled_cache(kernels, random, shape, contexts)
    batch = ragged_batch(num_queries, contexts, block_size=kernels.block_size, device=random.device)
    queries = random(sum(num_queries), shape.num_heads, shape.head_dim)
    scale = shape.head_dim**-0.5
    return [
        kernels.attend(queries, batch, cache, scale=scale, window=window, softcap=softcap)
        for window, softcap in shape.kinds
    ]


class _SequenceInSteps:
    """The last token of one sequence, computed in steps of several kinds together with shorter sequences."""

    def __init__(self, kernels: Kernels, random: Random, shape: LayerShape, context: int) -> None:
        self._kernels, self._shape, self._device = kernels, shape, random.device
        self._contexts = (*range(1, 7 * NUM_OTHERS, 7), context)
        self._cache = filled_cache(kernels, random, shape, self._contexts)
        self._rope = rope_table(shape.head_dim, max(self._contexts)).to(self._device)
        num_kinds = 2 if shape.latent_dim is None else 1
        width = (shape.num_heads + num_kinds * shape.num_kv_heads) * shape.head_dim
        self._others, self._own = random(NUM_OTHERS, width), random(PROMPT, width)
        self._sinks = random(shape.num_heads).float() if shape.has_sinks else None

    def differing_step(self, kind: AttentionKind) -> str | None:
        """The kind of step in which the token has other bits than alone."""
        # The prompt is first: it stores the keys and values that later steps see.
        prompt = self._last_row(kind, PROMPT, in_company=False)
        alone = self._last_row(kind, 1, in_company=False)
        for name, row in self._further_steps(kind):
            if not torch.equal(row, alone):
                return name
        return None if torch.equal(prompt, alone) else "in a prompt"

    def _further_steps(self, kind: AttentionKind) -> Iterator[tuple[str, Tensor]]:
        yield "in company", self._last_row(kind, 1, in_company=True)
        yield "in a chunk", self._last_row(kind, CHUNK, in_company=False)
        yield "in a chunk in company", self._last_row(kind, CHUNK, in_company=True)

    def _last_row(self, kind: AttentionKind, num_queries: int, *, in_company: bool) -> Tensor:
        """The attention of the last of `num_queries` tokens, which are rotated and stored in the same step."""
        others = NUM_OTHERS if in_company else 0
        batch = ragged_batch(
            (*(1,) * others, num_queries),
            self._contexts[NUM_OTHERS - others :],
            block_size=self._kernels.block_size,
            device=self._device,
            tables_of=self._contexts,
        )
        rows = torch.cat((self._others[:others], self._own[-num_queries:]))
        queries = self._stored(rows, batch)
        window, softcap = kind
        scale = self._shape.head_dim**-0.5
        attended = self._kernels.attend(
            queries,
            batch,
            self._cache,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=self._sinks,
        )
        return attended[-1]

    def _stored(self, rows: Tensor, batch: RaggedBatch) -> Tensor:
        """The queries [T, num_heads, head_dim] of `rows`, whose keys and values are stored."""
        kernels, shape = self._kernels, self._shape
        if shape.latent_dim is not None:
            heads = rows.view(len(rows), shape.num_heads + 1, shape.head_dim)
            kernels.store(heads[:, -1:], heads[:, -1:], batch, self._cache)
            return heads[:, :-1]
        return kernels.rope_store(
            rows,
            self._rope,
            batch,
            self._cache,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
        )


def _random_linear(
    build: Callable[[Tensor], Linear],
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """A linear with a weight that is made on the device, since a head's weight is large."""
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(outputs, inputs, dtype=dtype, device=device, generator=generator)
    return build(weight / inputs**0.5)


def _differing_linear(kernels: Kernels, random: Random, shape: LayerShape) -> str | None:
    sizes: list[tuple[tuple[int, int], Callable[[Tensor], Linear]]]
    sizes = [(size, kernels.linear) for size in dict.fromkeys(shape.linears)]
    if shape.head is not None:
        sizes.append((shape.head, kernels.head))
    for (outputs, inputs), build in sizes:
        linear = _random_linear(build, outputs, inputs, random.dtype, random.device)
        # Heads have rows of no long prompt, and their results would take much memory.
        count = MANY_ROWS if build == kernels.head else PROMPT_ROWS
        if not _is_invariant(linear, random(count, inputs)):
            return f"a linear of {inputs} inputs and {outputs} outputs"
    for (outputs, inputs), format_ in _products(shape):
        linear = kernels.linear_from(_coded(format_, outputs, inputs, random.dtype, random.device))
        if not _is_invariant(linear, random(MANY_ROWS, inputs)):
            return f"a linear over codes of {inputs} inputs and {outputs} outputs"
    return None


def _products(shape: LayerShape) -> Iterator[tuple[tuple[int, int], CodeFormat]]:
    """Outputs and inputs of linears, each with each format of codes."""
    sizes = dict.fromkeys(shape.linears if shape.head is None else (*shape.linears, shape.head))
    return itertools.product(sizes, shape.formats)


def _coded(
    format_: CodeFormat, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> LinearWeights:
    """A weight of random codes, made on the device."""
    part = format_.random(outputs, inputs, device)
    if format_.e4m3_inputs:
        # A block has one scale.
        of_block = torch.arange(outputs, device=device) // BLOCK * BLOCK
        part = replace(part, scales=part.scales[of_block])
    return LinearWeights(StoredWeight((part,), dtype, device))


def _in_e4m3(x: Tensor) -> Tensor:
    """`x` [T, in] rounded to numbers that stay as they are when rows, or blocks of them, become codes of e4m3."""
    largest, scale = 448.0, 1 / 64
    rounded = (x.float() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn).float() * scale
    rounded[:, ::BLOCK] = largest * scale
    return rounded.to(x.dtype)


def _is_invariant(operator: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether the last rows of `x` have the same bits with fewer rows before them."""
    whole, counts = operator(x), [rows for rows in (*ROWS, MANY_ROWS) if rows < len(x)]
    return all(torch.equal(operator(x[-rows:]), whole[-rows:]) for rows in counts)
