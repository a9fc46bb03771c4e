"""Arithmetic of the KV capacity: the tokens that fit into the cache, and the longest sequence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

CPU_MEMORY_SHARE = 0.25
CUDA_MEMORY_SHARE = 0.96
"""Share of the free memory after the largest steps; fragments and small buffers need the rest."""


class CapacityError(Exception):
    """The requested limits exceed the memory or the model; the message is for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupRequest:
    """The limits of the router; the shard chooses those that are None."""

    max_batch_prefill_tokens: int
    max_batch_size: int
    max_concurrent_requests: int
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    num_blocks: int | None = field(default=None, compare=False)
    """Blocks of the previous group, which the new group must have too; they do not count in comparisons of requests."""
    max_adapters: int = 0
    """Adapters that may be loaded at a time."""
    adapter_pages: int | None = field(default=None, compare=False)
    """Pages for adapters of the previous group, which the new group must have too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """Bytes for keys and values."""

    bytes: int
    is_budget: bool
    """Whether the cache fills `bytes`, as on a GPU or by the user's setting; else only as far as requests need it."""
    max_bytes: int
    """Bytes without a reserve for other uses."""

    def for_request(self, request: WarmupRequest) -> KVMemory:
        """All bytes if the cache of a previous group must fit again, since measurements vary."""
        return self if request.num_blocks is None else replace(self, bytes=self.max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The cost of a block on this rank, and the number of positions of the model."""

    block_size: int
    bytes_per_token: int
    max_position_embeddings: int

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of a cache for `num_tokens` tokens, with the reserved block."""
        return (-(-num_tokens // self.block_size) + 1) * self.block_size * self.bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The result of the warm-up."""

    num_blocks: int
    """Includes block 0, which no sequence owns."""
    block_size: int
    max_input_tokens: int
    max_total_tokens: int
    kv_bytes_per_token: int
    adapter_pages: int = 0
    """Pages for adapters."""

    @property
    def max_batch_total_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size


def cpu_memory(*, available: int, kv_memory: int | None) -> KVMemory:
    """`--kv-memory`, or a share of the available memory, so that two servers fit on one host."""
    if kv_memory is not None:
        return KVMemory(bytes=kv_memory, is_budget=True, max_bytes=kv_memory)
    share = int(available * CPU_MEMORY_SHARE)
    return KVMemory(bytes=share, is_budget=False, max_bytes=available)


def cuda_memory(*, free: int, total: int, fraction: float, kv_memory: int | None) -> KVMemory:
    """`--kv-memory`, or most of the free memory within `fraction` of the GPU."""
    if kv_memory is not None:
        return KVMemory(bytes=kv_memory, is_budget=True, max_bytes=kv_memory)
    usable = max(0, free - int((1 - fraction) * total))
    return KVMemory(bytes=int(usable * CUDA_MEMORY_SHARE), is_budget=True, max_bytes=usable)


def blocks_in(memory: KVMemory, shape: CacheShape) -> int:
    """Usable blocks, without the reserved one."""
    return max(0, memory.bytes // (shape.bytes_per_token * shape.block_size) - 1)


def plan_capacity(
    request: WarmupRequest, shape: CacheShape, *, fitting_blocks: int, is_budget: bool
) -> Capacity:
    """Limits and cache size for `fitting_blocks` usable blocks, the minimum over all ranks.

    Raises CapacityError if a limit of the user is too large.
    """
    size = shape.block_size
    num_blocks = fitting_blocks
    if request.num_blocks is not None:
        num_blocks = request.num_blocks - 1
    if num_blocks > fitting_blocks:
        raise CapacityError(
            f"Not enough memory for the KV cache of {num_blocks * size} tokens that the previous group had"
        )
    if num_blocks < 1:
        raise CapacityError(
            f"The KV cache needs at least {shape.bytes_for(size)} bytes on each shard, and"
            f" {shape.bytes_for(shape.max_position_embeddings)} for one request of the model's"
            f" {shape.max_position_embeddings} tokens: set --kv-memory, or free memory"
        )
    if request.max_batch_total_tokens is not None:
        num_blocks = min(num_blocks, -(-request.max_batch_total_tokens // size))
    max_total = request.max_total_tokens
    if max_total is None:
        max_total = min(num_blocks * size, shape.max_position_embeddings)
    _check_total(max_total, num_blocks, shape)
    if not is_budget and request.max_batch_total_tokens is None:
        num_blocks = min(num_blocks, request.max_concurrent_requests * -(-max_total // size))
    max_input = request.max_input_tokens
    if max_input is None:
        max_input = max_total - 1
    if not 0 < max_input < max_total:
        raise CapacityError(
            f"`max_input_tokens` must be < `max_total_tokens`. Given: {max_input} and {max_total}"
        )
    return Capacity(
        num_blocks=num_blocks + 1,
        block_size=size,
        max_input_tokens=max_input,
        max_total_tokens=max_total,
        kv_bytes_per_token=shape.bytes_per_token,
    )


def spread_prefill(
    num_tokens: int, *, max_rows: int, longest: int, num_blocks: int, block_size: int
) -> list[int]:
    """Lengths of the prompts in the largest prefill: as few and as long as possible."""
    lengths: list[int] = []
    while num_tokens > 0 and num_blocks > 0 and len(lengths) < max_rows:
        length = min(num_tokens, longest, num_blocks * block_size)
        lengths.append(length)
        num_tokens -= length
        num_blocks -= -(-length // block_size)
    return lengths


def _check_total(max_total: int, num_blocks: int, shape: CacheShape) -> None:
    if max_total > shape.max_position_embeddings:
        raise CapacityError(
            f"`max_total_tokens`={max_total} is more than the model's {shape.max_position_embeddings} positions"
        )
    if max_total > num_blocks * shape.block_size:
        raise CapacityError(
            f"Not enough memory to handle `max_total_tokens`={max_total}: they take"
            f" {shape.bytes_for(max_total)} bytes of KV cache on each shard (--kv-memory)"
        )
