"""Background load: clients in a closed loop."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

from bench.faults.chaos.client import Client
from bench.faults.chaos.population import Request

POLL_SECONDS = 0.02


class Load:
    """Clients that send requests from a population, in an order drawn from the seed; it can be paused."""

    def __init__(
        self, client: Client, requests: Sequence[Request], *, num_clients: int, seed: int
    ) -> None:
        self._client = client
        self._drawing = random.Random(f"load {seed}")
        self._requests = list(requests)
        self._num_clients = num_clients
        self._going = asyncio.Event()
        self._going.set()
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []
        self.num_sent = 0

    def start(self) -> None:
        """Start the clients."""
        order = self._order()
        self._tasks = [asyncio.create_task(self._one(order)) for _ in range(self._num_clients)]

    async def pause(self) -> None:
        """Stop sending, and wait until everything is answered."""
        self._going.clear()
        await self.ended(set(self._client.open))

    def resume(self) -> None:
        """Continue."""
        self._going.set()

    async def ended(self, numbers: set[int]) -> None:
        """Wait until each of these requests has ended."""
        while not numbers.isdisjoint(self._client.open):
            self.check()
            await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        """Let every client finish its request; raises the exception of any client."""
        self._stopped = True
        self._going.set()
        await asyncio.gather(*self._tasks)

    def cancel(self) -> None:
        """Cancel all clients."""
        for task in self._tasks:
            task.cancel()

    def check(self) -> None:
        """Raise the exception of any client."""
        for task in self._tasks:
            if task.done() and not self._stopped:
                task.result()

    def _order(self) -> itertools.chain[Request]:
        rounds = (
            self._drawing.sample(self._requests, k=len(self._requests)) for _ in itertools.count()
        )
        return itertools.chain.from_iterable(rounds)

    async def _one(self, order: itertools.chain[Request]) -> None:
        for request in order:
            await self._going.wait()
            if self._stopped:
                return
            self.num_sent += 1
            await self._client.ask(request)
