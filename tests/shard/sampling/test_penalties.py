"""Penalties by counts that stay on the device, against those that read whole sequences, bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millrace_proto.sampling import Sampling
from millrace_shard.batch.sequence import PARAMETERS, Sequence
from millrace_shard.sampling.penalties import BiasTable
from millrace_shard.sampling.processors import Processors
from millrace_shard.sampling.sampling_rows import RowGroups, SamplingRows
from millrace_shard.sampling.watermark import Watermark

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.cuda import triton_penalties
from millrace_shard.kernels.cuda.operators import TritonSampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, NUM_SLOTS, LENGTH = 40, 4, 64
FLOAT_MAX = float(torch.finfo(torch.float32).max)

penalties = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.75, 1e-38, 1e38]),
    frequency_penalty=st.sampled_from([0.0, 1.0, -0.3, FLOAT_MAX]),
    presence_penalty=st.sampled_from([0.0, 1.7, -1.0]),
    openai_frequency_penalty=st.sampled_from([0.0, 0.3, -0.7, -FLOAT_MAX]),
)
events = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "step", "step", "drafts", "fail"]),
        st.integers(0, NUM_SLOTS - 1),
        st.integers(0, 2**31),
        penalties,
    ),
    min_size=1,
    max_size=8,
)


class Recording(TritonSampling):
    """Records the number of tokens that each call counts."""

    def __init__(self) -> None:
        self.counted: list[int] = []

    def count_tokens(
        self, counts: Tensor, token_table: Tensor, spans: Tensor, longest: int
    ) -> None:
        assert longest == int((spans[2] - spans[1]).max())
        self.counted.append(int((spans[2] - spans[1]).sum()))
        super().count_tokens(counts, token_table, spans, longest)


@dataclass
class Both:
    """One token table under two ways to penalise."""

    vocab: int = VOCAB
    kernels: Recording = field(default_factory=Recording)
    sequences: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = torch.full((NUM_SLOTS, LENGTH), 7, dtype=torch.int32, device=DEVICE)
        self.ours, self.plain = (
            Processors(self.table, (), BiasTable(DEVICE), Watermark(), each)
            for each in (self.kernels, None)
        )

    def admit(self, slot: int, ids: list[int], parameters: Sampling) -> None:
        """A sequence with one generated token, if it has more than one."""
        self.table[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self.sequences[slot] = Sequence(
            slot=slot,
            request_id=0,
            input_ids=np.array(ids),
            generated_tokens=min(1, len(ids) - 1),
            parameters=parameters,
        )
        assert self.ours.counts is not None
        self.ours.counts.forget(slot)

    def check(self, slots: list[int], positions: list[int], scores: Tensor) -> Tensor:
        """Penalise `scores` [n, V] at the positions of `slots` in both ways, which give the same bits."""
        columns = np.array([self.sequences[slot].columns() for slot in slots], dtype=PARAMETERS)
        rows = SamplingRows(
            parameters=columns, positions=np.array(positions), table_rows=np.array(slots)
        )
        groups = RowGroups.of(columns, num_candidates=8)
        result, expected = scores.clone(), scores.clone()
        self.ours.apply(result, rows, groups, None)
        self.plain.apply(expected, rows, groups, None)
        assert torch.equal(result.view(torch.int32), expected.view(torch.int32))
        return result


def scores_of(num_rows: int, seed: int, vocab: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, vocab, generator=generator) * 8
    values[torch.rand(num_rows, vocab, generator=generator) < 0.1] = -math.inf
    values[torch.rand(num_rows, vocab, generator=generator) < 0.1] = 0.0
    return values.to(DEVICE)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@settings(deadline=None, max_examples=60, derandomize=True)
@given(events)
def test_counts_by_slot_penalise_as_whole_sequences_do(
    drawn: list[tuple[str, int, int, Sampling]],
) -> None:
    both = Both()
    ends = dict.fromkeys(range(NUM_SLOTS), 0)
    for kind, slot, seed, parameters in drawn:
        random = np.random.default_rng(seed)
        if kind == "admit" or not ends[slot] or ends[slot] > LENGTH - 5:
            ids = random.integers(0, VOCAB, random.integers(1, 20)).tolist()
            both.admit(slot, ids, parameters)
            ends[slot] = len(ids)
        elif kind == "fail" and both.ours.counts is not None:
            # The epoch ends: the sequences come again as prompts, in slots that others had.
            slots = [place for place, end in ends.items() if end]
            for each in slots:
                both.ours.counts.forget(each)
            both.sequences = {
                to: both.sequences[of] for to, of in zip(slots, slots[::-1], strict=True)
            }
            both.table[slots] = both.table[slots[::-1]]
            ends |= {to: ends[of] for to, of in zip(slots, slots[::-1], strict=True)}
        running = [place for place, end in ends.items() if end]
        slots, positions = list(running), [ends[place] for place in running]
        if kind == "drafts":
            both.table[slot, ends[slot] : ends[slot] + 3] = torch.from_numpy(
                random.integers(0, VOCAB, 3).astype(np.int32)
            )
            slots, positions = (
                [*slots, slot, slot, slot],
                [*positions, *(ends[slot] + i for i in (2, 1, 3))],
            )
        both.check(slots, positions, scores_of(len(slots), seed))
        # The accepted tokens replace the draft tokens.
        for place in running:
            accepted = random.integers(0, VOCAB, 2 if kind == "drafts" else 1)
            both.table[place, ends[place] : ends[place] + len(accepted)] = torch.from_numpy(
                accepted.astype(np.int32)
            )
            ends[place] += len(accepted)


def test_a_step_counts_only_the_tokens_since_the_last_one() -> None:
    both = Both()
    kind = Sampling(presence_penalty=0.5)
    for slot, length in ((0, 30), (2, 11)):
        both.admit(slot, list(range(length)), kind)
    for step in range(3):
        positions = [30 + step, 11 + step]
        both.check([0, 2], positions, scores_of(2, step))
    assert both.kernels.counted == [41, 2, 2]
    # The same step once more has nothing to count; an earlier position is counted anew.
    both.check([0, 2], [32, 13], scores_of(2, 5))
    both.check([0, 2], [31, 13], scores_of(2, 5))
    assert both.kernels.counted == [41, 2, 2, 31]


def test_the_sequence_before_leaves_no_counts() -> None:
    both = Both()
    kind = Sampling(repetition_penalty=2.0)
    both.admit(1, [3, 3, 5], kind)
    both.check([1], [3], scores_of(1, 1))
    both.admit(1, [8, 9, 9, 9], kind)
    ones = torch.ones(1, VOCAB, device=DEVICE)
    assert both.check([1], [4], ones)[0].ne(1.0).nonzero().flatten().tolist() == [8, 9]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_scores_that_are_not_finite_stay_so(bad: float) -> None:
    both = Both()
    both.admit(0, [4, 4, 6], Sampling(repetition_penalty=2.0, presence_penalty=1.0))
    scores = torch.zeros(1, VOCAB, device=DEVICE)
    scores[0, 4] = bad
    result = both.check([0], [3], scores)
    assert not result[0, 4].isfinite()
    assert result[0].isfinite().sum() == VOCAB - 1


def test_long_prompts_and_vocabularies_take_several_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_penalties, "TOKENS_PER_PROGRAM", 16)
    monkeypatch.setattr(triton_penalties, "SCORES_PER_PROGRAM", 32)
    both = Both(vocab=100)
    ids = np.random.default_rng(0).integers(0, 100, 50).tolist()
    both.admit(3, ids, Sampling(frequency_penalty=0.7, openai_frequency_penalty=0.1))
    both.check([3], [50], scores_of(1, 2, vocab=100))
