"""A reference of each sampling parameter for one row in float64 Python; the vectorised code is compared with it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from millrace_proto.sampling import Dry, Sampling

Scores = list[float]
WORD = (1 << 32) - 1
LONG = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence at the moment its next token is chosen."""

    logits: Scores
    prompt: list[int]
    generated: list[int]
    parameters: Sampling
    min_new_tokens: int = 0
    eos: tuple[int, ...] = ()
    allowed: frozenset[int] | None = None
    """The tokens that the grammar allows; None without a grammar."""
    gamma: float = 0.5
    delta: float = 2.0

    @property
    def position(self) -> int:
        """The number of tokens."""
        return len(self.prompt) + len(self.generated)


def processed(row: Row) -> Scores:
    """Scores after watermark, penalties, bias, mask and the ban on ending, in this order."""
    p, history = row.parameters, row.prompt + row.generated
    scores = list(row.logits)
    if p.watermark:
        for id_ in range(len(scores)):
            scores[id_] += row.delta if is_green(history[-1], id_, row.gamma) else 0.0
    for id_ in set(history):
        scores[id_] *= p.repetition_penalty if scores[id_] < 0 else 1 / p.repetition_penalty
    for id_ in set(history):
        scores[id_] -= p.frequency_penalty * history.count(id_) / len(history)
    for id_ in set(row.generated):
        scores[id_] -= p.presence_penalty + p.openai_frequency_penalty * row.generated.count(id_)
    for id_, value in p.bias:
        scores[id_] += value
    scores = ruled(row, scores)
    if row.allowed is not None:
        scores = [s if id_ in row.allowed else -math.inf for id_, s in enumerate(scores)]
    if len(row.generated) < row.min_new_tokens:
        going_on = [-math.inf if id_ in row.eos else s for id_, s in enumerate(scores)]
        if row.allowed is None or max(going_on) > -math.inf:
            scores = going_on
    return scores


def warped(row: Row) -> Scores:
    """Scores after all that, temperature, top-k, top-p, typical-p and min-p."""
    p = row.parameters
    scores = processed(row)
    if p.top_n_sigma > 0:
        possible = [score for score in scores if score > -math.inf]
        least = max(scores) - p.top_n_sigma * statistics.pstdev(possible)
        scores = [score if score >= least else -math.inf for score in scores]
    scores = [score / p.temperature for score in scores]
    if p.top_k:
        kth = sorted(scores, reverse=True)[min(p.top_k, len(scores)) - 1]
        scores = [score if score >= kth else -math.inf for score in scores]
    if p.top_p < 1:
        scores = keep_mass(scores, scores, p.top_p)
    if p.typical_p < 1:
        probs = probabilities(scores)
        entropy = -sum(q * math.log(q) for q in probs if q > 0)
        keys = [-abs(-math.log(q) - entropy) if q > 0 else -math.inf for q in probs]
        scores = keep_mass(scores, keys, p.typical_p)
    if p.min_p > 0:
        probs = probabilities(scores)
        least = p.min_p * max(probs)
        scores = [s if q >= least else -math.inf for s, q in zip(scores, probs, strict=True)]
    uniform = splitmix64(p.seed, row.position) >> 40
    if murmur_mix(uniform) >> 8 < p.xtc_probability * 2**24:
        probs = probabilities(scores)
        pairs = zip(scores, probs, strict=True)
        choices = [q for s, q in pairs if q >= p.xtc_threshold and s > -math.inf]
        if len(choices) > 1:
            pairs = zip(scores, probs, strict=True)
            scores = [-math.inf if q > min(choices) else s for s, q in pairs]
    return scores


def ruled(row: Row, scores: Scores) -> Scores:
    """Scores after the rules of the sequence."""
    rules, history = row.parameters.rules, row.prompt + row.generated
    if rules.dry is not None:
        scores = dried(rules.dry, history, scores)
    if rules.allowed_ids:
        scores = [s if id_ in rules.allowed_ids else -math.inf for id_, s in enumerate(scores)]
    for *beginning, last in rules.bad_words:
        if row.generated[len(row.generated) - len(beginning) :] == beginning:
            scores[last] = -math.inf
    if len(row.generated) < row.min_new_tokens and row.allowed is None:
        scores = [-math.inf if id_ in rules.stop_ids else s for id_, s in enumerate(scores)]
    return scores


def dried(dry: Dry, history: list[int], scores: Scores) -> Scores:
    """The definition, with lists: which passage before each token is also the end of the sequence."""
    history = history[-dry.window :] if dry.window else history
    longest: dict[int, int] = {}
    for i in range(1, len(history)):
        length = 0
        while length < i and length < 50:
            one, other = history[i - 1 - length], history[-1 - length]
            if one != other or one in dry.breakers:
                break
            length += 1
        if history[i] not in dry.breakers:
            longest[history[i]] = max(longest.get(history[i], 0), length)
    scores = list(scores)
    for id_, length in longest.items():
        if length >= max(dry.allowed_length, 1):
            scores[id_] -= dry.multiplier * dry.base ** (length - dry.allowed_length)
    return scores


def keep_mass(scores: Scores, keys: Scores, mass: float) -> Scores:
    """Tokens in descending order of key until their mass is reached; equal keys stay together."""
    probs = probabilities(scores)
    total, cut = 0.0, math.inf
    for i in sorted(range(len(keys)), key=lambda i: -keys[i]):
        if total >= mass:
            break
        total, cut = total + probs[i], keys[i]
    return [score if key >= cut else -math.inf for score, key in zip(scores, keys, strict=True)]


def probabilities(scores: Sequence[float]) -> list[float]:
    """Softmax."""
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def log_probabilities(scores: Sequence[float]) -> list[float]:
    """Log-softmax; minus infinity for what cannot be drawn."""
    return [math.log(q) if q > 0 else -math.inf for q in probabilities(scores)]


def splitmix64(seed: int, position: int) -> int:
    """The generator's output for the (position + 1)-th call after `seed`."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & LONG
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & LONG
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & LONG
    return z ^ (z >> 31)


def inverse_cdf(probs: Sequence[float], uniform: float) -> int:
    """The first index whose cumulative probability exceeds `uniform`."""
    total = 0.0
    for i, q in enumerate(probs):
        total += q
        if total > uniform:
            return i
    return max(i for i, q in enumerate(probs) if q > 0)


def is_green(previous: int, id_: int, gamma: float) -> bool:
    """Whether the watermark favours `id_` after `previous`, by docs/sampling.md."""
    key = murmur_mix(15485863 * previous & WORD)
    return murmur_mix(murmur_mix(id_) ^ key) >> 8 < gamma * 2**24


def murmur_mix(word: int) -> int:
    """The last step of MurmurHash3 on 32 bits."""
    word ^= word >> 16
    word = word * 0x85EBCA6B & WORD
    word ^= word >> 13
    word = word * 0xC2B2AE35 & WORD
    return word ^ (word >> 16)
