"""A step: its limits, the rows that run, and the work that it does for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.block_ledger import Seals

METHODS = ("prefill", "decode")
"""TGI's labels of steps for metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Limits of one step and of the batch, in TGI's names, and the policies of admission."""

    max_batch_prefill_tokens: int
    """Most tokens of a step that computes prompts, its decodes included."""
    max_batch_size: int
    """Most sequences that run at once."""
    spare_slots: int = 0
    """Further slots, so that admission does not wait for a slot that a step in flight still names."""
    reserve_all: bool = False
    """Admit a request only with blocks up to its last token (TGI's rule), instead of growing and preempting."""
    shortest_first: bool = True
    """Compute short prompts before a long one that is older (`prefill_order`)."""
    target_inter_token_latency: float | None = None
    """Seconds that a step with decodes should take at most when prompts are added to it."""
    share_slots: bool = False
    """Preempt a row of the tenant with most rows for the head of the queue, if the head's tenant has fewer."""
    max_draft_tokens: int = 0
    """Most draft tokens of one sequence in one step."""
    max_preemptions: int = 3
    """After this many preemptions a request is admitted only with all the blocks that it can ever need."""

    @property
    def num_slots(self) -> int:
        """Slots are numbered below this."""
        return self.max_batch_size + self.spare_slots


@dataclass(slots=True, eq=False)
class Row:
    """An admitted request. All counts but `num_computed` include the steps in flight.

    For a multi-token row, only the answers have the number of KV positions that a step filled and of tokens it yielded.
    Until then each step in flight counts for all the positions that it may fill, and for one token.
    """

    entry: SchedulableRequest
    slot: int
    seniority: int
    """Place in the order of first admissions; a preempted request keeps its own."""
    num_inputs: int
    """Tokens to compute before the first new one: the prompt, and those generated before a preemption."""
    max_tokens: int
    """Most tokens that it may still yield."""
    num_cached: int = 0
    """Input tokens that have KV at its admission, because it was found in the cache or kept."""
    num_kept: int = 0
    """Those of them whose KV the request kept itself, over the failure that interrupted it."""
    num_recomputed: int = 0
    """Input tokens that had KV before that failure, and are computed again."""
    num_prompt_planned: int = 0
    """Input tokens that are cached or planned."""
    num_tokens_planned: int = 0
    """New tokens that the planned steps yield; 0 as long as some input is left."""
    num_kv_tokens: int = 0
    """Most KV positions that are filled after all planned steps."""
    num_kv_owned: int = 0
    """KV positions in the blocks that it has got."""
    num_computed: int = 0
    """KV positions filled by answered steps."""
    num_entered: int = 0
    """KV positions in blocks that were offered to the cache."""
    window_starts: tuple[int, ...] = ()
    """How many first blocks of its table each window group did not have any more at its admission."""
    promised: bool = False
    """Whether all blocks that it can ever need are promised, so that it is never preempted."""
    has_yielded: bool = False
    """Whether it was preempted for another tenant or adapter, and goes back into the waiting queue."""
    is_early: bool = False
    """Whether its prompt is computed ahead of its turn."""
    is_multi_token: bool = False
    """Whether its decodes may fill more than one position."""
    state_page: int = 0
    """The page of its state; 0 without recurrent layers."""
    image_rows: Sequence[tuple[int, int, int]] = ()
    """(position, tokens, first row of features) of the placeholders of pictures that are not cached."""
    restored_page: int = 0
    """The page with a copy of its state after `num_cached` tokens; 0: there is none."""

    @property
    def num_prompt_left(self) -> int:
        """Input tokens that no planned step computes."""
        return self.num_inputs - self.num_prompt_planned

    @property
    def num_room(self) -> int:
        """KV positions that it may need beyond the planned ones; its last token's is never computed."""
        return self.num_inputs + self.max_tokens - 1 - self.num_kv_tokens


class TilePart(NamedTuple):
    """Some layers of the encoder for a tile of a picture."""

    slot: int
    """Of the picture's pixels."""
    tile: int
    num_layers: int
    """Layers that the step runs, after those that earlier ones ran."""
    is_last: bool
    """Whether the tile's features are there then."""
    cost: float
    """Tiles of the cost model that it costs."""


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """One step. Without chunks, decodes and tiles to encode it only drops sequences."""

    dropped: list[int] = field(default_factory=list)
    """Slots whose sequences end or are preempted."""
    admitted: list[Row] = field(default_factory=list)
    grown: list[tuple[int, int]] = field(default_factory=list)
    """(slot, block), in table order."""
    chunks: list[tuple[int, int]] = field(default_factory=list)
    """(slot, prompt tokens to compute)."""
    decodes: list[int] = field(default_factory=list)
    """Slots that decode."""
    decode_tokens: list[int] = field(default_factory=list)
    """Most KV positions that each decode may fill; empty if each fills one."""
    draft_tokens: list[int] = field(default_factory=list)
    """How many of those may be draft tokens; empty where `decode_tokens` is."""
    multi_position: list[int] = field(default_factory=list)
    """Indices in `decodes` of those that may fill more than one position."""
    multi_token_slots: list[int] = field(default_factory=list)
    """Slots of the multi-token rows, whose number of new tokens only the answer has; one is assumed until then."""
    encodes: list[TilePart] = field(default_factory=list)
    """Work for pictures; a step that encodes has neither chunks nor decodes."""
    freed_images: list[int] = field(default_factory=list)
    """Image slots whose pixels are forgotten."""
    saves: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, position, page): copies of states after so many tokens of a slot."""
    seals: Seals = field(default_factory=Seals)
    """For the directories of shards whose KV outlives them."""
    num_preempted: int = 0
    concat_reason: str | None = None
    """TGI's word for the reason why requests join a running batch; None if none joins."""
    load: StepLoad = field(default_factory=StepLoad)

    @property
    def method(self) -> str:
        return "prefill" if self.chunks else "decode"

    @property
    def is_encoding(self) -> bool:
        """Whether the step encodes tiles of pictures, or only forgets pixels."""
        return bool(self.encodes or (self.freed_images and not self.has_forward))

    @property
    def has_forward(self) -> bool:
        """Whether the step runs the model."""
        return bool(self.chunks or self.decodes)
