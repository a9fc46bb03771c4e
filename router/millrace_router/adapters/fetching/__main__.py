"""Reads one request from standard input, does it under limits of memory and time, and writes one answer."""

from __future__ import annotations

import json
import math
import resource
import sys
import traceback
from typing import Any

from millrace_router.adapters.fetching.jobs import answer
from millrace_router.process import die_with_parent

BASE_BYTES = 1 << 30
"""Address space of Python, numpy and a header of the largest size."""
COPIES = 3
"""Files of the largest size that a job may hold, for each adapter in it."""
MAX_OPEN_FILES = 64


def main() -> int:
    """Run one job. An error of this program becomes an answer that names the line, and no values."""
    die_with_parent()
    request = json.loads(sys.stdin.buffer.read())
    _limit(request)
    try:
        result = answer(request)
    except MemoryError:
        result = {"error": "broken", "reason": "it needs more memory than it may have"}
    except Exception as error:  # noqa: BLE001
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} in line {frame.lineno} of {frame.name}"
        result = {"error": "broken", "reason": where}
    sys.stdout.write(json.dumps(result))
    return 0


def _limit(request: dict[str, Any]) -> None:
    limits, num_adapters = request["limits"], max(1, len(request.get("digests", ())))
    memory = BASE_BYTES + COPIES * num_adapters * limits["max_bytes"]
    seconds = math.ceil(limits["timeout_seconds"]) + 1
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        # A core file would have the token in it.
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    sys.exit(main())
