from __future__ import annotations

import pytest

from millrace.simulate.simulated_request import Arrival, PrefixNames, SimulatedRequest


def request(
    request_id: int, prefixes: PrefixNames, *, group: str = "", prefix_tokens: int = 0
) -> SimulatedRequest:
    return SimulatedRequest(
        request_id,
        Arrival(0.0, 100, 10, group=group, prefix_tokens=prefix_tokens),
        max_new_tokens=50,
        block_size=16,
        prefixes=prefixes,
    )


def test_full_blocks_of_the_shared_prefix_have_the_names_of_the_group() -> None:
    prefixes = PrefixNames()
    one = request(1, prefixes, group="a", prefix_tokens=40).block_keys(5)
    other = request(2, prefixes, group="a", prefix_tokens=70).block_keys(6)
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other)
    assert len(set(one)) == 5
    assert len(set(other)) == 6


def test_groups_and_requests_share_nothing_else() -> None:
    prefixes = PrefixNames()
    keys = [
        *request(1, prefixes, group="a", prefix_tokens=96).block_keys(6),
        *request(2, prefixes, group="b", prefix_tokens=96).block_keys(6),
        *request(11, prefixes).block_keys(3),
        *request(1, prefixes).block_keys(13),
        *request(5, prefixes, group="1", prefix_tokens=32).block_keys(3),
        *request(6, prefixes, group="1/1", prefix_tokens=32).block_keys(3),
    ]
    assert len(keys) == len(set(keys))


def test_names_stay_whatever_was_asked_for_before() -> None:
    prefixes = PrefixNames()
    asked_often = request(1, prefixes, group="a", prefix_tokens=48)
    seen = [list(asked_often.block_keys(count)) for count in (1, 4, 2, 6)]
    at_once = request(1, PrefixNames(), group="a", prefix_tokens=48).block_keys(6)
    assert seen == [list(at_once[:count]) for count in (1, 4, 2, 6)]


def test_a_list_handed_out_does_not_grow() -> None:
    growing = request(1, PrefixNames())
    first = growing.block_keys(2)
    growing.block_keys(5)
    assert len(first) == 2


def test_the_answer_is_cut_at_what_may_be_generated() -> None:
    cut = SimulatedRequest(
        0,
        Arrival(0.0, 10, 900),
        max_new_tokens=50,
        block_size=16,
        prefixes=PrefixNames(),
    )
    assert cut.output_tokens == 50


@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_blocks_of_a_chain_are_equal_where_all_their_parts_are(block_size: int) -> None:
    def keys(chain: tuple[int, ...], number: int) -> list[bytes]:
        arrival = Arrival(0.0, 1500, 100, chain=chain, chain_tokens=512)
        request = SimulatedRequest(
            number, arrival, max_new_tokens=100, block_size=block_size, prefixes=PrefixNames()
        )
        return list(request.block_keys(1600 // block_size))

    one, other = keys((0, 1, 2), 1), keys((0, 1, 3), 2)
    equal = [a == b for a, b in zip(one, other, strict=True)]
    assert equal == [(place + 1) * block_size <= 1024 for place in range(len(one))]
    again = keys((0, 1, 2), 3)
    equal = [a == b for a, b in zip(one, again, strict=True)]
    assert equal == [(place + 1) * block_size <= 1500 for place in range(len(one))]
    assert len(set(one)) == len(one)
