"""RequestSlots of requests: never more than there are, in order, and none lost to a caller that leaves."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.llm.async_llm import RequestSlots


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5), st.lists(st.integers(1, 8), min_size=1, max_size=12))
def test_all_get_their_places_and_give_them_back(
    data: st.DataObject, count: int, wanted: list[int]
) -> None:
    leaves = data.draw(st.sets(st.integers(0, len(wanted) - 1)))
    order: list[int] = []
    most: list[int] = []

    async def run() -> None:
        places, used = RequestSlots(count), 0

        async def work(number: int, size: int) -> None:
            nonlocal used
            async with places.taken(size):
                order.append(number)
                used += min(size, count)
                most.append(used)
                try:
                    await asyncio.sleep(0)
                finally:
                    used -= min(size, count)

        tasks = [asyncio.create_task(work(number, size)) for number, size in enumerate(wanted)]
        await asyncio.sleep(0)
        for number in leaves:
            tasks[number].cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
            async with places.taken(count):
                pass
        for number, task in enumerate(tasks):
            if not task.cancelled():
                task.result()
                assert number in order

    asyncio.run(run())
    assert order == sorted(order)
    assert max(most, default=0) <= count


async def test_places_that_are_given_to_one_who_leaves_go_to_the_next() -> None:
    places, got = RequestSlots(1), []

    async def work(number: int) -> None:
        async with places.taken(1):
            got.append(number)

    async with places.taken(1):
        first, second = (asyncio.create_task(work(number)) for number in (1, 2))
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert got == [2]
