"""The steps of all generating routes before a generation starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from millrace_router.errors import RouterError
from millrace_router.request.request import SchedulingParameters
from millrace_router.request.scheduling import scheduling_from
from millrace_router.server.keys import KEY_NAME
from millrace_router.server.services import SERVICES
from millrace_router.telemetry.metrics import Metrics


@contextmanager
def counting_refusals(metrics: Metrics) -> Iterator[None]:
    """Count a request that fails before a generation is asked for."""
    try:
        yield
    except RouterError as error:
        metrics.request_count.inc()
        if error.failure_label is not None:
            metrics.request_failure.labels(err=error.failure_label).inc()
        raise


def scheduling_of(request: web.Request, priority: int | None) -> SchedulingParameters:
    """Read the scheduling parameters, where `priority` is the body's; raises ValidationError.

    The name of the client's key is its tenant. Only clients without a named key may name a tenant themselves.
    """
    config = request.app[SERVICES].config
    return scheduling_from(
        request.headers,
        priority,
        by_tenant=config.fairness == "tenant",
        key_name=request.get(KEY_NAME),
        max_queue_seconds=config.max_queue_wait,
    )
