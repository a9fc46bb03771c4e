"""The random choices of fake shards where the wire allows several, and the limits of decodes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from millrace_proto import generate_pb2 as pb
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.schedulable import Acceptance

LONGEST_CHAIN = 20
"""Most jump-forward tokens: more than the router allows in one step."""


class Choices:
    """The number of draft tokens, whether they are right, and how many tokens grammars force."""

    def __init__(self, seed: int = 0, *, right: float = 0.6, forced: float = 0.3) -> None:
        self._random = Random(seed)
        self._right = right
        self._forced = forced

    def num_draft_tokens(self, most: int) -> int:
        """Often `most`, sometimes fewer or none."""
        return most if self._random.random() < 0.5 else self._random.randint(0, most)

    def is_right(self) -> bool:
        """Whether the next draft token is right."""
        return self._random.random() < self._right

    def chain_length(self) -> int:
        """The number of jump-forward tokens, often 0."""
        if self._random.random() >= self._forced:
            return 0
        return self._random.randint(1, LONGEST_CHAIN)

    def num_filled(self, most: int) -> int:
        """The number of jump-forward positions that a step fills, of `most` allowed: often all, sometimes fewer."""
        if most == 1 or self._random.random() < 0.7:
            return most
        return self._random.randint(1, most)

    def says_zero(self) -> bool:
        """Whether a row without tokens has a count of 0 in the answer, or is missing."""
        return self._random.random() < 0.5


class RandomLengths:
    """A random length for each row and step."""

    def __init__(self, seed: int, most: int) -> None:
        self._random = Random(seed)
        self._most = most

    def lengths(self, rows: Sequence[tuple[Acceptance, int]], load: StepLoad) -> Sequence[int]:
        """See `DraftPolicy`."""
        assert load.decodes == len(rows)
        return [self._random.choice([0, self._random.randint(0, self._most)]) for _ in rows]

    def observe(self, row: Acceptance, *, allowed: int, drafted: int, accepted: int) -> None:
        """Check the numbers of a row."""
        assert 0 <= accepted <= drafted <= allowed <= self._most
        row.silent += 1

    def step_took(self, load: StepLoad, seconds: float, *, accepted: int) -> None:
        """Ignore the duration."""


def decode_limits(work: pb.Prefill | pb.Decode, *, max_draft_tokens: int) -> list[tuple[int, int]]:
    """(positions, draft tokens among them) of each decode; raises AssertionError if the columns break a rule."""
    tokens, drafts, count = work.decode_tokens, work.draft_tokens, len(work.decode_slots)
    if not tokens:
        assert not drafts, "draft tokens without positions"
        return [(1, 0)] * count
    assert len(tokens) == count, "not one number of positions for each decode"
    assert len(drafts) in (0, count), "not one number of draft tokens for each decode"
    assert any(number > 1 for number in tokens), "columns that say nothing"
    pairs = list(zip(tokens, drafts or [0] * count, strict=True))
    assert all(draft_tokens < number for number, draft_tokens in pairs), "draft tokens alone"
    assert all(draft_tokens <= max_draft_tokens for _, draft_tokens in pairs), (
        "more draft tokens than the shard can make"
    )
    return pairs
