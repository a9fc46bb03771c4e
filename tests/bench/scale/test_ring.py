"""Keys move only where they must."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from bench.scale.gateway import Ring

KEYS = [b"key %d" % number for number in range(4000)]


def firsts(num_members: int) -> list[int]:
    ring = Ring(num_members)
    return [next(ring.walk(key)) for key in KEYS]


def test_members_get_about_as_many_keys() -> None:
    counts = Counter(firsts(8))
    assert min(counts.values()) > 0.5 * len(KEYS) / 8
    assert max(counts.values()) < 1.6 * len(KEYS) / 8


def test_a_new_member_takes_keys_from_all_others_and_moves_no_other_key() -> None:
    before, after = firsts(8), firsts(9)
    moved = [b for b, a in zip(before, after, strict=True) if a != b]
    assert all(a == 8 for b, a in zip(before, after, strict=True) if a != b)
    assert 0.05 < len(moved) / len(KEYS) < 0.2
    assert set(moved) == set(range(8))


def test_a_walk_comes_to_every_member_once() -> None:
    assert sorted(Ring(30).walk(b"x")) == list(range(30))
    assert list(islice(Ring(5).walk(b"x"), 2)) == list(Ring(5).walk(b"x"))[:2]
