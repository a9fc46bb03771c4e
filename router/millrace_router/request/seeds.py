"""Seeds: drawn where a client gives none, and derived where one request is sampled several times."""

from __future__ import annotations

from hashlib import sha256
from random import SystemRandom

_random = SystemRandom()


def random_seed() -> int:
    """Any 64-bit number."""
    return _random.getrandbits(64)


def seed_of_sample(seed: int, index: int) -> int:
    """Seed of the sample `index`, from 0, of a request with `seed`: the first sample has the request's own.

    That of any other is the first 8 bytes of SHA-256 over `seed` and `index`, all numbers of 8 bytes and big-endian.
    """
    if index == 0:
        return seed
    return int.from_bytes(sha256(seed.to_bytes(8) + index.to_bytes(8)).digest()[:8])
