"""Whether the server can do its work: the shards answer, and after a failure they have generated again."""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from millrace_router.errors import (
    GenerationError,
    NonFiniteOutput,
    Overloaded,
    RouterError,
    Unhealthy,
)
from millrace_router.events import TokenEvent
from millrace_router.infer import SHORTEST, Batcher
from millrace_router.shard_client import ShardError

log = structlog.get_logger(__name__)


class Shards(Protocol):
    """The group of shards, as far as their health goes."""

    async def health(self, *, timeout: float) -> None:
        """Ask every shard; raises ShardError unless all answer within `timeout` seconds."""


class Health:
    """A flag that a failed generation takes down, and only generated tokens put up again.

    However many clients ask at once, the shards are asked once.
    """

    def __init__(self, shards: Shards, batcher: Batcher, *, timeout_seconds: float = 10.0) -> None:
        self._shards = shards
        self._batcher = batcher
        self._timeout_seconds = timeout_seconds
        self._generates = asyncio.Event()
        self._generates.set()
        self._check: asyncio.Task[bool] | None = None

    def failed(self, error: RouterError) -> None:
        """Take notice of a request's failure."""
        if isinstance(error, GenerationError) and not isinstance(error, NonFiniteOutput):
            self._generates.clear()

    def generated(self) -> None:
        """Take notice of a token that reached its request."""
        self._generates.set()

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
                if self._generates.is_set():
                    await self._shards.health(timeout=self._timeout_seconds)
                else:
                    await self._generation()
        except (ShardError, RouterError, TimeoutError) as error:
            log.warning("health check failed", error=repr(error))
            return False
        except asyncio.CancelledError:
            # A channel that is reset cancels its calls, though nobody cancelled this task.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            log.warning("health check failed", error="the channel to the shards was reset")
            return False
        return True

    async def _generation(self) -> None:
        """Wait for a token, whoever's: our own probe may stand behind a full queue."""
        probe = asyncio.create_task(self._probe())
        others = asyncio.create_task(self._generates.wait())
        try:
            await asyncio.wait({probe, others}, return_when=asyncio.FIRST_COMPLETED)
            if not self._generates.is_set():
                probe.result()
        finally:
            probe.cancel()
            others.cancel()
            await asyncio.gather(probe, others, return_exceptions=True)

    async def _probe(self) -> None:
        try:
            await self._probe_once()
        except Overloaded:
            # Those who fill the queue will get tokens, if anyone does.
            await self._generates.wait()

    async def _probe_once(self) -> None:
        stream = self._batcher.submit(SHORTEST)
        try:
            async for event in stream:
                if isinstance(event, TokenEvent) and event.finished is not None:
                    self._generates.set()
                    return
            raise Unhealthy
        finally:
            stream.close()
