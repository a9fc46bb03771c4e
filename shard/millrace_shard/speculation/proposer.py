"""The interface of everything that drafts, and a look at how much of it is right."""

from __future__ import annotations

import logging

from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step_layout import DraftTokens, StepLayout, StepRows
from millrace_shard.batch.step_tokens import ForcedTokens
from millrace_shard.kernels.ragged import RaggedBatch

logger = logging.getLogger(__name__)


class Proposer:
    """Proposes draft tokens for the engine thread. A bad draft token costs time and never changes the output.

    All ranks of a group must propose the same tokens for the same calls.
    """

    reads_tokens = False
    """Whether `propose` needs all tokens on the host, so that a step with drafts waits for them."""
    likely_reason = "the text does not repeat itself"
    """Why nearly all draft tokens would be rejected."""
    logs = True
    """Whether this rank logs it if they are."""

    def propose(self, rows: StepRows) -> DraftTokens:
        """At most `rows.max_draft_tokens[b]` tokens for row b, in every step with a prompt or with room for drafts.

        The token table on the device has the tokens of the rows.
        """
        raise NotImplementedError

    def has_drafts(self, slots: Ints, lengths: Ints) -> bool:  # noqa: ARG002
        """Whether `propose` may find drafts for any of `slots` [n], which have `lengths` tokens; must be quick."""
        return True

    def admit(self, sequence: Sequence) -> None:
        """A sequence joins; earlier state of its slot belongs to another sequence."""

    def clear_blocks(self, blocks: Tensor) -> None:
        """The KV blocks [n], int64 on the device, get a new owner."""

    def clear_rows(self, rows: Tensor) -> None:
        """The rows [n] of the KV cache, int64 on the device, may hold anything, and are going to be written."""

    def read(self, slots: Ints, positions: Ints, ids: Ints) -> None:
        """Tokens [n] have reached the host, in the order of their positions; called if `reads_tokens`."""

    def verify(self, slots: Ints, computed: Ints) -> None:
        """Draft tokens of `slots` were verified: the KV positions with accepted tokens end at `computed`."""

    def follow(
        self, layout: StepLayout, ids: Tensor, expected: Tensor | None, forced: ForcedTokens
    ) -> None:
        """A step that samples `ids` [R] was launched; the ids are on the device.

        A draft token is accepted if the sample equals the `expected` one [R]. `forced` rows ignore their samples.
        """

    def advance(self, layout: StepLayout, batch: RaggedBatch | None) -> None:
        """The model has computed `batch`, which is None for a graph, and the sampled tokens are in the token table."""


class AcceptanceCheck:
    """Logs once if nearly all of the first draft tokens are rejected."""

    MANY = 1000
    LEAST = 0.05

    def __init__(self, likely_reason: str) -> None:
        self._reason = likely_reason
        self._drafted = self._accepted = 0
        self._is_over = False

    def add(self, drafted: int, accepted: int) -> None:
        """Count the verified draft tokens of a step."""
        if self._is_over:
            return
        self._drafted += drafted
        self._accepted += accepted
        if self._drafted < self.MANY:
            return
        self._is_over = True
        if self._accepted < self.LEAST * self._drafted:
            logger.warning(
                "only %d of %d draft tokens were right, which makes answers slower; likely, %s",
                self._accepted,
                self._drafted,
                self._reason,
            )
