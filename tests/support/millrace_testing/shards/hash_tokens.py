"""The expected tokens of the hash shard, computed from whole sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace_testing.adapters.fake_adapters import seed_of

VOCAB_SIZE = 97
EOS_TOKEN_ID = 96
POISON_TOKEN_ID = 95
"""Never generated; the KV of every context with this token is not finite."""
MODULUS = (1 << 61) - 1


def extend(digest: int, token_id: int, position: int) -> int:
    """The digest of a context extended by `token_id` at `position`."""
    return (digest * 1_000_003 + token_id * 65_537 + position + 1) % MODULUS


def fold(folded: int, digest: int, position: int) -> int:
    """The combined digest of a context, extended by the digest at `position`."""
    return extend(folded, digest % 8191, position)


def choose(context: int, *, seed: int, num_prompt: int, eos_every: int, may_end: bool) -> int:
    """The token after a folded context: the end of sequence for one in `eos_every` contexts (0: for none)."""
    value = extend(extend(context, seed % MODULUS, 3), num_prompt, 5)
    if eos_every and may_end and value % eos_every == 0:
        return EOS_TOKEN_ID
    return value // 64 % POISON_TOKEN_ID


def root(adapter: str) -> int:
    """The digest of the empty context; it depends on the digest of the adapter, "" for the base model."""
    return seed_of(adapter) % MODULUS


def expected_tokens(
    prompt: Sequence[int],
    count: int,
    *,
    adapter: str = "",
    seed: int = 0,
    eos_every: int = 0,
    min_new_tokens: int = 0,
    images: Mapping[int, int] | None = None,
) -> list[int]:
    """The tokens of a request that runs alone: `count`, or fewer if the end of sequence is among them.

    `images` has the feature of each position in an image.
    """
    features = images or {}
    digest, folded = root(adapter), 0
    generated: list[int] = []
    for position, token_id in enumerate(prompt):
        digest = extend(digest, token_id + features.get(position, 0), position)
        folded = fold(folded, digest, position)
    while len(generated) < count and EOS_TOKEN_ID not in generated:
        generated.append(
            choose(
                folded,
                seed=seed,
                num_prompt=len(prompt),
                eos_every=eos_every,
                may_end=len(generated) >= min_new_tokens,
            )
        )
        position = len(prompt) + len(generated) - 1
        digest = extend(digest, generated[-1], position)
        folded = fold(folded, digest, position)
    return generated


def score(digest: int) -> float:
    """The log probability of the token after a context; exact in float32."""
    return -(digest % 4096) / 64


def candidates(digest: int, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens after a context, and their log probabilities; exact in float32."""
    return [(digest % 997 + i, score(digest) - i / 4) for i in range(count)]


def expected_prompt_candidates(
    prompt: Sequence[int], count: int, adapter: str = ""
) -> list[list[tuple[int, float]]]:
    """Candidates of every prompt token but the first."""
    digest, found = root(adapter), []
    for position, token_id in enumerate(prompt[:-1]):
        digest = extend(digest, token_id, position)
        found.append(candidates(digest, count))
    return found


def expected_prompt_logprobs(prompt: Sequence[int], adapter: str = "") -> list[float]:
    """Log probabilities of every prompt token but the first."""
    digest, logprobs = root(adapter), []
    for position, token_id in enumerate(prompt[:-1]):
        digest = extend(digest, token_id, position)
        logprobs.append(score(digest))
    return logprobs


def pooled_values(prompt: Sequence[int], logit_ids: Sequence[int]) -> list[float]:
    """What a prompt yields that is pooled: a state of two numbers, or the logits of some ids."""
    return [float(expected_tokens(prompt, 1, seed=seed)[0]) for seed in logit_ids or (1, 2)]
