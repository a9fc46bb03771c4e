"""KV of a killed process is there for the next one, and whatever is not as it should be is not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.kernels import kv_store
from millrace_shard.kernels.kv_store import DIRECTORY_AT, ENTRY, Directory, KVStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")

KEYS = [bytes([number]) * 32 for number in range(1, 10)]
NAME, LIFE = "kernels of a test", 77


def like(num_blocks: int = 9, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Keys and values of two layers, the second with codes."""
    plain = torch.empty(num_blocks, 2, 4, 8, dtype=dtype)
    codes = torch.empty(num_blocks, 3, 4, 8, dtype=torch.float8_e4m3fn)
    return [plain, plain.clone(), codes, codes.clone()]


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def filled(fd: int, *, verifies: bool = False) -> list[Tensor]:
    """The tensors of a store with block 3 sealed, and block 5 open."""
    store = KVStore(fd, verifies=verifies)
    tensors = store.tensors(like(), NAME)
    store.begin(LIFE)
    store.generation = 1001
    store.hand_out(ints(3, 5), [40, 41])
    for value, each in enumerate(tensors, start=1):
        each[3].fill_(value)
    store.seal(ints(3), KEYS[:1])
    return tensors


def reopened(fd: int, name: str = NAME, **options: bool) -> tuple[Directory, list[Tensor]]:
    store = KVStore(fd, **options)
    tensors = store.tensors(like(), name)
    return store.directory(), tensors


def rows(directory: Directory) -> dict[int, tuple[int, int, bytes]]:
    columns = directory.blocks, directory.owners, directory.generations, directory.keys
    return {int(b): (int(o), int(g), k) for b, o, g, k in zip(*columns, strict=True)}


def test_values_and_directory_are_there_for_the_next_store(fd: int) -> None:
    filled(fd)
    directory, tensors = reopened(fd)
    assert directory.life == LIFE
    assert rows(directory) == {3: (40, 1001, KEYS[0]), 5: (41, 1001, b"")}
    for value, (each, model) in enumerate(zip(tensors, like(), strict=True), start=1):
        assert (each.shape, each.dtype) == (model.shape, model.dtype)
        assert (each[3].float() == value).all()
        assert (each[4].float() == 0).all()


def test_tensors_do_not_overlap_each_other_or_the_directory(fd: int) -> None:
    store = KVStore(fd)
    tensors = store.tensors(like(), NAME)
    store.begin(LIFE)
    store.hand_out(np.arange(9), list(range(9)))
    for value, each in enumerate(tensors, start=1):
        each.fill_(value)
    for value, each in enumerate(tensors, start=1):
        assert (each.float() == value).all()
    assert len(store.directory().blocks) == 9


def test_only_touched_blocks_take_memory(fd: int) -> None:
    store = KVStore(fd)
    tensors = store.tensors([torch.empty(1000, 1 << 12) for _ in range(2)], NAME)
    assert store.resident_bytes < 1 << 20
    tensors[0][7].fill_(1)
    assert store.resident_bytes < 2 << 20


@pytest.mark.parametrize("at", range(40))
def test_a_flipped_bit_of_the_header_empties_the_store(fd: int, at: int) -> None:
    filled(fd)
    (byte,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte ^ 1]), at)
    directory, tensors = reopened(fd)
    assert (directory.life, rows(directory)) == (0, {})
    assert not any(each.float().any() for each in tensors)


@pytest.mark.parametrize("change", [-1, 1, -(1 << 30)])
def test_a_file_of_another_size_is_emptied(fd: int, change: int) -> None:
    filled(fd)
    os.ftruncate(fd, max(0, os.fstat(fd).st_size + change))
    directory, tensors = reopened(fd)
    assert (directory.life, rows(directory)) == (0, {})
    assert not any(each.float().any() for each in tensors)


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("other kernels", like()),
        (NAME, like(10)),
        (NAME, like(9, torch.float16)),
        (NAME, like()[:2]),
    ],
)
def test_another_layout_is_emptied(fd: int, name: str, tensors: list[Tensor]) -> None:
    filled(fd)
    store = KVStore(fd)
    store.tensors(tensors, name)
    assert rows(store.directory()) == {}


def test_the_same_layout_in_the_same_process_is_left_alone(fd: int) -> None:
    store = KVStore(fd)
    first = store.tensors(like(), NAME)
    first[1][4].fill_(2)
    assert store.tensors(like(), NAME) is first
    store.tensors(like(10), NAME)
    assert not store.tensors(like(), NAME)[1].any()


@pytest.mark.parametrize("life", [LIFE + 1, 0])
def test_other_books_empty_the_directory(fd: int, life: int) -> None:
    filled(fd)
    store = KVStore(fd)
    store.tensors(like(), NAME)
    store.begin(LIFE)
    assert set(rows(store.directory())) == {3, 5}
    store.begin(life)
    assert (store.directory().life, rows(store.directory())) == (life, {})


def test_a_block_that_is_handed_out_again_has_no_key(fd: int) -> None:
    filled(fd)
    store = KVStore(fd)
    store.tensors(like(), NAME)
    store.generation = 1002
    store.hand_out(ints(3), [42])
    assert rows(store.directory()) == {3: (42, 1002, b""), 5: (41, 1001, b"")}


def test_an_unsealed_block_stays_with_its_owner(fd: int) -> None:
    filled(fd)
    store = KVStore(fd)
    store.tensors(like(), NAME)
    store.unseal(ints(3, 5, 7))
    assert rows(store.directory()) == {3: (40, 1001, b""), 5: (41, 1001, b"")}


@pytest.mark.parametrize("layer", range(4))
def test_a_changed_byte_is_seen_with_checksums_only(fd: int, layer: int) -> None:
    tensors = filled(fd, verifies=True)
    assert set(rows(reopened(fd, verifies=True)[0])) == {3, 5}
    tensors[layer].view(torch.uint8)[3, 1, 2, 3] ^= 1
    assert set(rows(reopened(fd)[0])) == {3, 5}
    assert set(rows(reopened(fd, verifies=True)[0])) == {5}


def killed_at(line: int, call: Callable[[], None]) -> bool:
    """Whether a process that is killed before the `line`-th line of the store was killed before the end of `call`."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            if frame.f_code.co_filename != kv_store.__file__:
                return None
            if event == "line":
                count += 1
                if count == line:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        call()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def test_a_kill_at_any_line_leaves_the_former_entry_or_the_new_one_or_no_key(fd: int) -> None:
    filled(fd)
    store = KVStore(fd)
    store.tensors(like(), NAME)
    store.generation = 1002

    def change() -> None:
        store.hand_out(ints(3), [42])
        store.seal(ints(3), KEYS[1:2])

    line, seen = 1, set()
    while True:
        before = os.pread(fd, 9 * ENTRY.itemsize, DIRECTORY_AT)
        is_killed = killed_at(line, change)
        seen.add(rows(reopened(fd)[0]).get(3))
        os.pwrite(fd, before, DIRECTORY_AT)
        if not is_killed:
            break
        line += 1
    assert line > 8
    assert seen == {(40, 1001, KEYS[0]), None, (42, 1002, b""), (42, 1002, KEYS[1])}


def test_blocks_of_groups_have_numbers_of_their_own_in_the_directory(fd: int) -> None:
    store = KVStore(fd, verifies=True)
    sizes, firsts = (9, 5), [0, 0, 9, 9]
    layers = [torch.empty(size, 2, 4) for size in sizes for _ in range(2)]
    tensors = store.tensors(layers, NAME, firsts=firsts)
    store.begin(LIFE)
    store.hand_out(ints(3, 11), [40, 41])
    for each in tensors:
        each.fill_(1.0)
    store.seal(ints(3, 11), KEYS[:2])
    other = KVStore(fd, verifies=True)
    again = other.tensors(layers, NAME, firsts=firsts)
    assert other.directory().blocks.tolist() == [3, 11]
    again[0][2].fill_(2.0)
    assert other.directory().blocks.tolist() == [3, 11]
    again[3][2].fill_(2.0)
    assert other.directory().blocks.tolist() == [3]
    again[1][3].fill_(2.0)
    assert other.directory().blocks.tolist() == []


def test_a_store_with_other_groups_begins_anew(fd: int) -> None:
    layers = [torch.empty(9, 2, 4), torch.empty(5, 2, 4)]
    store = KVStore(fd)
    store.tensors(layers, NAME, firsts=[0, 9])
    store.begin(LIFE)
    store.hand_out(ints(3), [40])
    other = KVStore(fd)
    other.tensors(layers, NAME, firsts=[0, 0])
    assert other.directory().life == 0


def test_tensors_without_values_are_left_out(fd: int) -> None:
    tensors = [torch.empty(9, 0), *like(), torch.empty(9, 0, 4)]
    KVStore(fd).tensors(tensors, NAME)[1][4].fill_(2)
    again = KVStore(fd).tensors(tensors, NAME)
    assert [each.shape for each in again] == [each.shape for each in tensors]
    assert (again[1][4] == 2).all()
