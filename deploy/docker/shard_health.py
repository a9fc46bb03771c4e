"""Container health check of a shard: exit 0 when its standard gRPC health service says SERVING."""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_SECONDS = 5


def main() -> int:
    """Ask once, at the port of ADDRESS."""
    target = "127.0.0.1:" + os.environ["ADDRESS"].rpartition(":")[2]
    with grpc.insecure_channel(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            sys.stderr.write(f"{target}: {error}\n")
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
