"""The actor that knows the ready replicas of an application, and keeps an HAProxy on every node."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from millrace_ray.serving.errors import ServingError
from millrace_ray.serving.haproxy import LEASE_TICKS, Replicas
from millrace_ray.serving.node_proxy import NodeProxy

NAMESPACE = "millrace"
TICK_SECONDS = 1.0
START_SECONDS = 20.0
"""For the first proxy of a node, which Ray has to start."""
APPLY_SECONDS = 5.0
"""A node that is cut off holds up the others for that long."""
IDLE_TICKS = 30
"""Without a replica for that long, the application was deleted."""

log = logging.getLogger("ray.serve")


class Directory:
    """One for each application. Replicas call it; when it is restarted they enter again within a lease."""

    def __init__(self, application: str, hostname: str, port: int) -> None:
        self._application = application
        self._listens = (hostname, port)
        self._replicas = Replicas()
        self._proxies: dict[str, Any] = {}
        self._errors: dict[str, str] = {}
        self._finding = asyncio.Lock()
        self._ticks = 0
        self._idle_ticks = 0
        self._ticking: asyncio.Task[None] | None = None

    async def hold(
        self, replica: str, address: str, port: int, slot: int | None, listens: tuple[str, int]
    ) -> int:
        """Enter a replica that is ready, or renew its lease. Its slot; raises ServingError.

        A new one is in the lists of all proxies when this returns.
        """
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick_forever())
        if listens != self._listens:
            raise ServingError(
                f"clients of {self._application} come to {_joined(self._listens)}; to move them to"
                f" {_joined(listens)}, delete the application first"
            )
        if self._replicas.hold(replica, address, port, slot=slot):
            await self._tell_proxies(START_SECONDS)
            if self._errors and len(self._errors) == len(self._proxies):
                self._replicas.remove(replica)
                raise ServingError(next(iter(self._errors.values())))
        return self._replicas.slot_of(replica)

    async def drain(self, replica: str) -> None:
        """Have no proxy send new requests to a replica."""
        self._replicas.drain(replica)
        await self._tell_proxies()

    async def remove(self, replica: str) -> None:
        self._replicas.remove(replica)
        await self._tell_proxies()

    async def _tick_forever(self) -> None:
        while self._idle_ticks < IDLE_TICKS:
            await asyncio.sleep(TICK_SECONDS)
            self._ticks += 1
            self._replicas.tick()
            self._idle_ticks = 0 if len(self._replicas) else self._idle_ticks + 1
            try:
                await self._tell_proxies()
            except RayError as error:
                # The cluster's head may be away; the proxies go on with what they know.
                log.warning("the nodes are not known: %s", error)
        for proxy in self._proxies.values():
            ray.kill(proxy)
        ray.kill(ray.get_runtime_context().current_actor)

    async def _tell_proxies(self, seconds: float = APPLY_SECONDS) -> None:
        async with self._finding:
            # Its calls ask the cluster's head and block while that is away.
            await asyncio.to_thread(self._find_proxies)
        # After a restart of this actor, some replicas have not entered again yet.
        is_complete = self._ticks > LEASE_TICKS
        servers = self._replicas.servers
        calls = {
            node: proxy.apply.remote(servers, is_complete=is_complete)
            for node, proxy in self._proxies.items()
        }
        answers = await asyncio.gather(
            *(asyncio.wait_for(call, seconds) for call in calls.values()),
            return_exceptions=True,
        )
        for node, answer in zip(calls, answers, strict=True):
            self._note(node, answer)

    def _note(self, node: str, answer: BaseException | None) -> None:
        if answer is None:
            self._errors.pop(node, None)
            return
        if isinstance(answer, RayActorError):
            # It is made anew, or its node is gone.
            self._proxies.pop(node, None)
        cause = answer.cause if isinstance(answer, RayTaskError) else answer
        text = str(cause) or type(cause).__name__
        if self._errors.get(node) != text:
            log.warning("the proxy on node %s: %s", node, text)
        self._errors[node] = text

    def _find_proxies(self) -> None:
        """One on each node that lives."""
        nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for node in self._proxies.keys() - nodes:
            ray.kill(self._proxies.pop(node))
            self._errors.pop(node, None)
        for node in nodes - self._proxies.keys():
            name = f"proxy-{self._application}-{node}"
            self._proxies[node] = _detached(NodeProxy, name, node, soft=False).remote(
                *self._listens
            )


def directory_of(application: str, listens: tuple[str, int]) -> Any:  # noqa: ANN401
    """The directory of an application, which is started if there is none."""
    node = ray.get_runtime_context().get_node_id()
    # Rather not on the head's node, which it should outlive.
    actor = _detached(Directory, f"directory-{application}", node, soft=True)
    return actor.remote(application, *listens)


def _detached(kind: type, name: str, node: str, *, soft: bool) -> Any:  # noqa: ANN401
    """The actor of that name, or a new one on the node that outlives its creator and is started again if it ends."""
    return ray.remote(kind).options(
        name=name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=soft),
    )


def _joined(listens: tuple[str, int]) -> str:
    return f"{listens[0]}:{listens[1]}"
