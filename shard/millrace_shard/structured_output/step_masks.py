"""Grammars in a step: what the matchers are told of each row, and what becomes of the masks they yield."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from millrace_shard.arrays import Ints
from millrace_shard.batch.draft_tokens import DraftTokens
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step_layout import StepLayout
from millrace_shard.batch.step_tokens import Chains, StepTokens
from millrace_shard.device.transfers import upload
from millrace_shard.kernels.masks import RowMasks
from millrace_shard.structured_output.manager import GrammarManager, GuidedRow, MaskJob


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rulings:
    """What the grammars of one step have decided."""

    masks: RowMasks | None = None
    forced: Chains
    failed: Mapping[int, str]
    """Slots whose matcher cannot go on, and why."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingRulings:
    """Masks that are being made while the forward pass runs."""

    job: MaskJob
    yields: tuple[int, ...]
    """Places of the guided rows among the rows that sample."""
    places: Ints
    """[M], places of the masks among the positions that are sampled."""

    def result(self, device: torch.device) -> Rulings:
        """Wait for them."""
        masks = self.job.result()
        # On CPU they are read before the next step writes to them, and need no copy.
        is_near = device.type == "cpu"
        bits = torch.from_numpy(masks.bits) if is_near else upload(masks.bits, device)
        return Rulings(
            masks=RowMasks(rows=self.places, bits=bits),
            forced={
                row: chain
                for row, chain in zip(self.yields, masks.forced, strict=True)
                if len(chain)
            },
            failed=masks.failed,
        )


class Guidance:
    """Feeds matchers with the tokens of their sequences; by the engine thread alone."""

    def __init__(self, guides: GrammarManager | None) -> None:
        """Without `guides` no sequence may have a grammar."""
        self._guides = guides
        self._news: dict[int, list[tuple[StepTokens, int]]] = {}
        """Of each guided slot, the steps whose tokens its matcher has not been told of, and its row in them."""

    def admit(self, sequence: Sequence) -> bool:
        """Begin to make the matcher of a sequence, if it has a grammar; False if it cannot have one."""
        self._news.pop(sequence.slot, None)
        if sequence.grammar is None:
            return True
        if self._guides is None:
            return False
        num_prompt = sequence.num_inputs - sequence.generated_tokens
        self._news[sequence.slot] = []
        self._guides.admit(sequence.slot, sequence.grammar, sequence.input_ids[num_prompt:])
        return True

    def drop(self, slots: Ints) -> None:
        """Forget the matchers of `slots`, those without one aside."""
        guided = [slot for slot in slots.tolist() if self._news.pop(slot, None) is not None]
        if guided and self._guides is not None:
            self._guides.drop(np.array(guided, dtype=np.int64))

    def clear(self) -> None:
        """Forget every matcher."""
        self._news.clear()
        if self._guides is not None:
            self._guides.clear()

    def start(self, prepared: StepLayout, guesses: DraftTokens) -> PendingRulings | None:
        """Begin to make the masks of a step; None where no row that samples is guided.

        A row of several positions may be forced to as many tokens, any other to one.
        """
        if self._guides is None or not self._news:
            return None
        slots = prepared.yield_slots.tolist()
        guided = [row for row, slot in enumerate(slots) if slot in self._news]
        if not guided:
            return None
        most_tokens = prepared.most_tokens.tolist()
        rows = [
            GuidedRow(
                slot=slots[row],
                news=self._take_news(slots[row]),
                max_jump_forward_tokens=most_tokens[row],
            )
            for row in guided
        ]
        places = np.array(guided)
        if len(prepared.sampled) > len(slots):
            for made, row in zip(rows, guided, strict=True):
                made.drafts = guesses.of_row(int(prepared.yields[row]))
            is_guided = np.isin(np.arange(len(slots)), places)
            places = np.flatnonzero(np.repeat(is_guided, prepared.num_samples))
        return PendingRulings(self._guides.start(rows), tuple(guided), places)

    def follow(self, tokens: StepTokens) -> None:
        """A step was launched; what it forced is known to the matchers already."""
        if not self._news:
            return
        for row, slot in enumerate(tokens.prepared.yield_slots.tolist()):
            if slot in self._news and row not in tokens.forced:
                self._news[slot].append((tokens, row))

    def _take_news(self, slot: int) -> Callable[[], Many[int]]:
        """Reads on a worker thread what the steps since the last call have sampled."""
        steps = self._news[slot]
        if not steps:
            return tuple
        self._news[slot] = []
        if len(steps) == 1:
            ((tokens, row),) = steps
            return partial(tokens.of_row, row)
        return lambda: [id_ for tokens, row in steps for id_ in tokens.of_row(row)]
