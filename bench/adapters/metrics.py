"""The server's metrics of adapters."""

from __future__ import annotations

import urllib.request

from bench.harness.scrape import parse
from bench.harness.server import RunningServer

LOADS = "millrace_adapter_loads_total"
LOAD_SECONDS = "millrace_adapter_load_duration_seconds_sum"


def counted(server: RunningServer) -> dict[str, float]:
    """Loads so far, and their seconds together."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        samples = parse(answer.read().decode())
    return {name: samples.get(name, 0.0) for name in (LOADS, LOAD_SECONDS)}
