"""Errors with the platforms' own types: KServe's always, Vertex AI's with `--strict-tgi`.

RouterError
├── NotUtf8                422  utf8                      (KServe)
├── LengthMismatch         422  length mismatch           (KServe)
├── NoInstances            422  Input validation error    (Vertex AI, with `--strict-tgi`)
└── IncompletePrediction   500  Incomplete generation     (both, with `--strict-tgi`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from millrace_router.errors import BatchSizeExceeded, RouterError
from millrace_router.request.limits import Limits

Result = TypeVar("Result")


class NotUtf8(RouterError):
    """The bytes of a tensor are not UTF-8."""

    status = 422
    error_type = "utf8"
    failure_label = "validation"


class LengthMismatch(RouterError):
    """The numbers of inputs and outputs differ."""

    status = 422
    error_type = "length mismatch"
    failure_label = "validation"

    def __init__(self) -> None:
        super().__init__("Inputs and outputs length mismatch")


class NoInstances(RouterError):
    """`instances` is empty; the message is TGI's for Vertex AI."""

    status = 422
    error_type = "Input validation error"
    failure_label = "validation"

    def __init__(self) -> None:
        super().__init__("Input validation error")


class IncompletePrediction(RouterError):
    """TGI's error for any failure; the failure itself has been counted under its own type."""

    error_type = "Incomplete generation"

    def __init__(self) -> None:
        super().__init__("Incomplete generation")


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
