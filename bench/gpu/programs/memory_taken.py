"""Another process takes the free memory away: a step runs or is out of memory, and later steps run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bench.gpu.engine.scale import SCALES
from bench.gpu.engine.session import Session, opened
from millrace_shard.device.failures import is_lost, is_out_of_memory

KEPT_BYTES = 64 << 20
"""Memory that the other process leaves, and less than a tensor of this program takes."""
TAKE = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.read()
"""
LENGTH = 24


def main() -> int:
    """Return 0 if an allocation runs out of memory, the device is not lost, and steps run during and after it."""
    device, scale = torch.device("cuda", 0), SCALES["tiny"]
    with opened(scale.small, scale, device, sys.argv[1:]) as model:
        session = model.session(max_rows=2)
        before = tokens(session)
        with memory_taken():
            during = tokens(session)
            seen = "no error"
            try:
                torch.empty(4 * KEPT_BYTES, dtype=torch.uint8, device=device)
            except RuntimeError as error:
                seen = "out of memory" if is_out_of_memory(error) else str(error)
        lost = is_lost(device)
        after = tokens(session)
    same = before == during == after
    print(f"seen as: {seen}, lost: {lost}, same tokens: {same}", flush=True)
    return 0 if seen == "out of memory" and same and not lost else 1


@contextmanager
def memory_taken() -> Iterator[None]:
    """Another process holds almost all free memory during the block."""
    # What this process keeps for later would not be missed.
    torch.cuda.empty_cache()
    command = [sys.executable, "-c", TAKE, str(KEPT_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        if not other.stdout.readline():
            raise RuntimeError("the other process could not take the memory")
        yield
        other.stdin.close()


def tokens(session: Session) -> list[list[int]]:
    """Tokens of two fixed sequences."""
    session.clear()
    results = session.admit(2, LENGTH, room=4) + session.play(2, 3)
    return [result.ids.tolist() for result in results]


if __name__ == "__main__":
    sys.exit(main())
