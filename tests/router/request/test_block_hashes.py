"""Keys of blocks: equal exactly when adapter, tokens and everything before them are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.request.block_hashes import BlockHashes, child_key, root_key

token_ids = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 2), max_size=24)


def keys(ids: list[int], size: int, adapter_id: str | None = None) -> list[bytes]:
    return list(BlockHashes(size, adapter_id).first(len(ids) // size, ids, []))


@given(token_ids, token_ids, st.integers(1, 5))
def test_chains_agree_exactly_as_far_as_their_full_blocks_do(
    one: list[int], two: list[int], size: int
) -> None:
    for i, (a, b) in enumerate(zip(keys(one, size), keys(two, size), strict=False), 1):
        assert (a == b) == (one[: i * size] == two[: i * size])


@given(token_ids, token_ids, st.integers(1, 5), st.data())
def test_generated_tokens_continue_the_prompt(
    prompt: list[int], generated: list[int], size: int, data: st.DataObject
) -> None:
    """However far the keys were asked for before, and wherever the prompt ends inside a block."""
    growing = BlockHashes(size)
    number = (len(prompt) + len(generated)) // size
    asked = data.draw(st.integers(0, len(prompt) // size))
    growing.first(asked, prompt, [])
    assert list(growing.first(number, prompt, generated)) == keys(prompt + generated, size)
    assert list(growing.first(asked, prompt, generated)) == keys(prompt, size)[:asked]


def test_equal_tokens_after_different_ones_have_other_keys() -> None:
    """KV depends on all that went before: a block is found by its whole past, not by its own tokens."""
    a, b = keys([1, 2, 7, 8], 2), keys([3, 4, 7, 8], 2)
    assert len({*a, *b}) == 4


def test_bounds_of_tokens_and_of_blocks_do_not_blur() -> None:
    """Ids of any size are written with the same width, so no two lists of them read alike."""
    assert child_key(root_key(), [1, 256]) != child_key(root_key(), [257, 0])
    assert child_key(root_key(), [1, 0]) != child_key(root_key(), [1])
    assert keys([1, 2, 3, 4], 4) != keys([1, 2, 3, 4], 2)[1:]


def test_adapters_share_nothing() -> None:
    ids = [1, 2, 3, 4]
    chains = [keys(ids, 2, adapter) for adapter in (None, "a", "b")]
    assert len({key for chain in chains for key in chain}) == 6


def test_hashes_are_long_enough_to_avoid_collisions() -> None:
    assert {len(key) for key in keys([1, 2, 3, 4], 1)} == {32}


def test_a_block_that_is_not_full_has_no_key() -> None:
    with pytest.raises(ValueError, match="not full"):
        BlockHashes(4).first(2, [1, 2, 3, 4, 5], [6, 7])


def test_a_salt_parts_all_blocks() -> None:
    """Each part counts in its place, and no parts together make another."""
    salts: list[tuple[str, ...]] = [(), ("", "a"), ("a", ""), ("a", "b"), ("b", "a"), ("ab", "")]
    found = [BlockHashes(2, None, salt).first(2, [1, 2, 3, 4], []) for salt in salts]
    assert len({key for some in found for key in some}) == 2 * len(salts)
    again = BlockHashes(2, None, ("a", "b")).first(2, [1, 2, 3, 4], [])
    assert list(again) == list(found[3])
