"""An engine process for tests: it generates at once, dies, or answers on standard output as well."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench.peers.worker import Limits, Moments, Request, main


class FakeEngine:
    """Gives each request its tokens; a prompt of one token 13 ends the process.

    One of 14 fails, and leaves a thread behind.
    """

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Moments]:
        sys.stdout.write(f"noise that is no answer, {concurrency} at once\n")
        if any(request.ids == [13] for request in requests):
            sys.exit("no thirteen")
        if any(request.ids == [14] for request in requests):
            threading.Thread(target=threading.Event().wait).start()
            raise RuntimeError("no fourteen")
        now = time.perf_counter()
        return [Moments(now, [now + 0.5] * request.new_tokens) for request in requests]


def load(model: Path, limits: Limits) -> FakeEngine:
    if not model.exists():
        raise FileNotFoundError(f"{model} with {limits.threads} threads")
    return FakeEngine()


if __name__ == "__main__":
    main(load)
