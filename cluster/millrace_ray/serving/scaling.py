"""The number of replicas by the predicted wait. Ray Serve runs the policy in its controller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

WAIT = "wait_seconds"
"""Predicted wait of a mean request."""
USED = "kv_used"
"""Part of the KV blocks that sequences own, 0 to 1."""
SHORT = 0.1
"""A wait of that part of the target counts as none."""
FULL = 0.7
"""KV use up to which the others may take a replica's load."""


class Sample(Protocol):
    """A figure and when it was taken."""

    value: float


class Context(Protocol):
    """The part of Ray Serve's context that the policy reads."""

    current_num_replicas: int
    target_num_replicas: int

    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Any, Sequence[Sample]]] | None:
        """By name and replica, the last one at the end."""


class WaitPolicy:
    """More replicas while requests would wait too long, one less while the others could take its load."""

    def __init__(self, target_wait_seconds: float) -> None:
        self._target = target_wait_seconds

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """The number wanted now. Ray Serve applies delays and bounds."""
        metrics = context.raw_metrics or {}
        waits = [samples[-1].value for samples in metrics.get(WAIT, {}).values() if samples]
        used = [samples[-1].value for samples in metrics.get(USED, {}).values() if samples]
        replicas = context.current_num_replicas
        if not replicas == context.target_num_replicas == len(waits) == len(used):
            # Replicas start or end, and the figures would belong to another number.
            return context.target_num_replicas, {}
        return wanted(replicas, waits, used, self._target), {}


def wanted(replicas: int, waits: Sequence[float], used: Sequence[float], target: float) -> int:
    """Replicas for these predicted waits and KV uses; at most twice as many as there are, at least one less."""
    wait = sum(waits) / len(waits)
    if wait > target:
        return min(2 * replicas, math.ceil(replicas * wait / target))
    if replicas > 1 and wait < SHORT * target and sum(used) <= FULL * (replicas - 1):
        return replicas - 1
    return replicas
