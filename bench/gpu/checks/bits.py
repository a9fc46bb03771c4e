"""Bits in deterministic mode: a row alone, in company, as the end of a prompt and of a chunk must be the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bench.gpu.checks.agreement import name_of
from bench.gpu.engine.kernels import cuda_kernels
from bench.gpu.engine.parts import CODED, WINDOW
from bench.gpu.figures import check
from bench.gpu.setting import Emit, Setting
from millrace_shard.kernels.agreement import SCALES, ragged_batch
from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.kv_cache import cache_dtype_name
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.quantized import CodeFormat, QuantizedTensor
from millrace_shard.kernels.stored_weight import StoredWeight

CHUNK = 9
"""Queries of a chunk; no multiple of a tile."""
SECONDS = 3.0
"""Time for one case, with the compilation of its kernels."""
HIDDEN = 256
COMPANY_ROWS = (2, 63, 64, 300)
Differing = Callable[[], list[str]]
"""Lists the arrangements in which a row has other bits."""


@dataclass(frozen=True, slots=True)
class Case:
    """The shape of attention."""

    dtype: torch.dtype
    head_dim: int
    group: int
    context: int
    latent_dim: int | None = None
    """The channels of keys that are the values, too."""
    window: int | None = None
    cache_dtype: torch.dtype | None = None
    """None: the model's."""

    @property
    def num_kv_heads(self) -> int:
        """Latents are the same for all heads."""
        return 2 if self.latent_dim is None else 1

    def text(self) -> str:
        """One phrase."""
        latents = "" if self.latent_dim is None else f", latents of {self.latent_dim}"
        window = "" if self.window is None else f", window {self.window}"
        codes = "" if self.cache_dtype is None else f", {cache_dtype_name(self.cache_dtype)}"
        return f"{self.head_dim} x {self.group} at {self.context}{latents}{window}{codes}"


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's queries [length, H, D], keys and values [length, K, D]."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def random(cls, case: Case, length: int, seed: int, device: torch.device) -> Row:
        """The same numbers for the same arguments on every device."""
        generator = torch.Generator().manual_seed(seed)

        def random(heads: int) -> Tensor:
            made = torch.randn(length, heads, case.head_dim, generator=generator)
            return made.to(device, case.dtype)

        num_kv_heads = case.num_kv_heads
        return cls(random(case.group * num_kv_heads), random(num_kv_heads), random(num_kv_heads))

    @property
    def length(self) -> int:
        """Number of positions."""
        return len(self.keys)


@torch.inference_mode()
def run(setting: Setting, emit: Emit) -> None:
    """Emit, for each dtype, how many cases differ so far; the cases that models use most come first."""
    kernels = cuda_kernels(deterministic=True)
    for dtype in setting.scale.checked_dtypes:
        emit(
            check(
                f"bits of linears and norms, {name_of(dtype)}",
                len(differing_operators(kernels, dtype, setting.device)),
                "operators differ",
            )
        )
    name = f"bits of other parts, {name_of(setting.scale.parts.dtype)}"
    _run_some(name, parts(kernels, setting), setting, emit)
    for dtype in setting.scale.checked_dtypes:
        attention = {
            case.text(): partial(differing_arrangements, kernels, case, setting)
            for case in _cases(setting, dtype)
        }
        _run_some(f"bits of attention, {name_of(dtype)}", attention, setting, emit)


def _run_some(name: str, cases: Mapping[str, Differing], setting: Setting, emit: Emit) -> None:
    """Emit how many of the cases that fit into the time differ; one is run in any case."""
    found: dict[str, str] = {}
    for text, case in cases.items():
        if found and not setting.has_time_for(SECONDS):
            break
        found[text] = ", ".join(case())
        wrong = {each: arrangements for each, arrangements in found.items() if arrangements}
        detail = {"checked": f"{len(found)} of {len(cases)}", "differing": wrong}
        emit(check(name, len(wrong), "cases differ", detail))


def cases(setting: Setting) -> Iterator[Callable[[], object]]:
    """A call for each dtype's operators, for each other part and case of attention, in the order of `run`."""
    kernels, dtypes = cuda_kernels(deterministic=True), setting.scale.checked_dtypes
    for dtype in dtypes:
        yield partial(differing_operators, kernels, dtype, setting.device)
    yield from parts(kernels, setting).values()
    for dtype in dtypes:
        for case in _cases(setting, dtype):
            yield partial(differing_arrangements, kernels, case, setting)


@torch.inference_mode()
def differing_arrangements(kernels: Kernels, case: Case, setting: Setting) -> list[str]:
    """Names of the arrangements in which the last row of a sequence has other bits than alone."""
    device = setting.device
    row = Row.random(case, case.context, 0, device)
    others = [
        Row.random(case, 1 + 37 * number % case.context, number, device)
        for number in range(1, setting.scale.company + 1)
    ]
    half = len(others) // 2
    company = [*others[:half], row, *others[half:]]
    alone = attended(kernels, case, [row], [1], 0)
    arrangements = {
        "in company": (company, [1] * len(company), half),
        "in a prompt": ([row], [row.length], 0),
        "in a chunk": ([row], [CHUNK], 0),
        "in a chunk in company": (
            company,
            [CHUNK if each is row else 1 for each in company],
            half,
        ),
    }
    return [
        name
        for name, (rows, counts, place) in arrangements.items()
        if not torch.equal(attended(kernels, case, rows, counts, place), alone)
    ]


def attended(
    kernels: Kernels, case: Case, rows: Sequence[Row], num_queries: Sequence[int], place: int
) -> Tensor:
    """The output [H * D] of the last query of sequence `place`, when each has its last `num_queries` in the step.

    Over latents it is [H * latent_dim].
    """
    lengths = [row.length for row in rows]
    device, size = rows[0].keys.device, kernels.block_size
    whole = ragged_batch(lengths, lengths, block_size=size, device=device)
    blocks = whole.block_tables.flatten().long()
    _, num_heads, head_dim = rows[0].keys.shape
    cache = kernels.new_cache(
        num_blocks=int(blocks.max()) + 1,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        dtype=case.cache_dtype or case.dtype,
        device=device,
        scales=SCALES,
        latent_dim=case.latent_dim,
    )
    kernels.zero_blocks(cache, blocks)
    kernels.store(
        torch.cat([row.keys for row in rows]), torch.cat([row.values for row in rows]), whole, cache
    )
    batch = ragged_batch(num_queries, lengths, block_size=size, device=device)
    queries = [row.queries[-count:] for row, count in zip(rows, num_queries, strict=True)]
    scale = head_dim**-0.5
    out = kernels.attend(torch.cat(queries), batch, cache, scale=scale, window=case.window)
    return out[sum(num_queries[: place + 1]) - 1]


@torch.inference_mode()
def differing_operators(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Names of operators whose first row has other bits among more rows than alone."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, norm = random(max(COMPANY_ROWS), 2 * HIDDEN), random(2 * HIDDEN)
    linear = kernels.linear(random(HIDDEN, 2 * HIDDEN) / HIDDEN**0.5)
    head = kernels.head(random(HIDDEN, 2 * HIDDEN) / HIDDEN**0.5)
    coded = kernels.linear_from(LinearWeights(StoredWeight((_codes(device),), dtype, device)))
    operators: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": linear,
        "linear over codes": coded,
        "head": head,
        "norm": lambda rows: kernels.rms_norm(rows, norm, 1e-5),
        "activation": kernels.silu_mul,
    }
    return [
        name
        for name, operator in operators.items()
        if any(not torch.equal(operator(x[:rows])[:1], operator(x[:1])) for rows in COMPANY_ROWS)
    ]


def _codes(device: torch.device) -> QuantizedTensor:
    """A weight of 4 bits with zero points."""
    found = CodeFormat(values=tuple(range(16)), group_size=128, has_offsets=True)
    return found.random(HIDDEN, 2 * HIDDEN, device)


def parts(kernels: Kernels, setting: Setting) -> dict[str, Differing]:
    """Return checks of the kernels that other models than Llamas use, by name."""
    scale, sizes = setting.scale, setting.scale.parts
    dtype, (heads, latent, rotated) = sizes.dtype, sizes.latents
    group, found = scale.checked_groups[0], dict[str, Differing]()
    for context in scale.contexts:
        usual = Case(dtype, sizes.head_dim, group, context)
        for case in (
            Case(dtype, latent + rotated, heads, context, latent_dim=latent),
            *(replace(usual, cache_dtype=each) for each in CODED),
            replace(usual, window=WINDOW),
        ):
            found[case.text()] = partial(differing_arrangements, kernels, case, setting)
    return found | dict(sizes.differing(kernels, setting.device))


def _cases(setting: Setting, dtype: torch.dtype) -> Iterator[Case]:
    scale = setting.scale
    for head_dim, group, context in itertools.product(
        scale.checked_head_dims, scale.checked_groups, scale.contexts
    ):
        yield Case(dtype, head_dim, group, context)
