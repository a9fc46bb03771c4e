"""Draws seeds for requests without one, and derives the seeds of several samples of one request."""

from __future__ import annotations

from hashlib import sha256
from random import SystemRandom

_random = SystemRandom()


def random_seed() -> int:
    """Draw a 64-bit number."""
    return _random.getrandbits(64)


def seed_of_sample(seed: int, index: int) -> int:
    """Return the seed of the sample `index`, from 0, of a request with `seed`.

    The first sample has `seed`. The others have the first 8 bytes of SHA-256 over `seed` and `index`; all numbers have
    8 bytes and are big-endian.
    """
    if index == 0:
        return seed
    return int.from_bytes(sha256(seed.to_bytes(8) + index.to_bytes(8)).digest()[:8])
