"""Arithmetic of the KV capacity: the tokens that fit into the cache, and the longest sequence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace

CPU_MEMORY_SHARE = 0.25
STATES_SHARE = 0.5
"""Share of the memory for KV cache and states that states may fill."""
PAGES_PER_SLOT = 8
"""A slot's state, and copies of it at earlier positions."""
FEATURES_SHARE = 1 / 16
"""Share of the memory for KV cache and states that features of images may fill."""
CONTEXTS_OF_FEATURES = 8
"""Longest sequences whose tokens may all be of images at a time."""
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
    window_blocks: tuple[int, ...] = field(default=(), compare=False)
    """With `num_blocks`: blocks of each window group of the previous group."""
    state_pages: int | None = field(default=None, compare=False)
    """Pages of states of the previous group, which the new group must have too."""
    feature_rows: int | None = field(default=None, compare=False)
    """Rows for features of images of the previous group, which the new group must have too."""


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
class WindowShape:
    """Layers with one attention window, which may have their own blocks."""

    window: int
    reach: int
    """Positions before a query's own that its attention may read, those that it masks included."""
    num_layers: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The cost of a block on this rank, and the number of positions of the model."""

    block_size: int
    bytes_per_token: int
    """Of all layers."""
    max_position_embeddings: int
    windows: tuple[WindowShape, ...] = ()
    """Layers whose blocks can be given back, by window."""

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
    has_kv_store: bool = False
    """Whether the cache outlives the process."""
    windows: tuple[tuple[WindowShape, int], ...] = ()
    """Window groups, each with its blocks, the reserved one included."""

    state_pages: int = 0
    """Pages of states, with page 0, which no sequence owns; 0 without recurrent layers."""
    state_page_bytes: int = 0
    feature_rows: int = 0
    """Rows for features of images; 0 if the model reads none."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache on this rank."""
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

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
        return KVMemory(bytes=kv_memory, is_budget=True, max_bytes=min(kv_memory, total))
    usable = max(0, free - int((1 - fraction) * total))
    return KVMemory(bytes=int(usable * CUDA_MEMORY_SHARE), is_budget=True, max_bytes=usable)


def second_pages(num_pages: int, max_batch_size: int) -> int:
    """Pages next to `num_pages` for steps with draft tokens: one for each sequence that can run."""
    return max(0, min(max_batch_size, num_pages - 1))


def state_pages_in(
    memory: KVMemory, request: WarmupRequest, page_bytes: int, *, drafts: bool
) -> int:
    """Pages of states, with page 0: as many as all slots and copies of their states need, or fill a part of the memory.

    With `drafts`, `second_pages` have to fit there, too. Raises CapacityError if no sequence could have a page.
    """
    if not page_bytes:
        return 0
    if request.state_pages is not None:
        return request.state_pages
    slots = request.max_batch_size
    pages = int(memory.bytes * STATES_SHARE) // page_bytes
    if drafts:
        pages = max(pages - slots, (pages + 1) // 2)
    pages = min(pages, PAGES_PER_SLOT * slots)
    if pages < 2:
        raise CapacityError(
            f"The state of a sequence takes {page_bytes} bytes on each shard, and {3 if drafts else 2} must fit into"
            f" {STATES_SHARE:.0%} of the memory for KV cache and states: set --kv-memory, or free memory"
        )
    return pages


def feature_rows_in(
    memory: KVMemory,
    request: WarmupRequest,
    *,
    row_bytes: int,
    tile_rows: int,
    max_tiles: int,
    max_positions: int,
    extra_rows: int = 0,
) -> int:
    """Rows for features of images: a part of the memory, or as many as the longest sequences or largest image need.

    Raises CapacityError if the features of a tile do not fit.
    """
    if request.feature_rows is not None:
        return request.feature_rows
    longest = min(request.max_total_tokens or max_positions, max_positions)
    most = max(max_tiles, CONTEXTS_OF_FEATURES * -(-longest // tile_rows))
    tiles = min(most, int(memory.bytes * FEATURES_SHARE) // (row_bytes * (tile_rows + extra_rows)))
    if tiles < 1:
        raise CapacityError(
            f"The features of a tile of an image take {row_bytes * tile_rows} bytes on each shard, and have"
            f" to fit into a {round(1 / FEATURES_SHARE)}th of the memory for the KV cache: set --kv-memory"
        )
    return tiles * (tile_rows + extra_rows)


BLOCKS_WITHOUT_BYTES = 1 << 16
"""Blocks of a model without attention, which only count positions."""


def blocks_in(memory: KVMemory, shape: CacheShape) -> int:
    """Usable blocks, without the reserved one."""
    if not shape.bytes_per_token:
        return BLOCKS_WITHOUT_BYTES
    return max(0, memory.bytes // (shape.bytes_per_token * shape.block_size) - 1)


def plan_capacity(
    request: WarmupRequest, shape: CacheShape, *, fitting_blocks: int, is_budget: bool
) -> Capacity:
    """Limits and cache size for `fitting_blocks` usable blocks of all layers, the minimum over all ranks.

    Layers with a window get their own blocks if that saves some, and the others the memory that is left.

    Raises CapacityError if a limit of the user is too large.
    """
    split = WindowSplit.of(request, shape, fitting_blocks)
    if split is not None:
        capacity = _plan(request, shape, split.fitting_blocks(), is_budget=is_budget)
        windows = split.windows(capacity.num_blocks - 1)
        if request.num_blocks is not None or any(
            count < capacity.num_blocks - 1 for count in windows
        ):
            return split.with_windows(capacity, windows)
    return _plan(request, shape, fitting_blocks, is_budget=is_budget)


TYPICAL_CONTEXT = 4096
"""Positions, or two windows if those are more, for which memory is divided between full layers and windows: with longer
contexts the full layers run out of blocks first, with shorter ones the windows."""
LEAST_SHARE = 2 / 3
"""Of the blocks without window groups that each of them has at least, unless fewer do for all rows: as many sequences
of short contexts run at once, which need as many window blocks as others."""
LEAST_TAILS, MOST_TAILS, TAIL_BYTES = 1 / 16, 1 / 8, 1 / 3
"""Window blocks that keep tails for the prefix cache, per block of the full layers: as many as take a third of the full
layers' bytes, within these bounds."""
CHUNKS_IN_FLIGHT = 2
"""Largest prefills whose positions are all held: in the step that is computed, and in the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSplit:
    """How memory is divided between layers with a window and the others. Reserved blocks do not count.

    A window group has blocks for the windows of as many rows as are to be expected, for prompts in flight, and tails.
    """

    request: WarmupRequest
    shape: CacheShape
    shapes: tuple[WindowShape, ...]
    num_bytes: int

    @classmethod
    def of(
        cls, request: WarmupRequest, shape: CacheShape, fitting_blocks: int
    ) -> WindowSplit | None:
        """The split of the memory of `fitting_blocks` blocks of all layers; None if no window is worth a group."""
        longest = request.max_total_tokens or shape.max_position_embeddings
        shapes = tuple(
            each for each in shape.windows if each.reach + 3 * shape.block_size < longest
        )
        if request.num_blocks is not None:
            shapes = shapes if request.window_blocks else ()
            if len(request.window_blocks) != len(shapes):
                raise CapacityError(
                    f"the previous group had {len(request.window_blocks)} window groups, which"
                    " this model does not have: start the router again"
                )
        num_bytes = (fitting_blocks + 1) * shape.block_size * shape.bytes_per_token
        split = cls(request=request, shape=shape, shapes=shapes, num_bytes=num_bytes)
        return split if shapes and fitting_blocks > 0 else None

    def fitting_blocks(self) -> int:
        """The most blocks of layers without a window group."""
        if self.request.num_blocks is not None:
            is_fitting = self._bytes(self.request.num_blocks - 1, self._former) <= self.num_bytes
            return self.request.num_blocks - 1 if is_fitting else 0
        least = min(each.bytes_per_token for each in self.shapes) * self.shape.block_size
        most = int(self.num_bytes / least / LEAST_TAILS) + 1
        return _largest(
            most, lambda count: self._bytes(count, self._expected(count)), self.num_bytes
        )

    def windows(self, num_blocks: int) -> tuple[int, ...]:
        """Blocks of each group where the other layers have `num_blocks`: for all rows, if there is memory."""
        if self.request.num_blocks is not None:
            return self._former
        rows = _largest(
            self.request.max_batch_size,
            lambda rows: self._bytes(num_blocks, self._windows(num_blocks, rows)),
            self.num_bytes,
        )
        return self._windows(num_blocks, rows)

    def with_windows(self, capacity: Capacity, windows: tuple[int, ...]) -> Capacity:
        """The same with these blocks; a token's bytes are all groups' bytes, divided by the full layers' tokens."""
        num_bytes = self._bytes(capacity.num_blocks - 1, windows)
        groups = tuple(zip(self.shapes, (1 + count for count in windows), strict=True))
        return replace(
            capacity,
            windows=groups,
            kv_bytes_per_token=-(-num_bytes // (capacity.num_blocks * capacity.block_size)),
        )

    @property
    def _former(self) -> tuple[int, ...]:
        return tuple(count - 1 for count in self.request.window_blocks)

    def _expected(self, num_blocks: int) -> tuple[int, ...]:
        """Window blocks if rows of TYPICAL_CONTEXT fill `num_blocks`."""
        widest = max(each.window for each in self.shapes)
        longest = self.request.max_total_tokens or self.shape.max_position_embeddings
        context = min(longest, max(TYPICAL_CONTEXT, 2 * widest))
        rows = -(-num_blocks * self.shape.block_size // context)
        most = self.request.max_batch_size
        least = LEAST_SHARE * self.num_bytes
        least //= self.shape.bytes_per_token * self.shape.block_size
        expected = self._windows(num_blocks, min(rows, most)), self._windows(num_blocks, most)
        return tuple(max(few, min(all_, int(least))) for few, all_ in zip(*expected, strict=True))

    def _windows(self, num_blocks: int, rows: int) -> tuple[int, ...]:
        """Blocks of each group for `rows` rows, no more than `num_blocks`."""
        size = self.shape.block_size
        chunks = CHUNKS_IN_FLIGHT * (-(-self.request.max_batch_prefill_tokens // size) + 1)
        full = self._full_bytes_per_token
        counts = []
        for each in self.shapes:
            share = min(MOST_TAILS, max(LEAST_TAILS, TAIL_BYTES * full / each.bytes_per_token))
            # What the router promises each row, and one row at least.
            promised = max(1, rows) * (-(-each.reach // size) + 2)
            counts.append(min(num_blocks, chunks + promised + int(num_blocks * share)))
        return tuple(counts)

    @property
    def _full_bytes_per_token(self) -> int:
        """Of the layers without a window group."""
        return self.shape.bytes_per_token - sum(each.bytes_per_token for each in self.shapes)

    def _bytes(self, num_blocks: int, windows: tuple[int, ...]) -> int:
        """Bytes of these blocks and the reserved ones."""
        counts = zip(self.shapes, windows, strict=True)
        tokens = self._full_bytes_per_token * (num_blocks + 1) + sum(
            each.bytes_per_token * (count + 1) for each, count in counts
        )
        return tokens * self.shape.block_size


def _largest(most: int, cost: Callable[[int], int], budget: int) -> int:
    """The largest number up to `most` whose `cost`, which never falls, is within `budget`; or 0."""
    return bisect_right(range(1, most + 1), budget, key=cost)


def _plan(
    request: WarmupRequest, shape: CacheShape, fitting_blocks: int, *, is_budget: bool
) -> Capacity:
    """Limits and cache size for `fitting_blocks` blocks of the layers without a window group."""
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


def longest_in(memory: KVMemory, request: WarmupRequest, shape: CacheShape) -> int:
    """Positions of the longest sequence for which `memory` has room, if nothing else takes any; at least two.

    Layers with a window keep few positions, whatever the length.
    """
    most = min(
        request.max_total_tokens or shape.max_position_embeddings, shape.max_position_embeddings
    )
    own = shape.bytes_per_token - sum(each.bytes_per_token for each in shape.windows)
    if own <= 0:
        return most
    earlier = ((request.num_blocks or 1) - 1) * shape.block_size
    return min(most, max(memory.max_bytes // own, earlier, 2))


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
        raise total_too_large(max_total, shape)


def total_too_large(max_total: int, shape: CacheShape) -> CapacityError:
    return CapacityError(
        f"Not enough memory to handle `max_total_tokens`={max_total}: they take"
        f" {shape.bytes_for(max_total)} bytes of KV cache on each shard (--kv-memory)"
    )


def cache_too_large(num_tokens: int) -> CapacityError:
    return CapacityError(f"Not enough memory for a KV cache of {num_tokens} tokens")


def prefill_too_large(num_tokens: int) -> CapacityError:
    return CapacityError(
        f"Not enough memory to handle {num_tokens} prefill tokens. "
        "You need to decrease `--max-batch-prefill-tokens`"
    )


def batch_too_large(num_rows: int) -> CapacityError:
    return CapacityError(
        f"Not enough memory to choose the tokens of {num_rows} sequences at once. "
        "You need to decrease `--max-batch-size`"
    )


def contexts_too_long(num_rows: int, max_tokens: int) -> CapacityError:
    return CapacityError(
        f"Not enough memory to decode {num_rows} sequences of {max_tokens} tokens at once. "
        "You need to decrease `--max-batch-size` or `--max-total-tokens`"
    )
