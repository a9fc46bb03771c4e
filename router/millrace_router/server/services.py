"""The parts that HTTP handlers use, assembled once the shards have warmed up, and their first steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from millrace_router.access.keys import KEY_NAME, ApiKeys
from millrace_router.adapters.resolver import Resolver
from millrace_router.config import RouterConfig
from millrace_router.engine.adapter_loading import AdapterLoading
from millrace_router.engine.health import Health
from millrace_router.engine.infer import Infer
from millrace_router.errors import InternalError, RouterError
from millrace_router.images.prompts import NO_IMAGES, ImagePrompts
from millrace_router.pooling.model import GENERATES, PoolingModel
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.reasoning.reasoning_format import ReasoningFormat
from millrace_router.recovery.quarantine import Quarantine
from millrace_router.request.limits import Dialect, Limits
from millrace_router.request.request import SchedulingParameters
from millrace_router.request.scheduling import scheduling_from
from millrace_router.server.traces import RequestTraces
from millrace_router.shards.wire import Capacity, ShardInfo
from millrace_router.telemetry.metrics import Metrics
from millrace_router.telemetry.request_log import RequestLog
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.tool_calls.parsing.call_format import CallFormat
from millrace_router.validation.validator import Validator

KEEP_ALIVE_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts of an application."""

    config: RouterConfig
    shard: ShardInfo
    capacity: Capacity
    limits: Limits
    max_batch_prefill_tokens: int
    """The flag's value, or the largest that fits."""
    tokenizer: Tokenizer
    template: ChatTemplate
    tool_format: CallFormat
    """How the model writes tool calls."""
    reasoning: ReasoningFormat | None
    """How the model writes thoughts; None if they are left in the text."""
    validator: Validator
    infer: Infer
    metrics: Metrics
    health: Health
    quarantine: Quarantine
    keys: ApiKeys
    """The keys that clients may present."""
    compute_type: str
    """Value of the `x-compute-type` header."""
    pooling: PoolingModel = GENERATES
    """What the model yields in addition to text."""
    images: ImagePrompts = NO_IMAGES
    """What makes prompts of pictures, for a model that reads them."""
    adapters: Resolver | None = None
    """None if the shards take no adapters."""
    loading: AdapterLoading | None = None
    """The adapters in the shards; None as above."""
    request_log: RequestLog | None = None
    traces: RequestTraces | None = None
    cost: CostModel | None = None
    late: LatePlanning | None = None
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS
    """Silence after which a stream sends a comment."""

    @property
    def dialect(self) -> Dialect:
        return self.limits.dialect

    def defect(self) -> InternalError:
        """Count a defect of this server, and make the error that its client gets."""
        error = InternalError()
        self.metrics.request_failure.labels(err=error.failure_label).inc()
        return error


SERVICES: web.AppKey[Services] = web.AppKey("services", Services)


def count_refusal(metrics: Metrics, error: RouterError) -> None:
    """Count once a request that failed before it started a generation."""
    if error.is_counted:
        return
    error.is_counted = True
    metrics.request_count.inc()
    if error.failure_label is not None:
        metrics.request_failure.labels(err=error.failure_label).inc()


@contextmanager
def counting_refusals(metrics: Metrics) -> Iterator[None]:
    """Count a request that fails within the block, unless its generation has counted it."""
    try:
        yield
    except RouterError as error:
        count_refusal(metrics, error)
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
        address=request.remote,
    )
