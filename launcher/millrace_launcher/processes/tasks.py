"""Runs coroutines until the first one ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def first(*coroutines: Coroutine[Any, Any, Any]) -> int:
    """Run all until one ends, cancel the others, and return its index. Its exception is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        place = next(place for place, task in enumerate(tasks) if task.done())
        tasks[place].result()
        return place
    finally:
        await cancel(tasks)


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait; their exceptions are ignored."""
    found = list(tasks)
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)
