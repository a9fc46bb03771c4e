"""The same load in the simulator: the trace of the requests, and the costs of the server that answered them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.parts.client import Request
from bench.parts.simulation import SimulationFailed

FIELDS = ("arrived_at", "prompt_tokens", "output_tokens", "max_new_tokens", "tenant")


def write_trace(requests: Sequence[Request], path: Path) -> None:
    """Write a line for each request, in the format of `millrace-simulate --trace`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        for request in sorted(requests, key=lambda request: request.due):
            limit = request.output_tokens if request.says_length else ""
            tenant = request.headers.get("x-tenant", "")
            writer.writerow(
                (request.due, request.prompt_tokens, request.output_tokens, limit, tenant)
            )


def simulate(url: str, requests: Sequence[Request], *, folder: Path) -> Mapping[str, float]:
    """Figures of the simulator by its own names, for the server at `url`; raises SimulationFailed."""
    trace, results = folder / "trace.csv", folder / "simulated.json"
    write_trace(requests, trace)
    command = [sys.executable, "-m", "millrace.simulate", f"--server={url}"]
    command += [f"--trace={trace}", f"--json={results}", "--processes=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SimulationFailed(done.stderr.strip()[-500:])
    found: dict[str, float] = json.loads(results.read_text())[0]
    return found
