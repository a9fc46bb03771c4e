"""Health of the server: the shards serve or recover in time, and have generated a token since the last failure."""

from __future__ import annotations

import asyncio

import structlog

from millrace_router.engine.infer import SHORTEST, Batcher
from millrace_router.errors import (
    DoesNotFit,
    GenerationError,
    NonFiniteOutput,
    Overloaded,
    Quarantined,
    RouterError,
    Unhealthy,
)
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.request.token_stream import read_tokens

SINGLE_REQUEST_ERRORS = (NonFiniteOutput, Quarantined, DoesNotFit)
"""Failures of one request, while the shards serve all others."""
PROBE_SECONDS = 0.5
"""Time limit of a check that waits for the probe: half of the default timeout of Kubernetes."""

log = structlog.get_logger(__name__)


class Health:
    """A flag that failures and recoveries clear, and that only generated tokens set again.

    A check sends nothing to the shards: the hang detector finds shards that hang or are gone, and a recovery may take
    its grace period. While the flag is cleared, one probe generation runs for all checks together.
    """

    def __init__(
        self,
        status: ShardStatus,
        batcher: Batcher,
        *,
        probe_seconds: float = PROBE_SECONDS,
    ) -> None:
        """The grace of `status` limits a recovery, and then the time to the next token."""
        self._status = status
        self._batcher = batcher
        self._probe_seconds = probe_seconds
        self._generates = asyncio.Event()
        self._generates.set()
        self._failure: str | None = None
        self._probe: asyncio.Task[None] | None = None
        self._probed_at = 0.0

    def failed(self, error: RouterError) -> None:
        """Clear the flag, unless the failure concerns only one request."""
        if isinstance(error, GenerationError) and not isinstance(error, SINGLE_REQUEST_ERRORS):
            self._generates.clear()

    def generated(self) -> None:
        """Set the flag, because a token has been generated."""
        self._failure = None
        self._generates.set()

    async def check(self) -> None:
        """Return while the shards serve, or recover within their grace; raises Unhealthy."""
        self._check_overdue()
        if self._status.since is not None:
            self._generates.clear()
        if self._generates.is_set():
            return
        probe = self._start_probe()
        if self._status.since is not None:
            return
        await asyncio.wait({probe}, timeout=self._probe_seconds)
        # The shards may have gone for good in the meantime.
        self._check_overdue()
        if self._failure is not None:
            raise Unhealthy(self._failure)
        if probe.done():
            probe.result()
        elif (seconds := self._status.clock() - self._probed_at) > self._status.grace_seconds:
            raise Unhealthy(f"no token has been generated for {seconds:.0f} s")

    async def check_ready(self) -> None:
        """Return while the shards serve; raises Unhealthy."""
        await self.check()
        if self._status.since is not None:
            raise Unhealthy(f"the shards are recovering: {self._status.reason}")

    def _check_overdue(self) -> None:
        status = self._status
        if status.has_given_up:
            raise Unhealthy(f"the shards do not come back: {status.reason}")
        if status.is_overdue:
            seconds = status.outage_seconds
            raise Unhealthy(f"the shards have not served for {seconds:.0f} s: {status.reason}")

    def _start_probe(self) -> asyncio.Task[None]:
        if self._probe is None or self._probe.done():
            self._probed_at = self._status.clock()
            self._probe = asyncio.create_task(self._await_token())
        return self._probe

    async def _await_token(self) -> None:
        """Wait for a token of any request: the probe may wait behind a full queue."""
        request = asyncio.create_task(self._generate())
        others = asyncio.create_task(self._generates.wait())
        try:
            await asyncio.wait({request, others}, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                request.result()
        finally:
            request.cancel()
            others.cancel()
            await asyncio.gather(request, others, return_exceptions=True)

    async def _generate(self) -> None:
        """Run the smallest generation, and set the flag or the failure by its end."""
        try:
            stream = self._batcher.submit(SHORTEST)
            try:
                await read_tokens(stream, lambda _: self.generated())
            finally:
                stream.close()
        except Overloaded:
            # Requests in the full queue will get tokens, if the shards work.
            await self._generates.wait()
        except RouterError as error:
            log.warning("health check failed", error=str(error))
            if not self._generates.is_set():
                self._failure = str(error)
