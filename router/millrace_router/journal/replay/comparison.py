"""Compares the answers of a replay with the record, token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from math import inf, isnan
from typing import NamedTuple

from millrace_proto import generate_pb2 as pb


class Token(NamedTuple):
    """A sampled token."""

    id: int
    logprob: float
    candidates: tuple[tuple[int, float], ...] = ()
    """Ids and log probabilities of the candidates reported with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference of an epoch."""

    step: int
    """Number of the step in the record."""
    what: str
    slot: int | None = None
    request_id: int | None = None
    position: int | None = None
    """Position of the token in its sequence, from 0, prompt included."""
    recorded: str = ""
    replayed: str = ""
    gap: float | None = None
    """Difference of the log probabilities."""


@dataclass(slots=True)
class _Row:
    """Recorded and replayed tokens of a slot without a counterpart so far."""

    request_id: int
    position: int
    """Position of the next token to compare."""
    recorded: deque[Token] = field(default_factory=deque)
    replayed: deque[Token] = field(default_factory=deque)


class Comparison:
    """Compares the answers of an epoch in order."""

    def __init__(self, *, is_exact: bool) -> None:
        """With `is_exact`, log probabilities must have the same bits; otherwise only tokens are compared."""
        self._is_exact = is_exact
        self._rows: dict[int, _Row] = {}
        self.num_tokens = 0
        """Number of equal tokens."""
        self.largest_gap = 0.0
        """Largest difference of the log probabilities of equal tokens."""
        self.left_out: set[int] = set()
        """Slots of the sequences that are not compared."""

    def admit(self, sequence: pb.Sequence, *, is_compared: bool = True) -> None:
        """Begin a sequence in its slot."""
        self._rows[sequence.slot] = _Row(sequence.request_id, len(sequence.input_ids))
        if is_compared:
            self.left_out.discard(sequence.slot)
        else:
            self.left_out.add(sequence.slot)

    def answered(self, recorded: pb.StepResponse, replayed: pb.StepResponse) -> Difference | None:
        """The first difference between two answers to the same step, or None."""
        step = recorded.number
        failed, now = (set(answer.failed_slots) - self.left_out for answer in (recorded, replayed))
        if failed != now:
            return Difference(
                step=step,
                what="failed rows",
                slot=min(failed ^ now),
                recorded=_listed(failed),
                replayed=_listed(now),
            )
        return self._tokens(step, recorded, replayed) or (
            (self._prompts(step, recorded, replayed) or self._positions(step, recorded, replayed))
            if self._is_exact
            else None
        )

    def _tokens(
        self, step: int, recorded: pb.StepResponse, replayed: pb.StepResponse
    ) -> Difference | None:
        for slot, tokens in _tokens_by_slot(recorded):
            self._rows[slot].recorded.extend(tokens)
        for slot, tokens in _tokens_by_slot(replayed):
            self._rows[slot].replayed.extend(tokens)
        for slot in dict.fromkeys((*recorded.slots, *replayed.slots)):
            row = self._rows[slot]
            if slot in self.left_out:
                row.recorded.clear()
                row.replayed.clear()
                continue
            difference = self._compare_row(step, slot, row)
            if difference is not None:
                return difference
        return None

    def _compare_row(self, step: int, slot: int, row: _Row) -> Difference | None:
        while row.recorded and row.replayed:
            was, now = row.recorded.popleft(), row.replayed.popleft()
            difference = self._token(step, slot, row, was, now)
            if difference is not None:
                return difference
            row.position += 1
            self.num_tokens += 1
        if not (row.recorded or row.replayed):
            return None
        return Difference(
            step=step,
            what="number of tokens",
            slot=slot,
            request_id=row.request_id,
            position=row.position,
            recorded=_ids(row.recorded),
            replayed=_ids(row.replayed),
        )

    def _token(self, step: int, slot: int, row: _Row, was: Token, now: Token) -> Difference | None:
        gap = _gap(was.logprob, now.logprob)
        if was.id != now.id:
            what = "token"
        elif self._is_exact and gap:
            what = "log probability"
        elif self._is_exact and was.candidates != now.candidates:
            what = "candidates"
        else:
            self.largest_gap = max(self.largest_gap, gap)
            return None
        return Difference(
            step=step,
            what=what,
            slot=slot,
            request_id=row.request_id,
            position=row.position,
            recorded=_shown(was, what),
            replayed=_shown(now, what),
            gap=gap,
        )

    def _prompts(
        self, step: int, recorded: pb.StepResponse, replayed: pb.StepResponse
    ) -> Difference | None:
        """Compare the log probabilities of prompts."""
        was, now = _prompts_by_slot(recorded), _prompts_by_slot(replayed)
        for slot in dict.fromkeys((*was, *now)):
            if slot in self.left_out:
                continue
            before, after = was.get(slot, ()), now.get(slot, ())
            gaps = list(map(_gap, before, after))
            if len(before) == len(after) and not any(gaps):
                continue
            index = next((i for i, gap in enumerate(gaps) if gap), len(gaps))
            return Difference(
                step=step,
                what="log probability of the prompt",
                slot=slot,
                request_id=self._rows[slot].request_id,
                recorded=_number(before[index : index + 1]),
                replayed=_number(after[index : index + 1]),
                gap=gaps[index] if index < len(gaps) else None,
            )
        return self._prompt_candidates(step, recorded, replayed)

    def _prompt_candidates(
        self, step: int, recorded: pb.StepResponse, replayed: pb.StepResponse
    ) -> Difference | None:
        was, now = _prompt_candidates_by_slot(recorded), _prompt_candidates_by_slot(replayed)
        for slot in dict.fromkeys((*was, *now)):
            if slot in self.left_out:
                continue
            before, after = was.get(slot, []), now.get(slot, [])
            pairs = zip_longest(before, after, fillvalue=(-1, inf))
            differing = (pair for pair in pairs if _differ(*pair))
            if (pair := next(differing, None)) is not None:
                return Difference(
                    step=step,
                    what="candidates of the prompt",
                    slot=slot,
                    request_id=self._rows[slot].request_id,
                    recorded=_shown_candidates(pair[:1]),
                    replayed=_shown_candidates(pair[1:]),
                )
        return None

    def _positions(
        self, step: int, recorded: pb.StepResponse, replayed: pb.StepResponse
    ) -> Difference | None:
        """Compare the KV positions filled by decodes that were allowed several."""
        now = dict(zip(replayed.computed_slots, replayed.computed_positions, strict=True))
        for slot, position in zip(
            recorded.computed_slots, recorded.computed_positions, strict=True
        ):
            if slot not in self.left_out and now.get(slot) != position:
                return Difference(
                    step=step,
                    what="positions filled",
                    slot=slot,
                    request_id=self._rows[slot].request_id,
                    recorded=str(position),
                    replayed=str(now.get(slot, "none")),
                )
        return None


def _tokens_by_slot(answer: pb.StepResponse) -> Iterator[tuple[int, list[Token]]]:
    tops = iter(zip(answer.top_ids, answer.top_logprobs, strict=True))
    top_counts = answer.top_counts or [0] * len(answer.ids)
    tokens = (
        Token(id_, logprob, tuple(islice(tops, count)))
        for id_, logprob, count in zip(answer.ids, answer.logprobs, top_counts, strict=True)
    )
    for slot, count in zip(answer.slots, answer.counts, strict=True):
        yield slot, list(islice(tokens, count))


def _prompts_by_slot(answer: pb.StepResponse) -> dict[int, list[float]]:
    logprobs = iter(answer.prefill_logprobs)
    rows = zip(answer.prefill_slots, answer.prefill_counts, strict=True)
    return {slot: list(islice(logprobs, count)) for slot, count in rows}


def _prompt_candidates_by_slot(answer: pb.StepResponse) -> dict[int, list[tuple[int, float]]]:
    candidates = zip(answer.prefill_top_ids, answer.prefill_top_logprobs, strict=True)
    rows = zip(answer.prefill_slots, answer.prefill_counts, answer.prefill_top_counts, strict=False)
    return {slot: list(islice(candidates, count * each)) for slot, count, each in rows}


def _differ(was: tuple[int, float], now: tuple[int, float]) -> bool:
    return was[0] != now[0] or bool(_gap(was[1], now[1]))


def _gap(was: float, now: float) -> float:
    """Return the absolute difference; 0 for two NaNs, infinite for one."""
    if was == now or (isnan(was) and isnan(now)):
        return 0.0
    gap = abs(was - now)
    return inf if isnan(gap) else gap


def _number(values: Sequence[float]) -> str:
    return f"{values[0]:.9g}" if values else "none"


def _shown(token: Token, what: str) -> str:
    if what == "candidates":
        return _shown_candidates(token.candidates) or "none"
    return f"{token.id} ({token.logprob:.9g})"


def _shown_candidates(candidates: Iterable[tuple[int, float]]) -> str:
    return ", ".join(f"{id_} ({logprob:.9g})" for id_, logprob in candidates)


def _ids(tokens: Iterable[Token]) -> str:
    return ", ".join(str(token.id) for token in tokens) or "none"


def _listed(slots: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(slots))) or "none"
