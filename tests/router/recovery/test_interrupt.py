"""Ending a wait from outside."""

from __future__ import annotations

import asyncio

import pytest

from millrace_router.recovery.epochs import Interrupt


class Trouble(Exception):  # noqa: N818
    pass


async def test_a_wait_ends_with_the_error() -> None:
    interrupt = Interrupt()
    asyncio.get_running_loop().call_soon(interrupt.trigger, Trouble("first"))
    with pytest.raises(Trouble, match="first"):
        async with interrupt:
            await asyncio.Event().wait()
    async with interrupt:
        await asyncio.sleep(0)


async def test_a_trigger_outside_the_context_ends_the_next_one_once() -> None:
    interrupt = Interrupt()
    interrupt.trigger(Trouble("first"))
    interrupt.trigger(Trouble("second"))
    with pytest.raises(Trouble, match="first"):
        async with interrupt:
            pytest.fail("entered")
    async with interrupt:
        await asyncio.sleep(0)


async def test_errors_of_the_inside_and_cancellation_come_out_as_they_are() -> None:
    interrupt = Interrupt()
    with pytest.raises(TimeoutError, match="own"):
        async with interrupt:
            raise TimeoutError("own")

    async def wait() -> None:
        async with interrupt:
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
