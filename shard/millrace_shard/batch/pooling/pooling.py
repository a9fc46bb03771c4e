"""What the last token of a prompt yields in place of a next token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pooling:
    """The hidden state after the last norm, or the logits of some ids."""

    logit_ids: tuple[int, ...] = ()
    """Empty: the hidden state."""
