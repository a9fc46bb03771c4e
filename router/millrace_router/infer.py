"""Between routes and batcher: permits, validation, one generation or several, and what is counted of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from millrace_router.api.native import GenerateRequest
from millrace_router.errors import (
    GenerationError,
    IncompleteGeneration,
    Overloaded,
    RouterError,
    ShuttingDown,
)
from millrace_router.events import Event, Finished, PromptLogprobs, TokenEvent
from millrace_router.metrics import Metrics
from millrace_router.request import ValidRequest
from millrace_router.validation import Validated, Validator, check_best_of, random_seed


class Stream(AsyncIterator[Event], Protocol):
    """What the batcher answers with; times are of `time.monotonic`."""

    queued_at: float
    batched_at: float | None
    finished_at: float | None

    def close(self) -> None:
        """Say that nobody reads any more."""


class Batcher(Protocol):
    """Where valid requests go."""

    def submit(self, request: ValidRequest, /) -> Stream:
        """Queue a request; raises RouterError."""
