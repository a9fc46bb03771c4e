"""Steps and their replies as the engine sees them: host arrays only, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property

import numpy as np

from millrace_shard.arrays import Flags, Floats, Ints, no_floats, no_ints
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.sequence_states import NO_SAVES, StateSaves
from millrace_shard.errors import StepInvalid


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchChange:
    """Changes of the batch before a forward pass, in this order: sequences leave, sequences join, block tables grow."""

    dropped_slots: Ints = field(default_factory=no_ints)
    admitted: tuple[Sequence, ...] = ()
    grown_slots: Ints = field(default_factory=no_ints)
    grown_blocks: Ints = field(default_factory=no_ints)
    unsealed_blocks: Ints = field(default_factory=no_ints)
    sealed_blocks: Ints = field(default_factory=no_ints)
    sealed_keys: tuple[bytes, ...] = ()
    """Keys of what `sealed_blocks` hold."""
    freed_images: Ints = field(default_factory=no_ints)
    """Image slots whose pixels are forgotten."""

    def __bool__(self) -> bool:
        grows = len(self.grown_slots) or len(self.grown_blocks)
        leaves = len(self.dropped_slots) or len(self.freed_images)
        return bool(grows or leaves or self.admitted or self.has_seals)

    @property
    def has_seals(self) -> bool:
        """Whether it changes the directory of blocks alone."""
        return bool(len(self.sealed_blocks) or len(self.unsealed_blocks))


@dataclass(frozen=True, slots=True)
class Open:
    """Begins an epoch with an empty batch."""

    life: int = 0
    """The router's books of blocks, see `KVStore.begin`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """A forward pass: rows that compute prompt tokens, then rows that decode."""

    change: BatchChange = field(default_factory=BatchChange)
    chunk_slots: Ints = field(default_factory=no_ints)
    chunk_tokens: Ints = field(default_factory=no_ints)
    decode_slots: Ints = field(default_factory=no_ints)
    decode_tokens: Ints = field(default_factory=no_ints)
    """KV positions that each decode may fill; empty: one each."""
    draft_tokens: Ints = field(default_factory=no_ints)
    """Draft tokens that may be among these positions; empty: none."""
    saves: StateSaves = NO_SAVES

    @cached_property
    def decode_limits(self) -> tuple[Ints, Ints]:
        """`decode_tokens` and `draft_tokens` of every decode, with the defaults filled in. Raises StepInvalid."""
        count = len(self.decode_slots)
        positions = (
            self.decode_tokens if len(self.decode_tokens) else np.ones(count, dtype=np.int64)
        )
        drafts = self.draft_tokens if len(self.draft_tokens) else np.zeros(count, dtype=np.int64)
        if len(positions) != count or len(drafts) != count:
            raise StepInvalid("the columns of decodes differ in length")
        if (positions < 1).any() or (drafts < 0).any():
            raise StepInvalid(
                "a decode must fill at least one position, and not a negative number of drafts"
            )
        return positions, drafts

    def without(self, chunks: Flags, decodes: Flags) -> Forward:
        """The same step without the rows whose flag is set."""
        return replace(
            self,
            chunk_slots=self.chunk_slots[~chunks],
            chunk_tokens=self.chunk_tokens[~chunks],
            decode_slots=self.decode_slots[~decodes],
            decode_tokens=self.decode_tokens[~decodes] if len(self.decode_tokens) else no_ints(),
            draft_tokens=self.draft_tokens[~decodes] if len(self.draft_tokens) else no_ints(),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encode:
    """Computes features of tiles, without a forward pass."""

    change: BatchChange = field(default_factory=BatchChange)
    image_slots: Ints = field(default_factory=no_ints)
    units: Ints = field(default_factory=no_ints)
    """The tile of each of `image_slots`."""
    layers: Ints = field(default_factory=no_ints)
    """Layers of the encoder to run for each tile; empty: all."""


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """Drops sequences without a forward pass."""

    dropped_slots: Ints


@dataclass(frozen=True, slots=True)
class Unknown:
    """Work of a kind that this shard does not know, such as a newer router's."""


Work = Open | Forward | Filter | Encode | Unknown


@dataclass(frozen=True, slots=True)
class Step:
    """One numbered message of an epoch."""

    epoch: int
    number: int
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations in nanoseconds; `concat_ns` is None when no sequence was admitted."""

    forward_ns: int = 0
    decode_ns: int = 0
    total_ns: int = 0
    concat_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """The outcome of a step: columns by row, by token, by candidate and by prompt token, as on the wire."""

    slots: Ints = field(default_factory=no_ints)
    counts: Ints = field(default_factory=no_ints)
    """Tokens of each slot; the tokens of a slot are adjacent in `ids`."""
    ids: Ints = field(default_factory=no_ints)
    logprobs: Floats = field(default_factory=no_floats)
    top_counts: Ints = field(default_factory=no_ints)
    """Candidates of each token; empty when no row requests candidates."""
    top_ids: Ints = field(default_factory=no_ints)
    top_logprobs: Floats = field(default_factory=no_floats)
    prefill_slots: Ints = field(default_factory=no_ints)
    prefill_counts: Ints = field(default_factory=no_ints)
    prefill_logprobs: Floats = field(default_factory=no_floats)
    prefill_top_counts: Ints = field(default_factory=no_ints)
    """Candidates of each token of a slot, one number per slot; empty when no row requests candidates."""
    prefill_top_ids: Ints = field(default_factory=no_ints)
    prefill_top_logprobs: Floats = field(default_factory=no_floats)
    failed_slots: Ints = field(default_factory=no_ints)
    failure_reasons: Mapping[int, str] = field(default_factory=dict)
    """The reason for each failed slot whose grammar no token can follow."""
    closed_slots: tuple[int, ...] = ()
    """Slots whose last token was chosen to close their text."""
    computed_slots: Ints = field(default_factory=no_ints)
    """Decodes that may fill more than one position."""
    computed_positions: Ints = field(default_factory=no_ints)
    """KV positions that each of them has filled since its start."""
    drafted_tokens: Ints = field(default_factory=no_ints)
    """Draft tokens of each of them in this step."""
    pooled_slots: Ints = field(default_factory=no_ints)
    pooled_counts: Ints = field(default_factory=no_ints)
    """Values of each slot, which are adjacent in `pooled_values`."""
    pooled_values: Floats = field(default_factory=no_floats)
    failed_images: tuple[int, ...] = ()
    """Image slots whose features are not finite."""
    checksum: int = 0
    timings: Timings = field(default_factory=Timings)


class FailureKind(Enum):
    """The reason for which a step failed."""

    FAILED = auto()
    OUT_OF_MEMORY = auto()
    REFUSED = auto()


@dataclass(frozen=True, slots=True)
class StepFailure:
    """A step that was not executed or raised; every later step of its epoch is refused."""

    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class StepReply:
    """The one answer to a step."""

    epoch: int
    number: int
    outcome: StepResult | StepFailure
