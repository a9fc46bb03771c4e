"""Consistent hashing: a key keeps its member while other members come and go."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from hashlib import blake2b

POINTS = 64
"""Points of a member on the ring; more divide keys more evenly."""


def hashed(key: bytes) -> int:
    """64 bits of a hash of `key`, the same in every process."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


class Ring:
    """Members 0 … n - 1 at points of a ring.

    Rings of different names place a key independently of each other. With one name, the keys of a member of one ring
    would be near a few members of the other.
    """

    def __init__(self, num_members: int, name: bytes = b"") -> None:
        self._name = name
        points = sorted(
            (hashed(b"%d/%d" % (member, point)), member)
            for member in range(num_members)
            for point in range(POINTS)
        )
        self._places = [place for place, _ in points]
        self._members = [member for _, member in points]
        self._num_members = num_members

    def walk(self, key: bytes) -> Iterator[int]:
        """Yield every member once, in the order in which `key` prefers them."""
        start, members, seen = (
            bisect_right(self._places, hashed(self._name + key)),
            self._members,
            set[int](),
        )
        for place in range(start, start + len(members)):
            member = members[place % len(members)]
            if member not in seen:
                seen.add(member)
                yield member
                if len(seen) == self._num_members:
                    return
