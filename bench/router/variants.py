"""The router's CPU time a token with and without a feature, in turn."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

from bench.router.rig import measured, rig, stream

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A router's flags, and fields that the requests have besides the usual ones."""

    name: str
    flags: Sequence[str] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


def journal(options: argparse.Namespace) -> None:
    """Compare a journal of the schedule, and one with token ids, and print their bytes a token on disk."""
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        schedule, tokens = Path(folder) / "schedule", Path(folder) / "tokens"
        variants = (
            Variant("no journal"),
            Variant("schedule", (f"--journal={schedule}",)),
            Variant("with token ids", (f"--journal={tokens}", "--journal-tokens")),
        )
        compare(options, "generate_stream", variants)
        num_tokens = options.streams * (options.rounds * options.tokens + 32) * options.repeats
        for written in (schedule, tokens):
            size = sum(path.stat().st_size for path in written.iterdir())
            print(f"{written.name}: {size / num_tokens:.1f} bytes a token")


def parsers(options: argparse.Namespace) -> None:
    """Compare chats whose answers are searched for thoughts and for calls of tools."""
    flags = ("--reasoning-parser=think", "--tool-call-parser=hermes")
    variants = (
        Variant("parsers off", ("--reasoning-parser=none",)),
        Variant("both on", flags, {"tools": [WEATHER]}),
    )
    compare(options, "chat", variants)


def traces(options: argparse.Namespace) -> None:
    """Compare a router that exports traces."""
    with collector() as url:
        flags = (f"--otlp-endpoint={url}", "--otlp-protocol=http/protobuf")
        compare(options, "generate_stream", (Variant("no traces"), Variant("traces", flags)))


def compare(options: argparse.Namespace, route: str, variants: Sequence[Variant]) -> None:
    """Print CPU microseconds a token of each variant, which take turns, and the ratio to the first."""
    runs: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for _ in range(options.repeats):
        for variant in variants:
            flags = [f"--max-batch-size={options.streams}", *variant.flags]
            with rig(options, flags=flags) as at:
                stream(at, route, streams=options.streams, tokens=32, fields=variant.fields)
                runs[variant.name].append(measured(at, route, options, fields=variant.fields))
    base = median(runs[variants[0].name])
    print(f"\nrouter CPU on {route}, {options.streams} streams")
    print("| router | µs a token (each run) | ratio |\n|---|---|--:|")
    for name, each in runs.items():
        shown = " ".join(f"{run:.1f}" for run in each)
        print(f"| {name} | **{median(each):.1f}** ({shown}) | {median(each) / base:.3f} |")


class _Sink(BaseHTTPRequestHandler):
    """Takes whatever is sent."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Read the spans and forget them."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def collector() -> Iterator[str]:
    """Run a collector of traces over HTTP; yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
