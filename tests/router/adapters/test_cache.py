"""Evictions from the adapter cache, and its state for a new process."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from millrace_router.adapters.cache import KEPT_SECONDS, AdapterCache


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def digest(number: int) -> str:
    return f"{number:064x}"


def put(folder: Path, number: int, size: int) -> None:
    (folder / digest(number)).mkdir(parents=True)
    path = folder / digest(number) / "adapter.safetensors"
    path.write_bytes(b"x" * size)
    os.utime(path, (number, number))


def test_an_earlier_process_left_versions_and_rests(tmp_path: Path) -> None:
    for number, size in ((3, 30), (1, 10), (2, 20)):
        put(tmp_path, number, size)
    (tmp_path / ".partial-x").mkdir()
    (tmp_path / ".partial-x" / "adapter.safetensors").write_bytes(b"x")
    (tmp_path / ("f" * 32)).mkdir()
    (tmp_path / digest(9)).mkdir()
    (tmp_path / "notes.txt").write_text("of the operator")
    cache = AdapterCache(tmp_path, max_bytes=35, clock=Clock())
    cache.open()
    assert cache.num_bytes == 60
    assert not (tmp_path / ".partial-x").exists()
    assert cache.evict(()) == [digest(1), digest(2)]
    assert cache.num_bytes == 30
    cache.delete([digest(1), digest(2)])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"f" * 32, digest(9), digest(3), "notes.txt"}


def test_a_version_whose_file_was_removed_is_not_there(tmp_path: Path) -> None:
    put(tmp_path, 1, 10)
    cache = AdapterCache(tmp_path, max_bytes=35, clock=Clock())
    assert not cache.touch(digest(1))
    cache.open()
    assert cache.touch(digest(1))
    (tmp_path / digest(1) / "adapter.safetensors").unlink()
    assert not cache.touch(digest(1))
    assert cache.num_bytes == 0


def test_a_folder_is_made(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path / "a" / "b", max_bytes=1, clock=Clock())
    cache.open()
    assert (tmp_path / "a" / "b").is_dir()


def test_the_least_recently_used_leave_first() -> None:
    clock = Clock()
    cache = AdapterCache(Path("unused"), max_bytes=20, clock=clock)
    for number in (1, 2, 3):
        cache.use(digest(number), 10)
        clock.now += 1
    cache.use(digest(1), 10)
    assert cache.evict(()) == []
    clock.now += KEPT_SECONDS
    assert cache.evict(()) == [digest(2)]
    assert digest(1) in cache
    assert digest(3) in cache


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=30),
    st.sets(st.integers(0, 9)),
    st.integers(0, 60),
)
def test_nothing_needed_leaves_and_the_rest_fits(
    uses: list[tuple[int, int]], needed: set[int], max_bytes: int
) -> None:
    clock = Clock()
    cache = AdapterCache(Path("unused"), max_bytes=max_bytes, clock=clock)
    sizes: dict[str, int] = {}
    for number, size in uses:
        cache.use(digest(number), size)
        sizes[digest(number)] = size
    clock.now += KEPT_SECONDS
    kept = {digest(number) for number in needed}
    victims = cache.evict(kept)
    assert not kept & set(victims)
    assert len(victims) == len(set(victims))
    left = sizes.keys() - set(victims)
    assert cache.num_bytes == sum(sizes[one] for one in left)
    assert cache.num_bytes <= max_bytes or left <= kept
