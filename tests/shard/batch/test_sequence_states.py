"""Pages of states by slot, and the tokens after which a step copies them."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.sequence_states import SequenceStates, StateSaves
from millrace_shard.errors import StepInvalid
from millrace_shard.kernels.kv_store import KVStore
from millrace_shard.kernels.states import StateLayer

CPU = torch.device("cpu")
PAGES = 6


def states() -> SequenceStates:
    layer = StateLayer(2, 8, (1, 4, 4)).new(PAGES, torch.float32, CPU)
    for page in range(PAGES):
        layer.state[page] = page
    return SequenceStates(4, (layer,), CPU)


def sequence(slot: int, page: int, restored: int = 0) -> Sequence:
    ids = np.arange(5)
    return Sequence(
        slot=slot, request_id=slot, input_ids=ids, state_page=page, restored_page=restored
    )


def saves(*rows: tuple[int, int, int]) -> StateSaves:
    return StateSaves(*np.array(rows).T)


def first_values(kept: SequenceStates) -> list[float]:
    return [float(page[0, 0, 0]) for page in kept._layers[0].state]


def test_a_page_begins_with_zeros_or_with_a_copy() -> None:
    kept = states()
    kept.admit(sequence(0, 3))
    kept.admit(sequence(1, 2, restored=5))
    kept.admit(sequence(2, 4, restored=4))
    assert first_values(kept) == [0, 1, 5, 0, 4, 5]


def test_copies_are_addressed_by_token() -> None:
    kept = states()
    kept.admit(sequence(0, 3))
    kept.admit(sequence(2, 1))
    kept.save(saves((2, 8, 5), (0, 3, 4), (1, 7, 2)))
    rows = kept.rows(np.array([0, 2]), np.array([2, 4]), np.array([1, 4]))
    assert rows is not None
    assert rows.pages.tolist() == [3, 1]
    assert rows.saved.tolist() == [4, -1, -1, -1, 5]
    again = kept.rows(np.array([0]), np.array([3]))
    assert again is not None
    assert len(again.saved) == 0


@pytest.mark.parametrize(
    ("page", "restored", "reason"),
    [(0, 0, "has no page"), (PAGES, 0, "numbered 1 to 5"), (1, PAGES, "numbered 1 to 5")],
)
def test_pages_that_do_not_exist_are_refused(page: int, restored: int, reason: str) -> None:
    with pytest.raises(StepInvalid, match=reason):
        states().check(sequence(0, page, restored))


def test_a_page_of_another_sequence_is_refused() -> None:
    kept = states()
    kept.admit(sequence(0, 3))
    with pytest.raises(StepInvalid, match="belongs to another sequence"):
        kept.admit(sequence(1, 3))
    with pytest.raises(StepInvalid, match="not free"):
        kept.save(saves((0, 3, 3)))
    kept.drop(np.array([0]))
    kept.admit(sequence(1, 3))


@pytest.mark.parametrize("page", [0, PAGES])
def test_a_copy_to_no_page_is_refused(page: int) -> None:
    with pytest.raises(StepInvalid, match="not free"):
        states().save(saves((0, 3, page)))


@pytest.mark.parametrize("position", [2, 4])
def test_a_copy_at_a_position_of_another_step_is_refused(position: int) -> None:
    kept = states()
    kept.admit(sequence(0, 3))
    kept.save(saves((0, position, 1)))
    with pytest.raises(StepInvalid, match=f"no state at position {position}"):
        kept.rows(np.array([0]), np.array([2]), np.array([1]))


def test_a_page_has_no_name_before_it_is_written_to() -> None:
    kept, fd = states(), os.memfd_create("test")
    store = KVStore(fd)
    (layer,) = kept._layers
    store.tensors(layer.tensors, "states", firsts=[100, 100])
    store.begin(7)
    store.hand_out(np.array([103, 104]), [1, 1])
    store.seal(np.array([103, 104]), [bytes(32), bytes(32)])
    kept.keep_in(store, 100)
    store.generation = 12
    kept.admit(sequence(0, 3))
    kept.admit(sequence(1, 2))
    kept.save(saves((1, 5, 4)))
    directory = store.directory()
    os.close(fd)
    columns = directory.blocks, directory.owners, directory.generations, directory.keys
    assert list(zip(*(list(each) for each in columns), strict=True)) == [
        (102, 1, 12, b""),
        (103, 0, 12, b""),
        (104, 1, 12, b""),
    ]
