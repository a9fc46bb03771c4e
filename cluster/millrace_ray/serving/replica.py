"""A replica: a launcher on the node where Ray Serve places it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Event, Thread
from time import sleep
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError

from millrace_ray.host import free_ports
from millrace_ray.serving.directory import directory_of
from millrace_ray.serving.errors import ServingError
from millrace_ray.serving.launcher import LauncherProcess
from millrace_ray.serving.scaling import USED, WAIT

log = logging.getLogger("ray.serve")

RENEW_SECONDS = 1.0
ENTER_SECONDS = 30.0
ANSWER_SECONDS = 10.0
SETTLE_SECONDS = 0.5
"""Time for requests that a proxy sends while it learns of the drain."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The launcher of a replica, and the address of its clients."""

    flags: Mapping[str, str]
    is_on_cluster: bool
    listens: tuple[str, int]
    """Address and port of HAProxy on every node."""
    grace_seconds: float


class Replica:
    """Ray Serve makes it, asks it whether it is healthy, and ends it. Requests go past it."""

    def __init__(self, launch: Launch) -> None:
        """Return once requests are served, and every proxy knows it. Raises ServingError."""
        context = serve.get_replica_context()
        self._launch = launch
        self._name = context.replica_id.unique_id
        self._application = context.app_name
        self._slot: int | None = None
        self._directory: Any = None
        self._leaves = Event()
        flags = dict(launch.flags)
        environment = {}
        if launch.is_on_cluster:
            environment["ray_address"] = ray.get_runtime_context().gcs_address
        address = ray.util.get_node_ip_address()
        (port,) = free_ports(1)
        self._launcher = LauncherProcess(address, port, {**flags, **environment})
        try:
            self._launcher.wait_until_ready()
            self._hold()
        except BaseException:
            self._launcher.end(0)
            raise
        Thread(target=self._renew, daemon=True).start()

    async def check_health(self) -> None:
        """Raise ServingError unless the launcher runs and its router answers."""
        await asyncio.to_thread(self._launcher.check)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        series = await asyncio.to_thread(self._launcher.metrics)
        used = series["millrace_kv_blocks_in_use"] / max(1.0, series["millrace_kv_blocks"])
        return {WAIT: series["millrace_wait_seconds"], USED: used}

    async def __call__(self, _: object) -> str:
        """Answer a request to Ray Serve's own port."""
        return f"Millrace answers at port {self._launch.listens[1]} of every node.\n"

    def __del__(self) -> None:
        """Drain: no new requests, then the launcher's grace for those that run."""
        if not hasattr(self, "_launcher") or self._leaves.is_set() or sys.is_finalizing():
            return
        self._leaves.set()
        self._tell("drain")
        sleep(SETTLE_SECONDS)
        self._launcher.end(self._launch.grace_seconds)
        self._tell("remove")

    def _renew(self) -> None:
        while not self._leaves.wait(RENEW_SECONDS):
            try:
                self._hold()
            except (ServingError, RayError, TimeoutError) as error:
                # Health is Ray Serve's business; the proxies ask the launcher themselves.
                log.warning("the lease was not renewed: %s", error)

    def _hold(self) -> None:
        """Enter the directory. Raises ServingError."""
        launcher = self._launcher
        if self._directory is None:
            # This asks the cluster's head, which may be away later.
            self._directory = directory_of(self._application, self._launch.listens)
        call = self._directory.hold.remote(
            self._name, launcher.address, launcher.port, self._slot, self._launch.listens
        )
        try:
            self._slot = ray.get(call, timeout=ENTER_SECONDS)
        except RayTaskError as error:
            raise ServingError(str(error.cause)) from None
        except RayActorError:
            self._directory = None
            raise

    def _tell(self, method: str) -> None:
        if self._directory is None:
            return
        try:
            ray.get(getattr(self._directory, method).remote(self._name), timeout=ANSWER_SECONDS)
        except (RayError, TimeoutError) as error:
            log.warning("the directory was not informed of the end: %s", error)
