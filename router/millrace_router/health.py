"""Whether the server can do its work: the shards answer, and after a failure they have generated again."""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from millrace_router.errors import GenerationError, RouterError, Unhealthy
from millrace_router.events import Finished
from millrace_router.infer import Batcher
from millrace_router.request import ValidRequest
from millrace_router.shard_client import ShardError

PROBE = ValidRequest(input_ids=(0,), max_new_tokens=1)
"""The shortest generation there is."""

log = structlog.get_logger(__name__)


class Shards(Protocol):
    """The group of shards, as far as their health goes."""

    async def health(self, *, timeout: float) -> None:
        """Ask every shard; raises ShardError unless all answer within `timeout` seconds."""


class Health:
    """A flag that a failed generation takes down and only a real generation puts up again.

    However many clients ask at once, the shards are asked once.
    """

    def __init__(self, shards: Shards, batcher: Batcher, *, timeout_seconds: float = 10.0) -> None:
        self._shards = shards
        self._batcher = batcher
        self._timeout_seconds = timeout_seconds
        self._generates = True
        self._check: asyncio.Task[bool] | None = None

    def failed(self, error: RouterError) -> None:
        """Take notice of a request's failure."""
        if isinstance(error, GenerationError):
            self._generates = False

    async def check(self) -> None:
        """Ask the shards; raises Unhealthy."""
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._run())
        # A client that leaves must not end the check of the others.
        if not await asyncio.shield(self._check):
            raise Unhealthy

    async def _run(self) -> bool:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                if self._generates:
                    await self._shards.health(timeout=self._timeout_seconds)
                else:
                    await self._generate()
                    self._generates = True
        except (ShardError, RouterError, TimeoutError) as error:
            log.warning("health check failed", error=repr(error))
            return False
        return True

    async def _generate(self) -> None:
        stream = self._batcher.submit(PROBE)
        try:
            async for event in stream:
                if isinstance(event, Finished):
                    return
            raise Unhealthy
        finally:
            stream.close()
