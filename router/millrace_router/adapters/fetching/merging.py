"""Makes one adapter of several, as PEFT's `add_weighted_adapter` defines it, in float32.

A module that only some of the adapters have is made of those. All strategies but `cat` need equal ranks in each module,
and adapters without biases, for which PEFT defines no merge.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace_router.adapters.fetching.canonical import LoraModule, check_finite
from millrace_router.adapters.fetching.errors import Invalid
from millrace_router.adapters.fetching.tensors import (
    Float32,
    Tensor,
    bytes_of,
    from_float32,
    to_float32,
)
from millrace_router.errors import quoted
from millrace_router.request.adapter import MergeRecipe, MergeStrategy, SignMethod

MAX_MERGED_RANK = 1 << 16


@dataclass(frozen=True, slots=True)
class _Part:
    """A module of one of the adapters."""

    position: int
    weight: float
    module: LoraModule


def merge(
    adapters: Sequence[Sequence[LoraModule]], digests: Sequence[str], recipe: MergeRecipe
) -> list[LoraModule]:
    """Merge `adapters`, whose versions are `digests`, in the recipe's order.

    Raises:
        Invalid: ranks differ, there are biases, or values overflow.

    """
    parts: dict[str, list[_Part]] = {}
    for position, (modules, weight) in enumerate(zip(adapters, recipe.weights, strict=True)):
        for module in modules:
            parts.setdefault(module.name, []).append(_Part(position, weight, module))
    with np.errstate(over="ignore", invalid="ignore"):
        if recipe.strategy is MergeStrategy.CAT:
            merged = [_concatenated(module_parts) for module_parts in parts.values()]
        else:
            merged = [_combined(module_parts, digests, recipe) for module_parts in parts.values()]
    for module in merged:
        check_finite(f"{module.name}.lora_A", module.a)
        check_finite(f"{module.name}.lora_B", module.b)
        check_finite(f"{module.name}.scales", from_float32(module.scales))
        if module.bias is not None:
            check_finite(f"{module.name}.bias", from_float32(module.bias))
    return merged


def _concatenated(parts: Sequence[_Part]) -> LoraModule:
    """Exactly Σ wᵢ ΔWᵢ: the ranks of all, each with its own factor."""
    modules = [part.module for part in parts]
    scales = [part.module.scales * np.float32(part.weight) for part in parts]
    biases = [
        part.module.bias * np.float32(part.weight) for part in parts if part.module.bias is not None
    ]
    rank = sum(module.rank for module in modules)
    if rank > MAX_MERGED_RANK:
        raise Invalid(f"the module {modules[0].name} would have the rank {rank}")
    return LoraModule(
        name=modules[0].name,
        a=_joined([module.a for module in modules], axis=0),
        b=_joined([module.b for module in modules], axis=1),
        scales=np.concatenate(scales),
        bias=np.asarray(sum(biases[1:], biases[0])) if biases else None,
    )


def _joined(tensors: Sequence[Tensor], *, axis: int) -> Tensor:
    """Concatenate tensors: bit for bit if all have one dtype, else in float32."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        return from_float32(np.concatenate([to_float32(tensor) for tensor in tensors], axis))
    dtype = dtypes.pop()
    bits = [
        np.frombuffer(tensor.data, "<u4" if dtype == "F32" else "<u2").reshape(tensor.shape)
        for tensor in tensors
    ]
    whole = np.ascontiguousarray(np.concatenate(bits, axis))
    return Tensor(dtype, whole.shape, bytes_of(whole))


def _combined(parts: Sequence[_Part], digests: Sequence[str], recipe: MergeRecipe) -> LoraModule:
    """Return a from the Aᵢ and B from the Bᵢ; the square root of |wᵢ sᵢ| weighs both, and its sign only A."""
    first = parts[0].module
    for part in parts:
        if part.module.rank != first.rank:
            raise Invalid(
                f"{recipe.strategy} needs equal ranks, and the module {quoted(first.name)} has the ranks"
                f" {first.rank} and {part.module.rank}"
            )
        if part.module.bias is not None:
            raise Invalid(f"{recipe.strategy} is not defined for the bias of {quoted(first.name)}")
    products = [part.weight * float(part.module.scales[0]) for part in parts]
    roots = [abs(product) ** 0.5 for product in products]
    signed = [
        root if product >= 0 else -root for root, product in zip(roots, products, strict=True)
    ]

    def combine(read: Callable[[LoraModule], Tensor], end: str, weights: Sequence[float]) -> Tensor:
        tensors = [to_float32(read(part.module)) for part in parts]
        keys = [mask_key(digests, part.position, f"{first.name}.{end}") for part in parts]
        return from_float32(_combine(tensors, keys, weights, recipe))

    return LoraModule(
        name=first.name,
        a=combine(lambda module: module.a, "lora_A", signed),
        b=combine(lambda module: module.b, "lora_B", roots),
        scales=np.ones(first.rank, dtype=np.float32),
    )


def _combine(
    tensors: list[Float32], keys: Sequence[int], weights: Sequence[float], recipe: MergeRecipe
) -> Float32:
    strategy, density = recipe.strategy, recipe.density
    if strategy is MergeStrategy.TIES:
        tensors = [_largest(tensor, density) for tensor in tensors]
    elif strategy in (MergeStrategy.DARE_LINEAR, MergeStrategy.DARE_TIES):
        tensors = [_thinned(one, key, density) for one, key in zip(tensors, keys, strict=True)]
    factors = [np.float32(weight) for weight in weights]
    if strategy in (MergeStrategy.LINEAR, MergeStrategy.DARE_LINEAR):
        return _total([one * factor for one, factor in zip(tensors, factors, strict=True)])
    signs = [np.sign(tensor) for tensor in tensors]
    votes = tensors if recipe.majority_sign_method is SignMethod.TOTAL else signs
    majority = np.where(_total(votes) >= 0, np.float32(1), np.float32(-1))
    agree = [(sign == majority).astype(np.float32) for sign in signs]
    chosen = [
        one * factor * mask for one, factor, mask in zip(tensors, factors, agree, strict=True)
    ]
    counts = np.maximum(_total(agree), np.float32(1))
    return np.divide(_total(chosen), counts, dtype=np.float32)


def _total(tensors: Sequence[Float32]) -> Float32:
    """Return the sum of the tensors, added in their order."""
    total = tensors[0].copy()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _largest(tensor: Float32, density: float) -> Float32:
    """Keep the int(density · n) values of the largest magnitude, of equal ones the first, and zeros elsewhere."""
    if density >= 1:
        return tensor
    values = tensor.reshape(-1)
    count = int(density * values.size)
    result = np.zeros_like(values)
    if count:
        magnitudes = np.abs(values)
        least = np.partition(magnitudes, values.size - count)[values.size - count]
        above = np.flatnonzero(magnitudes > least)
        equal = np.flatnonzero(magnitudes == least)[: count - above.size]
        indices = np.concatenate([above, equal])
        result[indices] = values[indices]
    return result.reshape(tensor.shape)


def _thinned(tensor: Float32, key: int, density: float) -> Float32:
    """Keep each value with probability `density`, and divide those that are kept by `density`."""
    if density >= 1:
        return tensor
    mask = kept(key, tensor.size, density).reshape(tensor.shape)
    return tensor * mask / np.float32(density)


_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_MANTISSA_BITS = 53


def mask_key(digests: Sequence[str], position: int, tensor: str) -> int:
    """Return the seed of one tensor of the adapter at `position` among those with `digests`."""
    text = json.dumps([*digests, position, tensor]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def kept(key: int, count: int, density: float) -> npt.NDArray[np.bool_]:
    """[count]: whether the value at each index is kept, with probability `density`; each depends only on its index."""
    with np.errstate(over="ignore"):
        state = np.uint64(key) + _STEP * np.arange(1, count + 1, dtype=np.uint64)
        state = (state ^ (state >> np.uint64(30))) * _FACTORS[0]
        state = (state ^ (state >> np.uint64(27))) * _FACTORS[1]
        state ^= state >> np.uint64(31)
    uniform = (state >> np.uint64(64 - _MANTISSA_BITS)).astype(np.float64) * 2.0**-_MANTISSA_BITS
    return np.asarray(uniform < density)
