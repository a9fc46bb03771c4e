"""Container health check of a shard: exit 0 if its gRPC health service answers SERVING."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_SECONDS = 5


def open_channel(port: str) -> grpc.Channel:
    """A channel with TLS if TLS_CERT, TLS_KEY and TLS_CA are set; the certificate must name localhost."""
    files = [os.environ.get(name) for name in ("TLS_CA", "TLS_KEY", "TLS_CERT")]
    if not any(files):
        return grpc.insecure_channel(f"127.0.0.1:{port}")
    ca, key, cert = (Path(name).read_bytes() if name else None for name in files)
    return grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(ca, key, cert))


def main() -> int:
    """Ask once, at the port of ADDRESS."""
    target = os.environ["ADDRESS"]
    with open_channel(target.rpartition(":")[2]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            sys.stderr.write(f"{target}: {error}\n")
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
