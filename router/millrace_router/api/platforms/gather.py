"""Several generations that one request asks for, each on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from millrace_router.errors import BatchSizeExceeded
from millrace_router.request.limits import Limits

Result = TypeVar("Result")


def check_count(count: int, limits: Limits) -> None:
    """Refuse what could never run together, since each takes a permit; raises BatchSizeExceeded."""
    if count > limits.max_concurrent_requests:
        raise BatchSizeExceeded(limits.max_concurrent_requests)


async def together(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Do all at once; the first failure ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
