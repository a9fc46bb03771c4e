"""The agreement check of the operators on rows of scores: thresholds, counts, penalties and the most likely token.

Each is compared with a few lines of plain torch, which sort or read whole sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from millrace_shard.kernels.agreement import CPU, Random
from millrace_shard.kernels.scores import SCALE_BITS, SamplingKernels, choose_greedy

NUM_ROWS = 5
UNEVEN_VOCAB = 5003
"""More than one program of a kernel reads, and no multiple of a power of two."""
MASSES = (1e-6, 0.3, 0.6, 0.95, 1.0)
"""Shares of a row's probability."""
COUNTS = (1, 2, 50, 2000, 6000)
"""Numbers of kept keys."""
NUM_SLOTS, TABLE_LENGTH = 7, 1500
FEW_IDS = 60
"""Ids of sequences, so that some occur often."""
SLOTS = (6, 0, 3, 1, 4)
PROMPTS = (1, 700, 30, 1100, 900)
COUNTED = (0, 900, 40, 1101, 500)
LENGTHS = (1, 903, 40, 1102, 503)
"""Tokens of the sequences in SLOTS, of which the first ones are counted; the last sequence has no generated one."""
PENALTIES = (
    (1.3, 0.7, 1.0, 2.0, 1.1),
    (0.0, 30.0, -20.0, 12.0, 0.0),
    (0.0, 1.5, -1.0, 0.3, 0.7),
    (0.0, 0.0, 0.4, -0.2, 0.1),
)
"""Repetition, frequency, presence and OpenAI's frequency of NUM_ROWS rows."""

Pair = tuple[Tensor, Tensor]


def outputs(
    kernels: SamplingKernels, vocab_size: int = UNEVEN_VOCAB, device: torch.device = CPU
) -> Iterator[Pair]:
    """The output of each operator over rows of `vocab_size` scores, with plain torch's."""
    # The scores of a model in bfloat16 have ties.
    scores = (4 * Random(torch.bfloat16, device)(NUM_ROWS, vocab_size)).float()
    # The best score occurs twice.
    scores = scores.clamp(max=scores.topk(2).values[:, 1:])
    yield from _kept(kernels, scores)
    counts, pair = _counted(kernels, vocab_size, device)
    yield from pair
    yield _penalised(kernels, scores, counts)
    best = scores.amax(-1, keepdim=True)
    ids = torch.arange(vocab_size, device=device)
    first = torch.where(scores == best, ids, vocab_size).amin(-1)
    yield first == choose_greedy(scores).ids, torch.ones(NUM_ROWS, device=device)


def _kept(kernels: SamplingKernels, scores: Tensor) -> Iterator[Pair]:
    """The keys that top-p, typical-p and top-k keep."""
    probabilities = scores.softmax(-1)
    surprise = -scores.log_softmax(-1)
    typical = -(surprise - (probabilities * surprise).sum(-1, keepdim=True)).abs()
    masses = torch.tensor(MASSES, device=scores.device).unsqueeze(1)
    numbers = torch.tensor(COUNTS, device=scores.device).unsqueeze(1)
    weights = (probabilities.double() * 2**SCALE_BITS).long()
    budgets = (masses.double() * weights.sum(-1, keepdim=True)).ceil().long().clamp(min=1)
    for keys in (scores, typical):
        thresholds = kernels.find_threshold(keys, probabilities, masses)
        yield keys >= thresholds, _kept_by_sorting(keys, weights, budgets)
    thresholds = kernels.find_threshold(scores, None, numbers)
    yield scores >= thresholds, _kept_by_sorting(scores, torch.ones_like(weights), numbers)


def _kept_by_sorting(keys: Tensor, weights: Tensor, budgets: Tensor) -> Tensor:
    """Whether the keys above each one weigh less than the budget."""
    best = keys.sort(dim=-1, descending=True)
    heavy = weights.gather(1, best.indices)
    is_kept = heavy.cumsum(-1) - heavy < budgets
    least = best.values.masked_fill(~is_kept, torch.inf).amin(-1, keepdim=True)
    return keys >= least


def _table(vocab_size: int, device: torch.device) -> Tensor:
    """The tokens of all slots."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(FEW_IDS, (NUM_SLOTS, TABLE_LENGTH), generator=generator)
    # The ids are spread over all programs of a kernel.
    return (ids * (vocab_size - 1) // (FEW_IDS - 1)).int().to(device)


def _occurrences(tokens: Tensor, vocab_size: int) -> Tensor:
    """How often each id occurs in `tokens`: [vocab_size] int64."""
    return torch.bincount(tokens.long().cpu(), minlength=vocab_size).to(tokens.device)


def _counted(
    kernels: SamplingKernels, vocab_size: int, device: torch.device
) -> tuple[Tensor, tuple[Pair, Pair]]:
    """The counts of the counted tokens; then all tokens and generated ones of each id, with plain torch's."""
    table = _table(vocab_size, device)
    counts = torch.zeros(NUM_SLOTS, vocab_size, dtype=torch.int64, device=device)
    spans = torch.tensor([SLOTS, (0,) * NUM_ROWS, COUNTED, PROMPTS], device=device)
    kernels.count_tokens(counts, table, spans, max(COUNTED))
    in_all, generated = torch.zeros_like(counts), torch.zeros_like(counts)
    for slot, counted, prompt in zip(SLOTS, COUNTED, PROMPTS, strict=True):
        in_all[slot] = _occurrences(table[slot, :counted], vocab_size)
        generated[slot] = _occurrences(table[slot, prompt : max(prompt, counted)], vocab_size)
    halves = (counts & (2**32 - 1), in_all), (counts >> 32, generated)
    return in_all + (generated << 32), halves


def _penalised(kernels: SamplingKernels, scores: Tensor, counts: Tensor) -> Pair:
    device, vocab_size = scores.device, scores.shape[1]
    table = _table(vocab_size, device)
    penalties = torch.tensor(PENALTIES, device=device)
    # Rows of scores in another order than the sequences.
    indexes = tuple(reversed(range(NUM_ROWS)))
    rows = torch.tensor([indexes, SLOTS, COUNTED, LENGTHS, PROMPTS], device=device)
    actual, expected = scores.clone(), scores.clone()
    kernels.penalise(actual, counts, table, rows, penalties)
    for index, slot, length, prompt, factors in zip(
        indexes, SLOTS, LENGTHS, PROMPTS, penalties.t(), strict=True
    ):
        repetition, frequency, presence, openai_frequency = factors
        in_all = _occurrences(table[slot, :length], vocab_size)
        generated = _occurrences(table[slot, prompt : max(prompt, length)], vocab_size)
        row = scores[index]
        changed = torch.where(row < 0, row * repetition, row / repetition)
        changed = changed - frequency * in_all / length - presence * (generated > 0)
        changed = changed - openai_frequency * generated
        expected[index] = torch.where(in_all > 0, changed, row)
    return actual, expected
