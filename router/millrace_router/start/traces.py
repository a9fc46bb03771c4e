"""Starts the export of traces and the publication of KV-cache events, if the flags enable them."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from millrace_router.config import RouterConfig
from millrace_router.kv_events.recorder import EventRecorder
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.server.traces import RequestTraces
from millrace_router.start.shards import StartupError
from millrace_router.telemetry.span_sender import SpanSender

if TYPE_CHECKING:
    from millrace_router.kv_events.publisher import EventPublisher


MODULES = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
"""The exporter of each protocol."""
PACKAGES = {
    "grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "http/protobuf": "opentelemetry-exporter-otlp-proto-http",
}
"""The package of each exporter; the extra `otel` has all of them."""
_TCP = re.compile(r"tcp://(?P<host>\*|\[[^\]]+\]|[^:/\[\]]+):(?P<port>[0-9]{1,5})")


def check_traces(config: RouterConfig) -> None:
    """Check that traces can be exported if they are enabled; raises StartupError."""
    target = config.trace_target
    if target is None:
        return
    if target.protocol not in MODULES:
        raise StartupError(f"--otlp-protocol {target.protocol} is not one of {', '.join(MODULES)}")
    if not _is_installed("opentelemetry.sdk.trace") or not _is_installed(MODULES[target.protocol]):
        raise StartupError(
            f"traces over {target.protocol} need OpenTelemetry: pip install opentelemetry-sdk"
            f" {PACKAGES[target.protocol]}, or start without --otlp-endpoint and OTEL_EXPORTER_OTLP_ENDPOINT"
        )


def open_traces(config: RouterConfig, status: ShardStatus) -> RequestTraces | None:
    """Start the process that exports traces; None without `--otlp-endpoint`."""
    target = config.trace_target
    if target is None:
        return None
    sender = SpanSender(
        {
            "endpoint": target.endpoint,
            "protocol": target.protocol,
            "service_name": target.service_name,
            "json_output": config.json_output,
            "log_level": config.log_level,
        }
    )
    return RequestTraces(sender, status, model=config.served_names[0])


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@dataclass(frozen=True, slots=True)
class KvEvents:
    """The recorder of events, and the publisher that sends them."""

    recorder: EventRecorder
    publisher: EventPublisher

    def connect(self) -> None:
        """Publish from now on what the running event loop records, once a turn of it."""
        loop = asyncio.get_running_loop()
        self.recorder.on_event = lambda: loop.call_soon(self.flush)

    def flush(self) -> None:
        batch = self.recorder.take()
        if batch is not None:
            self.publisher.publish(batch)

    def close(self) -> None:
        """Publish what was recorded, and end."""
        self.flush()
        self.recorder.on_event = None
        self.publisher.close()


def check_kv_events(config: RouterConfig) -> None:
    """Check that events can be published if they are enabled; raises StartupError."""
    if config.kv_events is None:
        if config.kv_events_replay is not None:
            raise StartupError("--kv-events-replay needs --kv-events")
        return
    if find_spec("zmq") is None or find_spec("msgpack") is None:
        raise StartupError(
            "--kv-events needs pyzmq and msgpack: pip install pyzmq msgpack, or start without it"
        )
    if config.prefix_caching == "off":
        raise StartupError(
            "--kv-events publishes the prefix cache, which --prefix-caching off disables"
        )
    for flag, address in (
        ("--kv-events", config.kv_events),
        ("--kv-events-replay", config.kv_events_replay),
    ):
        if address is not None:
            _check_address(flag, address, is_open=config.kv_events_any_host)


def open_kv_events(config: RouterConfig, *, block_size: int) -> KvEvents | None:
    """Bind the sockets and record in the running event loop; None if events are off. Raises StartupError."""
    if config.kv_events is None:
        return None
    # The extra may be absent.
    import zmq  # noqa: PLC0415

    from millrace_router.kv_events.publisher import EventPublisher  # noqa: PLC0415

    try:
        publisher = EventPublisher(
            config.kv_events, replay_address=config.kv_events_replay, topic=config.kv_events_topic
        )
    except zmq.ZMQError as error:
        where = " and ".join(filter(None, (config.kv_events, config.kv_events_replay)))
        raise StartupError(f"KV-cache events cannot be published at {where}: {error}") from error
    events = KvEvents(EventRecorder(block_size), publisher)
    events.connect()
    return events


def _check_address(flag: str, address: str, *, is_open: bool) -> None:
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        return
    match = _TCP.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise StartupError(
            f"{flag} is tcp://IP:PORT or ipc://PATH, such as tcp://127.0.0.1:5557. Given: {address}"
        )
    host = match["host"].strip("[]")
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        if host != "*":
            raise StartupError(f"{flag} needs an IP address or *, not the name {host}") from None
        is_local = False
    if not is_local and not is_open:
        raise StartupError(
            f"{flag} {address} is not a loopback address, and events contain prompts: add --kv-events-any-host to"
            " publish them there"
        )
