"""What guesses: the interface of n-grams, draft models and Medusa heads."""

from __future__ import annotations

from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.draft_tokens import DraftTokens
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step_layout import StepLayout, StepRows
from millrace_shard.batch.step_tokens import Chains


class Proposer:
    """May be wrong in any way: a bad guess costs time, never a token. Used by the engine thread alone.

    Every rank of a group has one and is asked the same, so all have to guess the same.
    """

    reads_tokens = False
    """Whether it needs every token on the host; a step that asks it for guesses waits for them then."""

    def propose(self, rows: StepRows) -> DraftTokens:
        """At most `rows.most_guesses[b]` tokens for row b. Called for every step that has room for guesses or a prompt.

        What the rows hold, guesses aside, is in the history on the device.
        """
        raise NotImplementedError

    def has_guesses(self, slots: Ints, lengths: Ints) -> bool:  # noqa: ARG002
        """Whether `propose` may find something for one of `slots` [n], of so many tokens; quickly."""
        return True

    def admit(self, sequence: Sequence) -> None:
        """A sequence joins; whatever is known of its slot is of another one."""

    def clear_blocks(self, blocks: Tensor) -> None:
        """These KV blocks [n] int64, on the device, get a new owner."""

    def read(self, slots: Ints, positions: Ints, ids: Ints) -> None:
        """Tokens [n] have reached the host, in the order of their positions; for those that read tokens."""

    def settle(self, slots: Ints, computed: Ints) -> None:
        """Guesses of `slots` were looked at: as many as are right, their KV positions now end at `computed`."""

    def follow(
        self, prepared: StepLayout, ids: Tensor, expected: Tensor | None, forced: Chains
    ) -> None:
        """A step was submitted that samples `ids` [R]; the host knows nothing of them yet.

        A guess counts where the sample equals what was `expected` [R], if anything was; `forced` rows sample nothing.
        """
