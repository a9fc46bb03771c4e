"""The application: one deployment, whose replicas are launchers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace_ray.serving.arguments import DRAIN_SECONDS, Arguments, read
from millrace_ray.serving.errors import ServingError

try:
    from ray import serve
except ImportError as error:
    raise ServingError(
        "Ray Serve is not installed: run `pip install '.[ray]'` in a checkout, here and on the cluster's hosts"
    ) from error

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from millrace_ray.serving.replica import Launch, Replica
from millrace_ray.serving.scaling import WaitPolicy

NAME = "Replica"
HEALTH_SECONDS = 2.0
HEALTH_TIMEOUT_SECONDS = 5.0
SURGE_PERCENT = 25
"""Of the replicas, rounded up, start beyond their number in an upgrade: each before an old one ends."""


def build(given: Mapping[str, object]) -> serve.Application:
    """From the arguments of `serve run` or of the configuration's `args`. Raises ServingError."""
    arguments = read(given)
    deployment: Any = serve.deployment(Replica).options(**options(arguments))
    launch = Launch(
        flags=arguments.launcher_flags,
        is_on_cluster=arguments.is_on_cluster,
        listens=(arguments.own.hostname, arguments.own.port),
        grace_seconds=arguments.grace_seconds,
    )
    application: serve.Application = deployment.bind(launch)
    return application


def options(arguments: Arguments) -> dict[str, Any]:
    own = arguments.own
    found: dict[str, Any] = {
        "name": NAME,
        "ray_actor_options": {"num_cpus": arguments.num_cpus, "num_gpus": own.num_gpus},
        "health_check_period_s": HEALTH_SECONDS,
        "health_check_timeout_s": HEALTH_TIMEOUT_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": arguments.grace_seconds + DRAIN_SECONDS,
        "max_surge_percent": SURGE_PERCENT,
    }
    if own.max_replicas is None:
        found["num_replicas"] = own.num_replicas or 1
    else:
        found["autoscaling_config"] = AutoscalingConfig(
            min_replicas=own.min_replicas or 1,
            max_replicas=own.max_replicas,
            upscale_delay_s=own.upscale_delay_seconds,
            downscale_delay_s=own.downscale_delay_seconds,
            # Ray Serve calls it deprecated, but up to 2.60 nothing reads the variables that shall replace it.
            metrics_interval_s=own.metrics_interval_seconds,
            policy=AutoscalingPolicy(
                policy_function=WaitPolicy,
                policy_kwargs={"target_wait_seconds": own.target_wait_seconds},
            ),
        )
    return found
