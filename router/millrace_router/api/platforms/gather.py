"""Runs the several generations of one request at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from millrace_router.errors import BatchSizeExceeded
from millrace_router.request.limits import Limits

Result = TypeVar("Result")


def check_count(count: int, limits: Limits) -> None:
    """Refuse more generations than there are permits; raises BatchSizeExceeded."""
    if count > limits.max_concurrent_requests:
        raise BatchSizeExceeded(limits.max_concurrent_requests)


async def gather(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all at once; the first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
